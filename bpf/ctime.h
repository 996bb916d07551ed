/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only */
/*
 * ctime.h - Linux >= 6.13: which inodes did the processes of a sandbox change?
 *
 * Every change of an inode sets its change time, on every file system, and every such setting passes one of two
 * tracepoints: that is all system calls, stores through mappings, io_uring and inherited descriptors at once. No text of
 * the kernel is patched, so it also loads where fentry and kprobes are locked down.
 *
 * What it cannot see, and who does: a second change within one clock tick (user space asks for the times of what changed
 * lately, whereupon the next change gets a finer stamp: multigrain timestamps), a store into a page of a shared mapping
 * that is already writable (whoever has such a mapping and ran counts as changed).
 */
#ifndef CRAB_CTIME_H
#define CRAB_CTIME_H

#include "sandboxes.h"

#define I_NEW 1	  /* of i_state: not yet filled in */
#define RECENT 64 /* seconds */

static __always_inline bool is_new(struct inode *inode)
{
	if (bpf_core_field_exists(struct inode, i_state))
		return inode->i_state & I_NEW;
	if (bpf_core_field_exists(struct inode___structure, i_state))
		return ((struct inode___structure *)inode)->i_state.__state & I_NEW;
	return ((struct inode___number *)inode)->i_state & I_NEW;
}

/* an inode that is being read from disk has its time of then, one that is being made has the time of now */
static __always_inline bool is_now(__s64 seconds)
{
	__s64 distance = seconds - (__s64)(bpf_ktime_get_tai_ns() / 1000000000);

	return distance < RECENT && distance > -RECENT;
}

SEC("tp_btf/inode_set_ctime_to_ts")
int BPF_PROG(ctime_set, struct inode *inode, struct timespec64 *to)
{
	__s64 seconds = to->tv_sec;

	if (is_new(inode))
		return is_now(seconds) ? note_inode(inode, CTIME | CREATED) : 0;
	if (inode->i_ctime_sec == seconds && inode->i_ctime_nsec == (__u32)to->tv_nsec)
		return 0; /* a refresh */
	return note_inode(inode, CTIME);
}

SEC("tp_btf/ctime_ns_xchg")
int BPF_PROG(ctime_exchanged, struct inode *inode)
{
	return note_inode(inode, is_new(inode) ? DATA | CREATED : DATA);
}

#endif
