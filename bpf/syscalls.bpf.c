// SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only
/*
 * syscalls.bpf.c - tier C, Linux >= 5.17 without tracepoints for change times and without fentry: did the processes of a
 * sandbox call what may change a file?
 *
 * A system call tells what was wanted of which path, not which inode that was. So nearly all that is kept is one note for
 * each kind of call, and it makes a turn capture the files; what cannot be judged at all makes it full.
 *
 * Looked at is the return, since what failed has changed nothing (but for the few errors that come in the middle of work).
 * Two ways to change a file pass no system call: core dumps have a program of their own here; a store into a mapping is seen
 * when the mapping is made, and later ones are left to user space. Numbers are those of the native table: the others are
 * denied in sandboxes (src/crab/native/filter.h).
 *
 * It taxes every system call of the machine while it is attached: numbers are looked at first, as most are of no interest.
 */
#include "tasks.h"
#include "signals.h"
#include <asm/unistd.h>
#include <asm/errno.h>

/* why a note was made: `number` of its key */
enum call {
	WRITTEN = 1, /* content or attributes, by a descriptor */
	NAMED = 2,   /* names or attributes, by a path */
	MAPPED = 3,  /* a file that is open for writing was mapped and shared */
	RING = 4,    /* io_uring */
	REMOTE = 5,  /* access to the memory of other processes, or a write to /proc */
	UNKNOWN = 6, /* a system call that this file does not know */
};

/* newer than the headers of some distributions that this is built on; the same on all architectures */
#define FCHMODAT2 452
#define SETXATTRAT 463
#define REMOVEXATTRAT 466
#define FILE_SETATTR 469
#define LAST_KNOWN 469 /* Linux 6.17 */

#define AF_UNIX 1
#define CREATES (0100 | 01000 | 020000000) /* O_CREAT, O_TRUNC, __O_TMPFILE */
#define IS_TTY_REQUEST(request) (((request) >> 8 & 0xff) == 'T') /* FIOCLEX, FIONREAD … as well */
#define MAP_TYPE 0xf
#define MAP_SHARED 1
#define MAP_SHARED_VALIDATE 3
#define MAP_ANONYMOUS 0x20
#define FMODE_WRITE 2
#define S_IFREG 0100000
#define S_IFDIR 0040000
#define CORE_DUMPED 0x80

#if defined(__TARGET_ARCH_x86)
#define NUMBER(r) ((r)->orig_ax)
#define FIRST(r) ((r)->di)
#define SECOND(r) ((r)->si)
#define THIRD(r) ((r)->dx)
#define FOURTH(r) ((r)->r10)
#define FIFTH(r) ((r)->r8)
#elif defined(__TARGET_ARCH_arm64)
#define NUMBER(r) ((r)->syscallno)
#define FIRST(r) ((r)->orig_x0)
#define SECOND(r) ((r)->regs[1])
#define THIRD(r) ((r)->regs[2])
#define FOURTH(r) ((r)->regs[3])
#define FIFTH(r) ((r)->regs[4])
#endif

static __noinline int note_call(enum call call)
{
	__u32 *slot = current_slot();
	struct key key = { .kind = CALL, .number = call };
	struct value value = {};
	struct box *box;

	box = slot ? bpf_map_lookup_elem(&boxes, slot) : NULL;
	if (!box)
		return 0;
	key.epoch = box->epoch;
	note(*slot, box, &key, &value);
	return 0;
}

/* the file of a descriptor; NULL: somebody has closed it meanwhile */
static __always_inline struct file *file_of(__u32 fd)
{
	struct task_struct *task = (void *)bpf_get_current_task();
	struct fdtable *table = BPF_CORE_READ(task, files, fdt);
	struct file **files = BPF_CORE_READ(table, fd), *file = NULL;

	if (fd < BPF_CORE_READ(table, max_fds))
		bpf_probe_read_kernel(&file, sizeof(file), files + fd);
	return file;
}

/* A descriptor was written to (`content`), or what it leads to was given other attributes. */
static __noinline int note_descriptor(__u32 fd, bool content)
{
	__u32 *slot = current_slot(), type;
	struct found found = {};
	unsigned long magic;
	struct inode *inode;
	struct file *file;

	if (!slot)
		return 0;
	file = file_of(fd);
	if (!file)
		return note_call(WRITTEN);
	inode = BPF_CORE_READ(file, f_inode);
	type = BPF_CORE_READ(inode, i_mode) & S_IFMT;
	if (content && type != S_IFREG && type != S_IFDIR && type != S_IFIFO)
		return 0;
	magic = BPF_CORE_READ(inode, i_sb, s_magic);
	if (magic == PROC)
		return content ? note_call(REMOTE) : 0;
	if (magic == OVERLAYFS && !(content && type == S_IFIFO))
		return note_call(WRITTEN);
	/* a pipe, or a file that can be told by its number as in the other tiers */
	probe_inode(&found, inode);
	if (magic == OVERLAYFS)
		found.magic = 0; /* what is in a named pipe lies in no file */
	return note_found(*slot, &found, DATA);
}

static __always_inline int note_opened(long fd, unsigned long flags)
{
	return flags & CREATES ? note_descriptor(fd, true) : 0;
}

static __always_inline int note_mapping(unsigned long flags, __u32 fd)
{
	struct found found = {};
	struct file *file;

	if (((flags & MAP_TYPE) != MAP_SHARED && (flags & MAP_TYPE) != MAP_SHARED_VALIDATE) || flags & MAP_ANONYMOUS)
		return 0;
	if (!current_slot())
		return 0;
	file = file_of(fd);
	if (!file)
		return note_call(MAPPED);
	if (!(BPF_CORE_READ(file, f_mode) & FMODE_WRITE))
		return 0;
	probe_inode(&found, BPF_CORE_READ(file, f_inode));
	if ((found.mode & S_IFMT) != S_IFREG || (found.magic == TMPFS && found.flags & SB_KERNMOUNT))
		return 0;
	return note_call(MAPPED);
}

/* a socket in the file system; those of other families and without a name, or with an abstract one, are none */
static __always_inline int note_bound(const void *address)
{
	struct {
		unsigned short family;
		char path;
	} name = { AF_UNIX, '?' };

	bpf_probe_read_user(&name, sizeof(name), address);
	return name.family == AF_UNIX && name.path ? note_call(NAMED) : 0;
}

/* errors that may come when a part of the work is done */
static __always_inline bool did_nothing(long result)
{
	return result < 0 && result >= -4095 && result != -EINTR && result != -EIO && result != -ENOMEM &&
	       result != -ENOSPC && result != -EDQUOT;
}

SEC("tp_btf/sys_exit")
int BPF_PROG(returned, struct pt_regs *registers, long result)
{
	long number = NUMBER(registers);

	if (did_nothing(result))
		return 0;
	switch (number) {
	case __NR_write:
	case __NR_pwrite64:
	case __NR_writev:
	case __NR_pwritev:
	case __NR_pwritev2:
	case __NR_sendfile:
		return result ? note_descriptor(FIRST(registers), true) : 0;
	case __NR_splice:
	case __NR_copy_file_range:
		return result ? note_descriptor(THIRD(registers), true) : 0;
	case __NR_ioctl:
		return IS_TTY_REQUEST(SECOND(registers)) ? 0 : note_descriptor(FIRST(registers), true);
	case __NR_fallocate:
	case __NR_ftruncate:
	case __NR_fchmod:
	case __NR_fchown:
	case __NR_fsetxattr:
	case __NR_fremovexattr:
		return note_descriptor(FIRST(registers), false);
#ifdef __NR_open
	case __NR_open:
		return note_opened(result, SECOND(registers));
	case __NR_creat:
		return note_opened(result, CREATES);
#endif
	case __NR_openat:
	case __NR_open_by_handle_at:
		return note_opened(result, THIRD(registers));
	case __NR_openat2: {
		__u64 flags = CREATES;

		bpf_probe_read_user(&flags, sizeof(flags), (void *)THIRD(registers));
		return note_opened(result, flags);
	}
#ifdef __NR_mkdir
	case __NR_mkdir:
	case __NR_rmdir:
	case __NR_unlink:
	case __NR_link:
	case __NR_symlink:
	case __NR_mknod:
	case __NR_rename:
	case __NR_chmod:
	case __NR_chown:
	case __NR_lchown:
#endif
#ifdef __NR_renameat
	case __NR_renameat:
#endif
	case __NR_mkdirat:
	case __NR_unlinkat:
	case __NR_linkat:
	case __NR_symlinkat:
	case __NR_mknodat:
	case __NR_renameat2:
	case __NR_fchmodat:
	case FCHMODAT2:
	case __NR_fchownat:
	case __NR_truncate:
	case __NR_setxattr:
	case __NR_lsetxattr:
	case SETXATTRAT:
	case __NR_removexattr:
	case __NR_lremovexattr:
	case REMOVEXATTRAT:
	case FILE_SETATTR:
		return note_call(NAMED);
	case __NR_io_submit:
	case __NR_acct:
		return note_call(WRITTEN);
	case __NR_bind:
		return note_bound((void *)SECOND(registers));
	case __NR_mmap:
		return note_mapping(FOURTH(registers), FIFTH(registers));
	case __NR_io_uring_setup:
	case __NR_io_uring_enter:
	case __NR_io_uring_register:
		return note_call(RING);
	case __NR_ptrace:
	case __NR_process_vm_writev:
		return note_call(REMOTE);
	}
	return number > LAST_KNOWN ? note_call(UNKNOWN) : 0;
}

/* a core dump is written by the kernel itself */
SEC("tp_btf/sched_process_exit")
int BPF_PROG(ended, struct task_struct *task)
{
	return task->exit_code & CORE_DUMPED ? note_call(WRITTEN) : 0;
}
