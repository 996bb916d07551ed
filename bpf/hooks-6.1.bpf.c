// SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
/*
 * hooks-6.1.bpf.c - tier A, Linux 5.17 to 6.1: access lists are set as extended attributes there, and have no hook of their
 * own. A pack in which one program has no target does not load at all, so this is one of its own.
 */
#include "hooks.h"
