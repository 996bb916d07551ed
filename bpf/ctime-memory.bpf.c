// SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
/*
 * ctime-memory.bpf.c - tier A, Linux >= 6.13 where fentry loads: as tier B, and who had access to another's memory.
 *
 * The hooks of hooks.h would add nothing: no change of a file escapes the change time.
 */
#include "memory.h"
#include "tasks.h"
#include "ctime.h"
#include "signals.h"
