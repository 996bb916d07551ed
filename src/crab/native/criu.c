// SPDX-License-Identifier: Apache-2.0
/*
 * crab-criu.so - preloaded into CRIU: what it gets wrong on the kernels we run on.
 *
 * 1. Since Linux 6.16 getsockopt(SO_PASSCRED) and (SO_PASSSEC) fail with EOPNOTSUPP on sockets that cannot pass credentials
 *    (all but unix, netlink and bluetooth). CRIU before 4.2 asks every socket and gives up on the error, so no process with
 *    a TCP or UDP socket could be dumped (checkpoint-restore/criu#2705). What the kernel said before, and what such a
 *    socket means, is 0.
 *
 * 2. A task that is stopped in a system call which the kernel would go on with by restart_syscall(2) is given EINTR by CRIU,
 *    in the image and in the running task too (compel/src/lib/infect.c: "Will restore %d with interrupted system call").
 *    A poll without a time limit then fails with EINTR although the program has no signal handler, at every capture;
 *    script(1) ends itself on that. Where nothing is lost by it (no time limit, or one that is an absolute time) the call
 *    begins anew instead: CRIU is told that it was stopped with ERESTARTNOHAND, which it treats so.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <elf.h>
#include <errno.h>
#include <stdarg.h>
#include <string.h>
#include <sys/ptrace.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/user.h>
#include <unistd.h>

#define ERESTARTNOHAND 514 /* of the kernel only: linux/errno.h */
#define ERESTART_RESTARTBLOCK 516
#define WAIT_BITSET 9
#define FUTEX_FLAGS (128 | 256) /* private, clock */

int getsockopt(int fd, int level, int option, void *value, socklen_t *size)
{
	int result = syscall(SYS_getsockopt, fd, level, option, value, size);

	if (result && errno == EOPNOTSUPP && level == SOL_SOCKET && (option == SO_PASSCRED || option == SO_PASSSEC)) {
		memset(value, 0, *size);
		return 0;
	}
	return result;
}

#ifdef __x86_64__
static void begin_anew(struct user_regs_struct *regs)
{
	if ((long)regs->rax != -ERESTART_RESTARTBLOCK)
		return;
	if ((regs->orig_rax == SYS_poll && (int)regs->rdx < 0) ||
	    (regs->orig_rax == SYS_futex && (regs->rsi & ~FUTEX_FLAGS) == WAIT_BITSET))
		regs->rax = -ERESTARTNOHAND;
}

long ptrace(enum __ptrace_request request, ...)
{
	static long (*original)(enum __ptrace_request, pid_t, void *, void *);
	va_list list;
	pid_t pid;
	void *address, *data;
	long result;

	va_start(list, request);
	pid = va_arg(list, pid_t);
	address = va_arg(list, void *);
	data = va_arg(list, void *);
	va_end(list);
	if (!original)
		*(void **)&original = dlsym(RTLD_NEXT, "ptrace");
	result = original(request, pid, address, data);
	if (!result && request == PTRACE_GETREGSET && address == (void *)NT_PRSTATUS)
		begin_anew(((struct iovec *)data)->iov_base);
	return result;
}
#endif
