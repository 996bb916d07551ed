/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only */
/*
 * kernel.h - the fields of kernel structures that the programs read, and no others.
 *
 * CO-RE relocates every access when a program is loaded, so neither order nor size matters here, and a kernel on which a
 * field is missing refuses the program instead of reading something else. A full vmlinux.h would be 130,000 lines.
 */
#ifndef CRAB_KERNEL_H
#define CRAB_KERNEL_H

#include <linux/bpf.h>
#include <linux/types.h>
#include <stdbool.h>

#pragma clang attribute push(__attribute__((preserve_access_index)), apply_to = record)

struct super_block {
	__u32 s_dev;
	unsigned long s_magic;
	unsigned long s_flags;
};

enum inode_state_flags_t { I_NEW_BIT = 1 };

struct inode_state_flags {
	enum inode_state_flags_t __state;
};

/* three kinds of i_state: a number, an enumeration (6.18 at the latest), a structure that holds it */
struct inode___number {
	unsigned long i_state;
};

struct inode___structure {
	struct inode_state_flags i_state;
};

struct inode {
	enum inode_state_flags_t i_state;
	__s64 i_ctime_sec;
	__u32 i_ctime_nsec;
	unsigned short i_mode;
	unsigned long i_ino;
	struct super_block *i_sb;
	__u32 i_generation;
};

struct file {
	struct inode *f_inode;
	unsigned int f_mode;
	void *private_data;
};

struct dentry {
	struct inode *d_inode;
};

struct fdtable {
	unsigned int max_fds;
	struct file **fd;
};

struct files_struct {
	struct fdtable *fdt;
};

/* what a system call was called with, as it is when it returns */
struct pt_regs {
#if defined(__TARGET_ARCH_x86)
	unsigned long di, si, dx, r10, r8, orig_ax;
#elif defined(__TARGET_ARCH_arm64)
	__u64 regs[31], orig_x0;
	int syscallno;
#endif
};

struct timespec64 {
	__s64 tv_sec;
	long tv_nsec;
};

struct kernfs_node {
	__u64 id;
};

struct cgroup {
	int level;
	struct kernfs_node *kn;
	struct cgroup *ancestors[0];
};

/* until 6.0 the ids of the ancestors, not the ancestors */
struct cgroup___ids {
	__u64 ancestor_ids[0];
};

struct css_set {
	struct cgroup *dfl_cgrp;
};

typedef struct {
	__u64 sig[1];
} sigset_t;

struct sigpending {
	sigset_t signal;
};

struct upid {
	int nr;
};

struct pid {
	unsigned int level;
	struct upid numbers[0];
};

struct rlimit {
	unsigned long rlim_cur, rlim_max;
};

struct signal_struct {
	struct sigpending shared_pending;
	struct pid *pids[4]; /* PIDTYPE_PID, _TGID, _PGID, _SID */
	short oom_score_adj;
	struct rlimit rlim[16];
};

struct sched_entity {
	__u64 sum_exec_runtime;
};

struct mm_struct {
	unsigned long total_vm;
};

struct io_context {
	unsigned short ioprio;
};

struct cpumask {
	unsigned long bits[1];
};

union fpregs_state {
	char bytes[64];
};

struct fpstate {
	union fpregs_state regs;
};

struct fpu {
	struct fpstate *fpstate;
};

struct thread_struct {
	struct fpu fpu; /* until 6.15; from 6.16 it lies behind task_struct */
};

struct task_struct {
	unsigned int __state;
	int exit_state, exit_code;
	int pid, tgid;
	unsigned int flags, ptrace;
	struct css_set *cgroups;
	struct files_struct *files;
	struct signal_struct *signal;
	struct sigpending pending;
	sigset_t blocked;
	__u64 start_boottime;
	struct sched_entity se;
	unsigned long nvcsw, nivcsw, min_flt, maj_flt;
	int static_prio;
	unsigned int rt_priority, policy;
	struct cpumask cpus_mask;
	struct mm_struct *mm;
	struct io_context *io_context;
	__u64 timer_slack_ns;
	struct thread_struct thread;
};

struct seq_file;

struct bpf_iter_meta {
	struct seq_file *seq;
};

struct bpf_iter__task {
	struct bpf_iter_meta *meta;
	struct task_struct *task;
};

#pragma clang attribute pop

#endif
