/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only */
/*
 * signals.h - who was sent a signal by another process? A process may sleep on and have it waiting, or be stopped by it.
 */
#ifndef CRAB_SIGNALS_H
#define CRAB_SIGNALS_H

#include "sandboxes.h"

/* result 0: it was or will be delivered (TRACE_SIGNAL_DELIVERED) */
SEC("tp_btf/signal_generate")
int BPF_PROG(signalled, int number, void *info, struct task_struct *task, int group, int result)
{
	return result ? 0 : note_task(task, SIGNAL);
}

#endif
