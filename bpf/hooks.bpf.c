// SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
/*
 * hooks.bpf.c - tier A, Linux 6.2 to 6.12.
 */
#define ACCESS_LISTS
#include "hooks.h"
