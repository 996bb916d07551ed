// SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
/*
 * ctime.bpf.c - tier B, Linux >= 6.13: what changes an inode's change time. Tracepoints only.
 */
#include "tasks.h"
#include "ctime.h"
#include "signals.h"
