/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only */
/*
 * tasks.h - every task of every sandbox in one read of an iterator: did it run, and what of it can others change?
 *
 * A task whose counters did not move did not run, so its memory and registers are what they were (remote writes apart).
 * What another process can change of a sleeping one is listed with it: limits, priority, affinity, groups, pending
 * signals. Registers are there because two loops of a program may differ in nothing else.
 */
#ifndef CRAB_TASKS_H
#define CRAB_TASKS_H

#include "sandboxes.h"

#define LIMITS 16
#define LEGACY_FPU 512 /* the part of the state of FPU and SSE that every x86-64 processor has */

struct task {
	__u32 slot, tgid, pid, state;
	__u32 exit_state, ptrace, policy, rt_priority;
	__s32 static_prio, group, session, oom_score_adj;
	__u64 start; /* CLOCK_BOOTTIME, ns */
	__u64 run;   /* ns */
	__u64 voluntary, involuntary, minor_faults, major_faults;
	__u64 virtual_pages;
	__u64 pending, shared_pending, blocked;
	__u64 affinity, io_priority, timer_slack;
	__u32 flags, has_fpu;
	__u64 limits[LIMITS * 2];
#if defined(__TARGET_ARCH_x86)
	__u64 registers[21]; /* struct pt_regs */
	__u8 fpu[LEGACY_FPU];
#elif defined(__TARGET_ARCH_arm64)
	__u64 registers[34]; /* struct user_pt_regs */
#endif
};

/* a record is larger than a program's stack */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct task);
} record SEC(".maps");

/* number of a group or session as its members see it (innermost namespace): 0 for none of theirs */
static __always_inline int number_in(struct pid *pid)
{
	struct upid last = {};
	unsigned int depth;

	if (!pid)
		return 0;
	depth = BPF_CORE_READ(pid, level);
	if (depth > 31)
		return 0;
	bpf_probe_read_kernel(&last.nr, sizeof(last.nr),
			      (void *)pid + bpf_core_field_offset(struct pid, numbers) +
				      depth * bpf_core_type_size(struct upid) + bpf_core_field_offset(struct upid, nr));
	return last.nr;
}

SEC("iter/task")
int tasks(struct bpf_iter__task *context)
{
	struct task_struct *task = context->task;
	struct signal_struct *signal;
	__u32 zero = 0, *slot;
	struct task *r;
	void *registers;

	if (!task)
		return 0;
	slot = slot_of(task);
	if (!slot)
		return 0;
	r = bpf_map_lookup_elem(&record, &zero);
	if (!r)
		return 0;
	signal = task->signal;
	r->slot = *slot;
	r->tgid = task->tgid;
	r->pid = task->pid;
	r->state = task->__state;
	r->exit_state = task->exit_state;
	r->ptrace = task->ptrace;
	r->policy = task->policy;
	r->rt_priority = task->rt_priority;
	r->static_prio = task->static_prio;
	r->group = number_in(BPF_CORE_READ(signal, pids[2]));
	r->session = number_in(BPF_CORE_READ(signal, pids[3]));
	r->oom_score_adj = BPF_CORE_READ(signal, oom_score_adj);
	r->start = task->start_boottime;
	r->run = BPF_CORE_READ(task, se.sum_exec_runtime);
	r->voluntary = task->nvcsw;
	r->involuntary = task->nivcsw;
	r->minor_faults = task->min_flt;
	r->major_faults = task->maj_flt;
	r->virtual_pages = BPF_CORE_READ(task, mm, total_vm);
	r->pending = BPF_CORE_READ(task, pending.signal.sig[0]);
	r->shared_pending = BPF_CORE_READ(signal, shared_pending.signal.sig[0]);
	r->blocked = BPF_CORE_READ(task, blocked.sig[0]);
	r->affinity = BPF_CORE_READ(task, cpus_mask.bits[0]);
	r->io_priority = BPF_CORE_READ(task, io_context, ioprio);
	r->timer_slack = task->timer_slack_ns;
	r->flags = task->flags;
	bpf_probe_read_kernel(r->limits, sizeof(r->limits), (void *)signal + bpf_core_field_offset(struct signal_struct, rlim));
	registers = (void *)bpf_task_pt_regs(task);
	if (bpf_probe_read_kernel(r->registers, sizeof(r->registers), registers))
		__builtin_memset(r->registers, 0, sizeof(r->registers));
	r->has_fpu = 0;
#if defined(__TARGET_ARCH_x86)
	{
		struct fpu *fpu;
		struct fpstate *state = NULL;

		if (bpf_core_field_exists(struct thread_struct, fpu))
			fpu = (void *)task + bpf_core_field_offset(struct task_struct, thread) + bpf_core_field_offset(struct thread_struct, fpu);
		else
			fpu = (void *)task + bpf_core_type_size(struct task_struct);
		bpf_probe_read_kernel(&state, sizeof(state), (void *)fpu + bpf_core_field_offset(struct fpu, fpstate));
		if (state && !bpf_probe_read_kernel(r->fpu, sizeof(r->fpu), (void *)state + bpf_core_field_offset(struct fpstate, regs)))
			r->has_fpu = 1;
		else
			__builtin_memset(r->fpu, 0, sizeof(r->fpu));
	}
#endif
	bpf_seq_write(context->meta->seq, r, sizeof(*r));
	return 0;
}

#endif
