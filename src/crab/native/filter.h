/* SPDX-License-Identifier: Apache-2.0 */
/*
 * filter.h - the seccomp filter of everything that runs in a sandbox (crab-init itself excepted).
 *
 * It denies what a checkpoint could not bring back, so that such state never arises (law 1, "equal or refuse"):
 *   io_uring, userfaultfd, memfd_secret    CRIU cannot dump them (checkpoint-restore/criu#2131, #2188, #915)
 *   landlock, keyrings, fanotify, bpf, perf, POSIX message queues
 *                                           CRIU knows nothing of them: they would be silently gone after a restore
 *   sockets of other families than unix, inet, inet6, netlink   not dumpable, and some (vsock) know no network namespace
 *   new namespaces                          CRIU does not dump nested user, pid, ipc, cgroup, time and net namespaces
 *   clone3                                  its flags are in memory, where seccomp cannot look; libc falls back to clone
 *   foreign system call ABIs (i386, x32)    their numbers differ; a second table would be a second hole
 * ENOSYS ("this kernel has no such thing") makes programs fall back; EPERM is what a container answers to unshare.
 */
#ifndef CRAB_FILTER_H
#define CRAB_FILTER_H

#include <errno.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/sched.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifndef SYS_memfd_secret
#define SYS_memfd_secret 447
#endif

#if defined(__x86_64__)
#define NATIVE_ARCHITECTURE AUDIT_ARCH_X86_64
#define HIGHEST_CALL 0x40000000 /* x32 calls have this bit */
#elif defined(__aarch64__)
#define NATIVE_ARCHITECTURE AUDIT_ARCH_AARCH64
#define HIGHEST_CALL 0x7fffffff
#else
#error "no seccomp filter for this architecture"
#endif

#define NEW_NAMESPACES                                                                                          \
	(CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS | CLONE_NEWCGROUP | CLONE_NEWNS | \
	 0x80 /* CLONE_NEWTIME; in clone(2) this bit belongs to the exit signal, and no signal has it */)

#define LOAD(field) BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, field))
#define RETURN(value) BPF_STMT(BPF_RET | BPF_K, value)
/* two instructions for each call, so that no jump has to be counted by hand */
#define DENY(call) BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, call, 0, 1), RETURN(SECCOMP_RET_ERRNO | ENOSYS)

static int install_filter(void)
{
	struct sock_filter code[] = {
		LOAD(arch),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, NATIVE_ARCHITECTURE, 1, 0),
		RETURN(SECCOMP_RET_ERRNO | ENOSYS),
		LOAD(nr),
		BPF_JUMP(BPF_JMP | BPF_JGE | BPF_K, HIGHEST_CALL, 0, 1),
		RETURN(SECCOMP_RET_ERRNO | ENOSYS),
		DENY(SYS_io_uring_setup),
		DENY(SYS_io_uring_enter),
		DENY(SYS_io_uring_register),
		DENY(SYS_userfaultfd),
		DENY(SYS_memfd_secret),
		DENY(SYS_clone3),
		DENY(SYS_landlock_create_ruleset),
		DENY(SYS_landlock_add_rule),
		DENY(SYS_landlock_restrict_self),
		DENY(SYS_keyctl),
		DENY(SYS_add_key),
		DENY(SYS_request_key),
		DENY(SYS_fanotify_init),
		DENY(SYS_bpf),
		DENY(SYS_perf_event_open),
		DENY(SYS_mq_open),
		/* sockets: unix, inet, inet6 and netlink are dumped and belong to the network namespace; vsock, for one, is neither */
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_socket, 1, 0),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_socketpair, 0, 7),
		LOAD(args[0]),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, AF_UNIX, 4, 0),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, AF_INET, 3, 0),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, AF_INET6, 2, 0),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, AF_NETLINK, 1, 0),
		RETURN(SECCOMP_RET_ERRNO | EAFNOSUPPORT),
		RETURN(SECCOMP_RET_ALLOW),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_setns, 0, 1),
		RETURN(SECCOMP_RET_ERRNO | EPERM),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_clone, 2, 0),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_unshare, 1, 0),
		RETURN(SECCOMP_RET_ALLOW),
		LOAD(args[0]), /* the flags of both; the low half on little-endian machines */
		BPF_JUMP(BPF_JMP | BPF_JSET | BPF_K, NEW_NAMESPACES, 0, 1),
		RETURN(SECCOMP_RET_ERRNO | EPERM),
		RETURN(SECCOMP_RET_ALLOW),
	};
	struct sock_fprog program = { sizeof(code) / sizeof(code[0]), code };

	return syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, &program);
}

#endif
