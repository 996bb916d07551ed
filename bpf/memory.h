/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only */
/*
 * memory.h - who was allowed to write into the memory of another process? Needs fentry; any Linux >= 5.17.
 *
 * process_vm_writev, ptrace and an open of /proc/PID/mem all pass this check once, and then nothing more: a descriptor of
 * /proc/PID/mem that was opened in an earlier turn is not seen. Only accesses from inside a sandbox count: the host looks
 * into processes in order to capture and to compare them.
 */
#ifndef CRAB_MEMORY_H
#define CRAB_MEMORY_H

#include "sandboxes.h"

#define PTRACE_MODE_ATTACH 2

SEC("fentry/security_ptrace_access_check")
int BPF_PROG(memory_accessed, struct task_struct *task, unsigned int mode)
{
	__u32 *mine, *its;

	if (!(mode & PTRACE_MODE_ATTACH))
		return 0;
	mine = current_slot();
	its = mine ? slot_of(task) : NULL;
	return its && *its == *mine ? note_task(task, MEMORY) : 0;
}

#endif
