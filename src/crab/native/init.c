// SPDX-License-Identifier: Apache-2.0
/*
 * crab-init - pid 1 of a sandbox: reaps orphans, starts commands for the host and carries their input and output.
 *
 * Why the commands belong to it: a command that the host starts by nsenter is missing from a dump, and a pipe or file of
 * the host as its output makes the dump fail or the process die after the restore. Here a command is a child of pid 1,
 * its pipes and its terminal end in pid 1, and the only thing that leads outside is the host's connection, which is
 * dropped before a capture (DETACH) and made again afterwards (ATTACH). What a command wrote meanwhile waits in the pipe
 * or in the window below, which keeps each byte until the host has acknowledged it: no output is lost or repeated, be it
 * over a capture, a restore or the death of the daemon.
 *
 * It is started by crab-box with the listening socket as descriptor 3, without rights to gain (no_new_privs) and with
 * the capabilities of a container. Static, one thread, one ppoll loop: few pages and few kernel objects to dump.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include "filter.h"
#include "protocol.h"

#define MAX_EXECS 16384
#define MAX_CONNECTIONS 520
#define MAX_MESSAGE (4 << 20)
#define EXEC_PATH "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

/* one output stream of a command: data[0…filled) are the bytes from offset `acknowledged` on */
struct stream {
	int fd; /* read end of the pipe, or master of the terminal; -1: at its end */
	char *data;
	int64_t acknowledged;
	int filled, sent;
	int drained; /* nothing was left to read after the command had ended */
	int told; /* … and the host was told */
};

struct connection;

struct exec {
	uint32_t id;
	pid_t pid; /* 0: has ended */
	int exited, status;
	int tty, has_input;
	int exit_told;
	int released;
	int input_fd; /* write end of the command's stdin, or a copy of the terminal's master; -1: closed */
	int64_t input; /* bytes of input taken so far */
	char *pending; /* one INPUT message that the pipe could not take at once */
	int pending_size, pending_done, pending_eof;
	struct stream streams[2];
	struct connection *connection;
	char name[NAME_SIZE];
};

struct connection {
	int fd; /* -1: free */
	struct exec *exec;
	int blocked; /* the last send did not fit: wait for POLLOUT */
};

enum kind { LISTENER, CONNECTION, STREAM, INPUT_PIPE };

struct source {
	enum kind kind;
	void *of;
	struct stream *stream;
};

/* The table grows: a command whose output somebody still holds keeps its place, and its pipes, when it has ended */
static struct exec **execs; /* NULL: free */
static int exec_room;
static struct pollfd *polled; /* room for all that there is to wait for */
static struct source *sources;
static struct connection connections[MAX_CONNECTIONS];
static uint32_t last_id;
static struct rlimit files; /* as it was: for the commands */
static volatile sig_atomic_t children_changed = 1;

static void on_child(int number)
{
	(void)number;
	children_changed = 1;
}

static void *pages(size_t size)
{
	void *p = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	return p == MAP_FAILED ? NULL : p;
}

/* ---- sending */

static int send_frame(struct connection *to, struct frame frame, const void *payload, size_t size)
{
	struct iovec parts[2] = { { &frame, sizeof(frame) }, { (void *)payload, size } };
	struct msghdr message = { .msg_iov = parts, .msg_iovlen = size ? 2 : 1 };

	if (!to || to->fd < 0)
		return -1;
	if (sendmsg(to->fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT) >= 0)
		return 0;
	if (errno == EAGAIN || errno == ENOBUFS)
		to->blocked = 1;
	return -1;
}

static void disconnect(struct connection *connection)
{
	if (connection->fd < 0)
		return;
	close(connection->fd);
	connection->fd = -1;
	connection->blocked = 0;
	if (connection->exec && connection->exec->connection == connection)
		connection->exec->connection = NULL;
	connection->exec = NULL;
}

/* the same for what must not be left out: waits for a host that is slow to read, and hangs up on one that does not */
static int send_whole(struct connection *to, struct frame frame, const void *payload, size_t size)
{
	while (send_frame(to, frame, payload, size)) {
		struct pollfd room = { to->fd, POLLOUT, 0 };

		if (!to->blocked || poll(&room, 1, 1000) != 1) {
			disconnect(to);
			return -1;
		}
		to->blocked = 0;
	}
	return 0;
}

static void attach(struct connection *connection, struct exec *exec)
{
	if (exec->connection && exec->connection != connection)
		disconnect(exec->connection);
	if (connection->exec)
		connection->exec->connection = NULL;
	connection->exec = exec;
	exec->connection = connection;
	exec->exit_told = 0;
	for (int i = 0; i < 2; i++)
		exec->streams[i].told = 0;
}

/* tell the host whatever it does not know yet */
static void flush(struct exec *exec)
{
	struct connection *to = exec->connection;

	for (int i = 0; to && !to->blocked && i < 2; i++) {
		struct stream *s = &exec->streams[i];

		if (s->sent < s->filled) {
			struct frame frame = { OUTPUT, i + 1, 0, exec->id, s->acknowledged + s->sent };

			if (send_frame(to, frame, s->data + s->sent, s->filled - s->sent))
				return;
			s->sent = s->filled;
		}
		if (exec->exited && s->drained && !s->told) {
			struct frame frame = { DRAINED, i + 1, 0, exec->id, s->acknowledged + s->filled };

			if (send_frame(to, frame, NULL, 0))
				return;
			s->told = 1;
		}
	}
	if (to && !to->blocked && exec->exited && !exec->exit_told) {
		struct frame frame = { EXITED, 0, 0, exec->id, exec->status };

		if (!send_frame(to, frame, NULL, 0))
			exec->exit_told = 1;
	}
}

/* ---- output */

static void end_stream(struct exec *exec, struct stream *s)
{
	if (s->fd >= 0)
		close(s->fd);
	s->fd = -1;
	s->drained = 1;
	if (exec->tty && exec->input_fd >= 0) {
		close(exec->input_fd);
		exec->input_fd = -1;
	}
}

static void read_stream(struct exec *exec, struct stream *s)
{
	static char waste[WINDOW];

	for (int round = 0; s->fd >= 0 && round < 4; round++) {
		int room = exec->released ? WINDOW : WINDOW - s->filled;
		char *to = exec->released ? waste : s->data + s->filled;
		ssize_t got;

		if (!room)
			return;
		got = read(s->fd, to, room);
		if (got < 0 && errno == EINTR)
			continue;
		if (got < 0 && errno == EAGAIN) {
			if (exec->exited)
				s->drained = 1;
			return;
		}
		if (got <= 0) { /* end of file; a terminal without slaves says EIO */
			end_stream(exec, s);
			return;
		}
		if (!exec->released)
			s->filled += got;
	}
}

/* after the end of a command, find out whether anything is left in its pipes: poll is silent about "nothing" */
static void settle(struct exec *exec)
{
	for (int i = 0; exec->exited && !exec->released && i < 2; i++)
		if (!exec->streams[i].drained)
			read_stream(exec, &exec->streams[i]);
}

static void acknowledge(struct stream *s, int64_t offset)
{
	int64_t bytes = offset - s->acknowledged;

	if (bytes <= 0 || bytes > s->filled)
		return;
	memmove(s->data, s->data + bytes, s->filled - bytes);
	s->filled -= bytes;
	s->sent = s->sent > bytes ? s->sent - bytes : 0;
	s->acknowledged = offset;
}

/* ---- input */

static void close_input(struct exec *exec)
{
	static const char end_of_file = 4; /* ^D; only a terminal in canonical mode takes it as an end */

	if (exec->input_fd < 0)
		return;
	if (exec->tty) {
		if (write(exec->input_fd, &end_of_file, 1) < 0)
			return;
	} else {
		close(exec->input_fd);
		exec->input_fd = -1;
	}
}

static void drop_pending(struct exec *exec)
{
	if (exec->pending)
		munmap(exec->pending, exec->pending_size ? exec->pending_size : 1);
	exec->pending = NULL;
	exec->pending_size = exec->pending_done = exec->pending_eof = 0;
}

/* write what is pending; acknowledge what the command's pipe has taken */
static void write_input(struct exec *exec)
{
	struct frame frame = { INPUT_ACK, 0, 0, exec->id, 0 };

	while (exec->pending && exec->input_fd >= 0 && exec->pending_done < exec->pending_size) {
		ssize_t put = write(exec->input_fd, exec->pending + exec->pending_done,
				    exec->pending_size - exec->pending_done);

		if (put < 0 && errno == EINTR)
			continue;
		if (put < 0 && errno == EAGAIN)
			break;
		if (put < 0) { /* nobody reads it any more */
			close(exec->input_fd);
			exec->input_fd = -1;
			break;
		}
		exec->pending_done += put;
		exec->input += put;
	}
	if (exec->pending && (exec->input_fd < 0 || exec->pending_done == exec->pending_size))
		drop_pending(exec);
	frame.value = exec->input_fd < 0 ? -1 : exec->input;
	send_frame(exec->connection, frame, NULL, 0);
}

static void take_input(struct exec *exec, int64_t offset, const char *data, int size)
{
	int64_t known = exec->input - offset; /* bytes that were sent before a reconnect */

	if (exec->pending || exec->input_fd < 0) {
		write_input(exec);
		return;
	}
	if (!size) {
		if (known == 0)
			close_input(exec);
		return;
	}
	if (known < 0 || known > size)
		known = size;
	if (size > known) {
		exec->pending_size = size - known;
		exec->pending_done = 0;
		exec->pending = pages(exec->pending_size);
		if (!exec->pending)
			return;
		memcpy(exec->pending, data + known, exec->pending_size);
	}
	write_input(exec);
}

/* ---- starting a command */

struct plan {
	struct start start;
	int flags, cgroup;
	char *name, *cwd, **argv, **envp;
};

static void give_up(int fd, char what)
{
	int32_t report[2] = { errno, what };

	if (write(fd, report, sizeof(report)) < 0)
		_exit(126);
	_exit(126);
}

/* in the child; `report` is closed by a successful exec */
static void become(struct plan *plan, int in, int out, int err, const char *slave, int report)
{
	sigset_t none;

	setsid();
	if (slave) {
		in = open(slave, O_RDWR);
		if (in < 0 || ioctl(in, TIOCSCTTY, 0))
			give_up(report, 't');
		out = err = in;
	}
	if (dup2(in, 0) < 0 || dup2(out, 1) < 0 || dup2(err, 2) < 0)
		give_up(report, 'i');
	if (dup2(report, 3) < 0)
		_exit(126);
	report = 3;
	fcntl(report, F_SETFD, FD_CLOEXEC);
	close_range(4, ~0U, 0);
	for (int number = 1; number < 32; number++)
		signal(number, SIG_DFL);
	sigemptyset(&none);
	sigprocmask(SIG_SETMASK, &none, NULL);
	umask(022);
	setrlimit(RLIMIT_NOFILE, &files);
	if (setgroups(plan->start.group_count, plan->start.groups) || setresgid(plan->start.gid, plan->start.gid, plan->start.gid) ||
	    setresuid(plan->start.uid, plan->start.uid, plan->start.uid))
		give_up(report, 'u');
	if (chdir(plan->cwd))
		give_up(report, 'c');
	if (install_filter())
		give_up(report, 's');
	environ = plan->envp;
	if (!getenv("PATH"))
		putenv("PATH=" EXEC_PATH);
	execvp(plan->argv[0], plan->argv);
	give_up(report, 'x');
}

static int parse(struct plan *plan, char *text, size_t size)
{
	char *end = text + size, *p = text + sizeof(struct start);
	uint32_t count;
	char **strings;

	if (size < sizeof(struct start) + 2 || end[-1])
		return -1;
	memcpy(&plan->start, text, sizeof(struct start));
	if (plan->start.argc < 1 || plan->start.argc > 100000 || plan->start.envc > 100000 || plan->start.group_count > 64)
		return -1;
	count = 2 + plan->start.argc + plan->start.envc;
	strings = calloc(count + 2, sizeof(*strings)); /* freed by our end: see serve_start */
	if (!strings)
		return -1;
	for (uint32_t i = 0, at = 0; i < count; i++) {
		if (p >= end) {
			free(strings);
			return -1;
		}
		strings[at++] = p;
		p += strlen(p) + 1;
		if (i == 1 + plan->start.argc)
			strings[at++] = NULL;
	}
	plan->name = strings[0];
	plan->cwd = strings[1];
	plan->argv = strings + 2;
	plan->envp = strings + 2 + plan->start.argc + 1;
	return 0;
}

static int open_terminal(struct plan *plan, char *slave, size_t size)
{
	struct winsize window = { .ws_row = plan->start.rows, .ws_col = plan->start.columns };
	int number, unlock = 0, master = open("/dev/pts/ptmx", O_RDWR | O_NOCTTY | O_CLOEXEC | O_NONBLOCK);

	if (master < 0)
		return -1;
	if (ioctl(master, TIOCSPTLCK, &unlock) || ioctl(master, TIOCGPTN, &number) || ioctl(master, TIOCSWINSZ, &window)) {
		close(master);
		return -1;
	}
	snprintf(slave, size, "/dev/pts/%d", number);
	return master;
}

/* the pipes of a command: [0] its end, [1] ours */
struct ends {
	int in[2], out[2], err[2];
};

static int open_pipes(struct plan *plan, struct ends *ends)
{
	int p[2];

	if (plan->flags & WITH_INPUT) {
		if (pipe2(p, O_CLOEXEC))
			return -1;
		ends->in[0] = p[0];
		ends->in[1] = p[1];
		fcntl(p[1], F_SETFL, O_NONBLOCK);
	} else {
		ends->in[0] = open("/dev/null", O_RDONLY | O_CLOEXEC);
		if (ends->in[0] < 0) /* removed by the sandbox's root: ours is one too */
			ends->in[0] = fcntl(STDIN_FILENO, F_DUPFD_CLOEXEC, 4);
		if (ends->in[0] < 0)
			return -1;
	}
	if (pipe2(p, O_CLOEXEC))
		return -1;
	ends->out[0] = p[1];
	ends->out[1] = p[0];
	fcntl(p[0], F_SETFL, O_NONBLOCK);
	if (pipe2(p, O_CLOEXEC))
		return -1;
	ends->err[0] = p[1];
	ends->err[1] = p[0];
	fcntl(p[0], F_SETFL, O_NONBLOCK);
	return 0;
}

static void close_all(const int *fds, int count)
{
	for (int i = 0; i < count; i++)
		if (fds[i] >= 0)
			close(fds[i]);
}

static void refuse(struct connection *connection, int error, char what)
{
	struct frame frame = { FAILED, what, 0, 0, error };

	send_frame(connection, frame, NULL, 0);
}

static int poll_room(int room)
{
	struct pollfd *more_polled = realloc(polled, (1 + MAX_CONNECTIONS + 3 * room) * sizeof(*polled));
	struct source *more_sources;

	if (!more_polled)
		return -1;
	polled = more_polled;
	more_sources = realloc(sources, (1 + MAX_CONNECTIONS + 3 * room) * sizeof(*sources));
	if (!more_sources)
		return -1;
	sources = more_sources;
	return 0;
}

/* a free place in the table; NULL: there is none */
static struct exec **find_room(void)
{
	int taken = 0, room = exec_room ? 2 * exec_room : 64;
	struct exec **more;

	while (taken < exec_room && execs[taken])
		taken++;
	if (taken < exec_room)
		return &execs[taken];
	if (room > MAX_EXECS || poll_room(room) || !(more = realloc(execs, room * sizeof(*execs))))
		return NULL;
	memset(more + exec_room, 0, (room - exec_room) * sizeof(*more));
	execs = more;
	exec_room = room;
	return &execs[taken];
}

static void start(struct connection *connection, struct plan *plan)
{
	struct clone_args args = { .flags = CLONE_VFORK, .exit_signal = SIGCHLD };
	struct ends ends = { { -1, -1 }, { -1, -1 }, { -1, -1 } };
	struct frame frame = { STARTED, 0, 0, 0, 0 };
	struct exec **place, *exec = NULL;
	int32_t report[2];
	char slave[32];
	int pipe_fds[2];
	pid_t pid;

	for (int i = 0; i < exec_room; i++)
		if (execs[i] && !execs[i]->released && plan->name[0] && !strcmp(execs[i]->name, plan->name)) {
			refuse(connection, EEXIST, 'n');
			return;
		}
	place = find_room();
	if (!place || strlen(plan->name) >= NAME_SIZE || !(exec = calloc(1, sizeof(*exec)))) {
		refuse(connection, place ? EINVAL : EAGAIN, 'n');
		return;
	}
	exec->input_fd = exec->streams[0].fd = exec->streams[1].fd = -1;
	exec->tty = !!(plan->flags & WITH_TTY);
	exec->has_input = exec->tty || plan->flags & WITH_INPUT;
	if (exec->tty) {
		ends.out[1] = open_terminal(plan, slave, sizeof(slave));
		if (ends.out[1] < 0 || (ends.in[1] = fcntl(ends.out[1], F_DUPFD_CLOEXEC, 4)) < 0) {
			refuse(connection, errno, 't');
			close_all((int *)&ends, 6);
			free(exec);
			return;
		}
	} else if (open_pipes(plan, &ends)) {
		refuse(connection, errno, 'p');
		close_all((int *)&ends, 6);
		free(exec);
		return;
	}
	for (int i = 0; i < 2; i++)
		exec->streams[i].data = pages(WINDOW);
	if (!exec->streams[0].data || !exec->streams[1].data || pipe2(pipe_fds, O_CLOEXEC)) {
		refuse(connection, ENOMEM, 'm');
		close_all((int *)&ends, 6);
		for (int i = 0; i < 2; i++)
			if (exec->streams[i].data)
				munmap(exec->streams[i].data, WINDOW);
		free(exec);
		return;
	}
	if (plan->cgroup >= 0) {
		args.flags |= CLONE_INTO_CGROUP;
		args.cgroup = plan->cgroup;
	}
	/* CLONE_VFORK: this process sleeps until the child has executed or given up, so that the report is there */
	pid = syscall(SYS_clone3, &args, sizeof(args));
	if (pid == 0)
		become(plan, ends.in[0], ends.out[0], ends.err[0], exec->tty ? slave : NULL, pipe_fds[1]);
	if (pid < 0) {
		report[0] = errno;
		report[1] = 'f';
	}
	close(pipe_fds[1]);
	if (pid > 0 && read(pipe_fds[0], report, sizeof(report)) != sizeof(report))
		report[0] = 0;
	close(pipe_fds[0]);
	close_all((int[]){ ends.in[0], ends.out[0], ends.err[0] }, 3);
	if (report[0]) {
		refuse(connection, report[0], report[1]);
		close_all((int[]){ ends.in[1], ends.out[1], ends.err[1] }, 3);
		for (int i = 0; i < 2; i++)
			munmap(exec->streams[i].data, WINDOW);
		free(exec);
		return; /* the child is reaped like an orphan */
	}
	*place = exec;
	exec->id = ++last_id;
	exec->pid = pid;
	exec->input_fd = ends.in[1];
	exec->streams[0].fd = ends.out[1];
	exec->streams[1].fd = ends.err[1];
	if (exec->tty)
		exec->streams[1].drained = 1;
	strcpy(exec->name, plan->name);
	frame.exec = exec->id;
	frame.value = pid;
	attach(connection, exec);
	send_frame(connection, frame, NULL, 0);
}

static void release(struct exec *exec)
{
	exec->released = 1;
	if (exec->connection)
		exec->connection->exec = NULL;
	exec->connection = NULL;
	drop_pending(exec);
	if (exec->input_fd >= 0 && !exec->tty) {
		close(exec->input_fd);
		exec->input_fd = -1;
	}
	for (int i = 0; i < 2; i++) {
		if (exec->streams[i].data)
			munmap(exec->streams[i].data, WINDOW);
		exec->streams[i].data = NULL;
	}
}

/* a released exec is free when nobody holds its pipes and its process is gone */
static void forget(struct exec **place)
{
	struct exec *exec = *place;

	if (exec->released && exec->exited && exec->streams[0].fd < 0 && exec->streams[1].fd < 0) {
		close_all(&exec->input_fd, 1);
		free(exec);
		*place = NULL;
	}
}

/* ---- requests */

static struct exec *find(uint32_t id)
{
	for (int i = 0; id && i < exec_room; i++)
		if (execs[i] && execs[i]->id == id && !execs[i]->released)
			return execs[i];
	return NULL;
}

static void list(struct connection *connection)
{
	struct frame done = { DONE, 0, 0, 0, PROTOCOL };

	for (int i = 0; i < exec_room; i++) {
		struct exec *e = execs[i];

		if (e && !e->released) {
			struct frame frame = { ENTRY, 0, 0, e->id, e->pid };
			struct entry entry = { e->exited, e->status, { e->streams[0].acknowledged, e->streams[1].acknowledged },
					       e->input, e->tty, e->has_input, "" };

			memcpy(entry.name, e->name, NAME_SIZE);
			if (send_whole(connection, frame, &entry, sizeof(entry)))
				return;
		}
	}
	send_whole(connection, done, NULL, 0);
}

static int serve(struct connection *connection);

/* Close every line, this one last: a line that only the host has closed would be an end without a peer to CRIU ("Unix
   socket not found"). What was asked on a line before is done first. */
static void detach(struct connection *connection)
{
	struct frame done = { DONE, 0, 0, 0, PROTOCOL };

	for (int i = 0; i < MAX_CONNECTIONS; i++)
		if (connections[i].fd >= 0 && &connections[i] != connection) {
			while (serve(&connections[i]))
				;
			disconnect(&connections[i]);
		}
	send_frame(connection, done, NULL, 0);
	disconnect(connection);
}

static void reattach(struct connection *connection, struct exec *exec, const char *data, size_t size)
{
	int64_t offsets[2];

	if (size != sizeof(offsets))
		return;
	memcpy(offsets, data, sizeof(offsets));
	attach(connection, exec);
	for (int i = 0; i < 2; i++) {
		acknowledge(&exec->streams[i], offsets[i]);
		exec->streams[i].sent = 0;
	}
	write_input(exec);
}

static void signal_exec(struct exec *exec, int number)
{
	pid_t group = exec->pid;

	if (exec->tty && exec->streams[0].fd >= 0 && ioctl(exec->streams[0].fd, TIOCGPGRP, &group))
		group = exec->pid;
	if (group > 1)
		kill(-group, number);
}

static void resize(struct exec *exec, int64_t value)
{
	struct winsize window = { .ws_row = value >> 16, .ws_col = value & 0xffff };

	if (exec->tty && exec->streams[0].fd >= 0)
		ioctl(exec->streams[0].fd, TIOCSWINSZ, &window);
}

static void answer(struct connection *connection, struct frame *frame, char *payload, size_t size, int cgroup)
{
	struct exec *exec = find(frame->exec);

	switch (frame->type) {
	case START: {
		struct plan plan = { .flags = frame->value, .cgroup = cgroup };

		if (parse(&plan, payload, size)) {
			refuse(connection, EINVAL, 'm');
		} else {
			start(connection, &plan);
			free(&plan.argv[-2]);
		}
		return;
	}
	case LIST:
		list(connection);
		return;
	case DETACH:
		detach(connection);
		return;
	}
	if (!exec) {
		refuse(connection, ESRCH, 'e');
		return;
	}
	switch (frame->type) {
	case ATTACH:
		reattach(connection, exec, payload, size);
		break;
	case ACK:
		if (frame->stream == 1 || frame->stream == 2)
			acknowledge(&exec->streams[frame->stream - 1], frame->value);
		break;
	case INPUT:
		take_input(exec, frame->value, payload, size);
		break;
	case SIGNAL:
		signal_exec(exec, frame->value);
		break;
	case RESIZE:
		resize(exec, frame->value);
		break;
	case RELEASE:
		release(exec);
		break;
	}
}

/* take one message; 0 if there is none */
static int serve(struct connection *connection)
{
	char control[CMSG_SPACE(sizeof(int))] __attribute__((aligned(8)));
	struct frame frame;
	struct iovec part = { &frame, sizeof(frame) };
	struct msghdr message = { .msg_iov = &part, .msg_iovlen = 1, .msg_control = control,
				  .msg_controllen = sizeof(control) };
	int cgroup = -1;
	ssize_t size = connection->fd < 0 ? 0 : recv(connection->fd, NULL, 0, MSG_PEEK | MSG_TRUNC | MSG_DONTWAIT);
	char *data;

	if (size < 0 && (errno == EAGAIN || errno == EINTR))
		return 0;
	if (size < (ssize_t)sizeof(frame) || size > MAX_MESSAGE || !(data = pages(size))) {
		disconnect(connection);
		return 0;
	}
	part.iov_base = data;
	part.iov_len = size;
	size = recvmsg(connection->fd, &message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
	for (struct cmsghdr *h = CMSG_FIRSTHDR(&message); h; h = CMSG_NXTHDR(&message, h))
		if (h->cmsg_level == SOL_SOCKET && h->cmsg_type == SCM_RIGHTS)
			memcpy(&cgroup, CMSG_DATA(h), sizeof(cgroup));
	if (size >= (ssize_t)sizeof(frame)) {
		memcpy(&frame, data, sizeof(frame));
		answer(connection, &frame, data + sizeof(frame), size - sizeof(frame), cgroup);
	}
	if (cgroup >= 0)
		close(cgroup);
	munmap(data, part.iov_len);
	return 1;
}

static void accept_host(void)
{
	struct ucred peer = { .pid = -1 };
	socklen_t size = sizeof(peer);
	int fd = accept4(LISTENER_FD, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);

	if (fd < 0)
		return;
	/* a process outside this pid namespace has no number here: only the host may command */
	if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &size) || peer.pid != 0) {
		close(fd);
		return;
	}
	for (int i = 0; i < MAX_CONNECTIONS; i++)
		if (connections[i].fd < 0) {
			connections[i] = (struct connection){ .fd = fd };
			return;
		}
	close(fd);
}

static void reap(void)
{
	int status;
	pid_t pid;

	children_changed = 0;
	while ((pid = waitpid(-1, &status, WNOHANG)) > 0)
		for (int i = 0; i < exec_room; i++)
			if (execs[i] && execs[i]->pid == pid) {
				execs[i]->pid = 0;
				execs[i]->exited = 1;
				execs[i]->status = status;
			}
}

/* ---- the loop */

static int collect(void)
{
	int n = 0;

	polled[n] = (struct pollfd){ LISTENER_FD, POLLIN, 0 };
	sources[n++] = (struct source){ LISTENER, NULL, NULL };
	for (int i = 0; i < MAX_CONNECTIONS; i++)
		if (connections[i].fd >= 0) {
			polled[n] = (struct pollfd){ connections[i].fd, POLLIN | (connections[i].blocked ? POLLOUT : 0), 0 };
			sources[n++] = (struct source){ CONNECTION, &connections[i], NULL };
		}
	for (int i = 0; i < exec_room; i++) {
		struct exec *e = execs[i];

		if (!e)
			continue;
		for (int j = 0; j < 2; j++)
			if (e->streams[j].fd >= 0 && (e->released || e->streams[j].filled < WINDOW)) {
				polled[n] = (struct pollfd){ e->streams[j].fd, POLLIN, 0 };
				sources[n++] = (struct source){ STREAM, e, &e->streams[j] };
			}
		if (e->pending && e->input_fd >= 0) {
			polled[n] = (struct pollfd){ e->input_fd, POLLOUT, 0 };
			sources[n++] = (struct source){ INPUT_PIPE, e, NULL };
		}
	}
	return n;
}

static void handle(struct pollfd *p, struct source *source)
{
	switch (source->kind) {
	case LISTENER:
		accept_host();
		break;
	case CONNECTION: {
		struct connection *c = source->of;

		if (c->fd != p->fd)
			break; /* closed by another request of this round */
		if (p->revents & POLLOUT)
			c->blocked = 0;
		if (p->revents & POLLIN)
			serve(c);
		else if (p->revents & (POLLHUP | POLLERR))
			disconnect(c);
		break;
	}
	case STREAM:
		if (source->stream->fd == p->fd)
			read_stream(source->of, source->stream);
		break;
	case INPUT_PIPE:
		write_input(source->of);
		break;
	}
}

int main(void)
{
	struct sigaction action = { .sa_handler = on_child, .sa_flags = SA_NOCLDSTOP };
	sigset_t blocked, open_mask;

	if (getpid() != 1)
		return 2;
	/* no filter holds it, so nobody inside may trace it or write into its memory (they are the same user) */
	prctl(PR_SET_DUMPABLE, 0);
	for (int i = 0; i < MAX_CONNECTIONS; i++)
		connections[i].fd = -1;
	sigemptyset(&open_mask);
	sigemptyset(&blocked);
	sigaddset(&blocked, SIGCHLD);
	sigprocmask(SIG_SETMASK, &blocked, NULL);
	sigaction(SIGCHLD, &action, NULL);
	signal(SIGPIPE, SIG_IGN);
	fcntl(LISTENER_FD, F_SETFD, FD_CLOEXEC);
	getrlimit(RLIMIT_NOFILE, &files);
	setrlimit(RLIMIT_NOFILE, &(struct rlimit){ files.rlim_max, files.rlim_max });
	if (poll_room(0))
		return 3;
	for (;;) {
		int n = collect();

		if (ppoll(polled, n, NULL, &open_mask) > 0)
			for (int i = 0; i < n; i++)
				if (polled[i].revents)
					handle(&polled[i], &sources[i]);
		if (children_changed)
			reap();
		for (int i = 0; i < exec_room; i++)
			if (execs[i]) {
				settle(execs[i]);
				flush(execs[i]);
				forget(&execs[i]);
			}
	}
}
