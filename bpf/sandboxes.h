/* SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only */
/*
 * sandboxes.h - whose event is it, and where is it kept? Shared by the programs of all tiers.
 *
 * One set of programs serves every sandbox: a sandbox is a cgroup at a fixed depth, and its slot is found by one look-up of
 * the id of the current task's ancestor there. Whoever is in no sandbox leaves after that look-up.
 *
 * What changed is kept as a *set*, not as a stream: one entry for each inode and epoch, however often it changes. A stream
 * loses events when a build makes 600,000 of them in a second, and whoever reads it has to keep up; a set is read when a
 * turn ends. Each sandbox has a set of its own, so that none can fill another's. What does not fit is counted.
 *
 * The epoch is written by user space, into mapped memory, while nothing of the sandbox runs. Entries of an old epoch are
 * deleted once the checkpoint that covers them is published: until then the kernel keeps them, whatever dies.
 */
#ifndef CRAB_SANDBOXES_H
#define CRAB_SANDBOXES_H

#include "kernel.h"
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_tracing.h>
#include <bpf/bpf_core_read.h>

char LICENSE[] SEC("license") = "Dual BSD/GPL";

#define SLOTS 1024
#define ENTRIES 16384 /* of a sandbox's set, if user space does not ask for another size */

/* depth of the sandboxes' cgroups below the root of cgroup2 (which has 0) */
const volatile __u32 level = 3;

enum kind { INODE = 0, TASK = 1, CALL = 2 };

enum flag {
	CTIME = 1,    /* the inode's change time was set to another value */
	DATA = 2,     /* ... by the path that multigrain file systems take for a change that happens now */
	CREATED = 4,  /* the inode was being made */
	SIGNAL = 8,   /* the task was sent a signal by somebody else */
	MEMORY = 16,  /* somebody else was allowed to read or write the task's memory */
};

struct box {
	__u32 epoch;
	__u32 device;	  /* s_dev of the file system that snapshots cover; 0: all of them */
	__u64 changes;	  /* entries made */
	__u64 lost;	  /* ... or not, because the set was full */
	__u64 elsewhere;  /* changes on other file systems */
	__u64 memory_fs;  /* changes on a tmpfs that somebody mounted */
};

struct key {
	__u64 number; /* of the inode, host pid of the process, or a value of enum call (syscalls.bpf.c) */
	__u32 device, generation;
	__u32 epoch;
	__u32 kind;
};

struct value {
	__u64 when; /* CLOCK_MONOTONIC of the newest event, ns */
	__u32 flags;
	__u32 mode;
	__u64 magic;
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, SLOTS);
	__type(key, __u64); /* id of a cgroup: the inode number of its folder */
	__type(value, __u32);
} slots SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, SLOTS);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, __u32);
	__type(value, struct box);
} boxes SEC(".maps");

struct change_set {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, ENTRIES);
	__uint(key_size, sizeof(struct key));
	__uint(value_size, sizeof(struct value));
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY_OF_MAPS);
	__uint(max_entries, SLOTS);
	__type(key, __u32);
	__array(values, struct change_set);
} changes SEC(".maps");

static __always_inline __u32 *current_slot(void)
{
	__u64 id = bpf_get_current_ancestor_cgroup_id(level);

	return id ? bpf_map_lookup_elem(&slots, &id) : NULL;
}

/* id of the sandbox's cgroup that a task is in or below; 0: it is in none */
static __always_inline __u64 cgroup_of(struct task_struct *task)
{
	struct cgroup *own = task->cgroups->dfl_cgrp, *ancestor = NULL;

	if (own->level < (int)level)
		return 0;
	if (!bpf_core_field_exists(struct cgroup, ancestors)) {
		__u64 id = 0;

		bpf_probe_read_kernel(&id, sizeof(id),
				      (void *)own + bpf_core_field_offset(struct cgroup___ids, ancestor_ids) + level * sizeof(id));
		return id;
	}
	bpf_probe_read_kernel(&ancestor, sizeof(ancestor),
			      (void *)own + bpf_core_field_offset(struct cgroup, ancestors) + level * sizeof(void *));
	return ancestor ? BPF_CORE_READ(ancestor, kn, id) : 0;
}

static __always_inline __u32 *slot_of(struct task_struct *task)
{
	__u64 id = cgroup_of(task);

	return id ? bpf_map_lookup_elem(&slots, &id) : NULL;
}

static __always_inline void note(__u32 slot, struct box *box, struct key *key, struct value *value)
{
	struct value *known;
	void *set = bpf_map_lookup_elem(&changes, &slot);

	if (!set) {
		__sync_fetch_and_add(&box->lost, 1);
		return;
	}
	value->when = bpf_ktime_get_ns();
	known = bpf_map_lookup_elem(set, key);
	if (known) {
		known->when = value->when;
		if ((known->flags & value->flags) != value->flags)
			__sync_fetch_and_or(&known->flags, value->flags);
		return;
	}
	if (bpf_map_update_elem(set, key, value, BPF_ANY))
		__sync_fetch_and_add(&box->lost, 1);
	else
		__sync_fetch_and_add(&box->changes, 1);
}

/* ---- inodes */

#define OVERLAYFS 0x794c7630UL
#define PROC 0x9fa0UL
#define SYSFS 0x62656572UL
#define CGROUP2 0x63677270UL
#define CGROUP1 0x27e0ebUL
#define SOCKFS 0x534f434bUL
#define DEVPTS 0x1cd1UL
#define ANON_INODE 0x09041934UL
#define PIDFS 0x50494446UL
#define NSFS 0x6e736673UL
#define TMPFS 0x01021994UL
#define S_IFMT 0170000
#define S_IFIFO 0010000
#define SB_KERNMOUNT (1UL << 22)

/* File systems that hold no file of anybody. (A change on overlayfs is reported for the layer below as well.) */
static __always_inline bool holds_no_files(unsigned long magic)
{
	return magic == OVERLAYFS || magic == PROC || magic == SYSFS || magic == CGROUP2 || magic == CGROUP1 ||
	       magic == SOCKFS || magic == DEVPTS || magic == ANON_INODE || magic == PIDFS || magic == NSFS;
}

/* An inode, read by whoever has a pointer to it: some pointers the verifier trusts, others have to be probed. */
struct found {
	__u64 number, magic, flags; /* flags of the superblock */
	__u32 device, generation, mode;
};

static __always_inline int note_found(__u32 slot, struct found *found, __u32 flags)
{
	struct key key = {};
	struct value value = {};
	struct box *box;

	if (holds_no_files(found->magic))
		return 0;
	/* what a memfd or System V memory lies in: it lives no longer than those who hold it */
	if (found->magic == TMPFS && found->flags & SB_KERNMOUNT)
		return 0;
	box = bpf_map_lookup_elem(&boxes, &slot);
	if (!box)
		return 0;
	if (box->device && found->device != box->device && (found->mode & S_IFMT) != S_IFIFO) {
		__sync_fetch_and_add(found->magic == TMPFS ? &box->memory_fs : &box->elsewhere, 1);
		return 0;
	}
	key.device = found->device;
	key.number = found->number;
	key.generation = found->generation;
	key.epoch = box->epoch;
	value.magic = found->magic;
	value.mode = found->mode;
	value.flags = flags;
	note(slot, box, &key, &value);
	return 0;
}

static __always_inline int note_inode(struct inode *inode, __u32 flags)
{
	__u32 *slot = current_slot();
	struct found found = {};
	struct super_block *sb;

	if (!slot)
		return 0;
	sb = inode->i_sb;
	found.magic = sb->s_magic;
	found.flags = sb->s_flags;
	found.device = sb->s_dev;
	found.number = inode->i_ino;
	found.generation = inode->i_generation;
	found.mode = inode->i_mode;
	return note_found(*slot, &found, flags);
}

static __always_inline void probe_inode(struct found *found, struct inode *inode)
{
	struct super_block *sb = BPF_CORE_READ(inode, i_sb);

	found->magic = BPF_CORE_READ(sb, s_magic);
	found->flags = BPF_CORE_READ(sb, s_flags);
	found->device = BPF_CORE_READ(sb, s_dev);
	found->number = BPF_CORE_READ(inode, i_ino);
	found->generation = BPF_CORE_READ(inode, i_generation);
	found->mode = BPF_CORE_READ(inode, i_mode);
}

/* ---- tasks */

static __always_inline int note_task(struct task_struct *task, __u32 flags)
{
	__u32 *slot;
	struct key key = {};
	struct value value = {};
	struct box *box;

	if (task->tgid == (int)(bpf_get_current_pid_tgid() >> 32))
		return 0;
	slot = slot_of(task);
	if (!slot)
		return 0;
	box = bpf_map_lookup_elem(&boxes, slot);
	if (!box)
		return 0;
	key.number = task->tgid;
	key.epoch = box->epoch;
	key.kind = TASK;
	value.flags = flags;
	note(*slot, box, &key, &value);
	return 0;
}

#endif
