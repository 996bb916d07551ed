// SPDX-License-Identifier: Apache-2.0
/*
 * crab-box - makes the namespaces and mounts of a sandbox, then runs crab-init or criu in them.
 *
 *   crab-box start    OPTIONS               start a sandbox; prints the host's pid of its init
 *   crab-box restore  OPTIONS -- CRIU …     run `criu restore` where the sandbox is to live
 *   crab-box unblock  --target PID          undo what a capture that was killed has done to the sandbox's loopback
 *   crab-box capture  OPTIONS [-- CRIU …]   freeze a sandbox, run `criu dump` in its network and uts namespace (or take the
 *                                           snapshot alone), thaw it; says "ready", "frozen MS" and "thawed MS"
 *
 *   --range N        first of 65536 uids and gids of the host that the sandbox gets
 *   --cgroup DIR     cgroup2 folder that all of it is born in; of a capture: that is frozen
 *   --join DIR       another cgroup folder (v1 controllers) that this process enters before anything else
 *   --lower DIR      a layer of the root file system, uppermost first; again for each
 *   --upper DIR      the folder that holds u (upper layer) and k (work folder of overlayfs)
 *   --hostname NAME
 *   --clock M:B      restore: what CLOCK_MONOTONIC and CLOCK_BOOTTIME are ahead of the host's, in nanoseconds
 *   --mount KIND:SOURCE:TARGET   a further mount; KIND is rw or ro (a folder of the host), or overlay=DIR (a folder of
 *                    the host with u and k of DIR above it). In `restore` it is left at /run/mN for criu's --external
 *   --bind SOURCE:NAME  show SOURCE as /run/NAME to criu, owned by its root; again for each
 *   --network KIND   none (the default): a network namespace with nothing but loopback. await, of a restore: the same, and
 *                    the command waits until the caller has made a way to the network: "network PID" is said on stdout,
 *                    a byte is read from stdin. host, of a start: the network namespace of the caller
 *   --timeout US     after so many microseconds TCP repeats a packet at the earliest
 *   --images DIR     capture: where criu writes; what lies there tells how far it came
 *   --target PID     capture: init of the sandbox
 *
 * Run as criu's action script (CRTOOLS_SCRIPT_ACTION is set) it freezes the sandbox at "pre-dump" and takes the btrfs
 * snapshot of its files at "post-dump": only there the tasks are frozen and the links that CRIU made for deleted but open
 * files exist.
 *
 * Why not bubblewrap: a shifted user namespace, a devpts without a new /dev, a listener made before pid 1 runs, and
 * criu's own needs would each be a way round it. The steps are in this order because
 *   - the overlay is mounted by root of the host (so that device nodes work and trusted xattrs hold its marks) with the
 *     file system uid of the sandbox's root (else copy-up fails with EOVERFLOW: host uid 0 has no place in the map),
 *     over idmapped copies of its layers (so one image serves all ranges and files on disk keep their owners);
 *   - the network and uts namespaces are made inside the user namespace: in one of the host criu cannot put a TCP
 *     socket into repair mode;
 *   - every mount is made in a mount namespace of this process: none is ever visible on the host, none can be left over.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/btrfs.h>
#include <linux/capability.h>
#include <linux/mount.h>
#include <linux/sched.h>
#include <linux/netlink.h>
#include <linux/pkt_sched.h>
#include <linux/rtnetlink.h>
#include <linux/securebits.h>
#include <net/if.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/fsuid.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "protocol.h"

#ifndef AT_EMPTY_PATH
#define AT_EMPTY_PATH 0x1000
#endif
#define MNT_DETACH 2
int mount(const char *, const char *, const char *, unsigned long, const void *); /* <sys/mount.h> and <linux/mount.h> clash */
int umount2(const char *, int);

#ifndef CLONE_NEWTIME
#define CLONE_NEWTIME 0x80
#endif
#define ROOT "/run/root"
#define MAX_LIST 32
#define IDS 65536
/* index and nfs_export make inotify watches dumpable, redirect_dir lets folders of a lower layer be renamed */
#define OVERLAY "index=on,nfs_export=on,redirect_dir=on,metacopy=off"

static struct {
	uint32_t range;
	const char *cgroup, *upper, *hostname, *network, *clock, *images, *timeout;
	const char *joins[MAX_LIST], *lowers[MAX_LIST], *mounts[MAX_LIST], *binds[MAX_LIST];
	int join_count, lower_count, mount_count, bind_count;
	pid_t target;
	int listener;
	char **command;
} options = { .hostname = "crab", .network = "none", .listener = -1 };

/* what a container's root usually may do; no more than the dumped tasks can get back at a restore */
static const int kept[] = {
	CAP_CHOWN, CAP_DAC_OVERRIDE, CAP_FOWNER, CAP_FSETID, CAP_KILL, CAP_SETGID, CAP_SETUID, CAP_SETPCAP,
	CAP_NET_BIND_SERVICE, CAP_SYS_CHROOT, CAP_MKNOD, CAP_AUDIT_WRITE, CAP_SETFCAP,
};

static void fail(const char *format, ...)
{
	int error = errno;
	va_list list;

	va_start(list, format);
	fputs("crab-box: ", stderr);
	vfprintf(stderr, format, list);
	fprintf(stderr, ": %s\n", strerror(error));
	va_end(list);
	_exit(125);
}

static void check(int failed, const char *what)
{
	if (failed < 0)
		fail("%s", what);
}

static void put(const char *path, const char *text)
{
	int fd = open(path, O_WRONLY | O_CLOEXEC);

	if (fd < 0 || write(fd, text, strlen(text)) != (ssize_t)strlen(text))
		fail("write %s", path);
	close(fd);
}

static char *text(const char *format, ...) __attribute__((format(printf, 1, 2)));
static char *text(const char *format, ...)
{
	char *result;
	va_list list;

	va_start(list, format);
	if (vasprintf(&result, format, list) < 0)
		fail("memory");
	va_end(list);
	return result;
}

/* ---- mounts */

static void make_folder(const char *path)
{
	if (mkdir(path, 0755) && errno != EEXIST)
		fail("mkdir %s", path);
}

/* a copy of the mount at `source` (and of those below it, if it is whole), put at `target`; `userns` >= 0: owners shifted */
static void copy_mount(const char *source, const char *target, int userns, int whole, uint64_t attributes)
{
	struct mount_attr attr = { .attr_set = attributes, .propagation = MS_PRIVATE };
	int flags = OPEN_TREE_CLONE | O_CLOEXEC | (whole ? AT_RECURSIVE : 0);
	int tree = syscall(SYS_open_tree, AT_FDCWD, source, flags);

	if (tree < 0)
		fail("open %s", source);
	if (userns >= 0) {
		attr.attr_set |= MOUNT_ATTR_IDMAP;
		attr.userns_fd = userns;
	}
	if (syscall(SYS_mount_setattr, tree, "", AT_EMPTY_PATH | (whole ? AT_RECURSIVE : 0), &attr, sizeof(attr)))
		fail("shift the owners of %s (needs idmapped mounts: kernel 5.19 for overlay, and a file system that has them)",
		     source);
	if (syscall(SYS_move_mount, tree, "", AT_FDCWD, target, MOVE_MOUNT_F_EMPTY_PATH))
		fail("mount %s at %s", source, target);
	close(tree);
}

static void mount_overlay(char *lower, const char *upper, const char *target)
{
	char *layers = text("lowerdir=%s,upperdir=%s/u,workdir=%s/k," OVERLAY, lower, upper, upper);

	setfsgid(options.range);
	setfsuid(options.range);
	if (mount("overlay", target, "overlay", 0, layers))
		fail("mount overlay (%s)", layers);
	setfsuid(0);
	setfsgid(0);
	free(layers);
}

static void mount_root(int userns)
{
	char *lower = NULL;

	for (int i = 0; i < options.lower_count; i++) {
		char *at = text("/run/l%d", i);

		make_folder(at);
		copy_mount(options.lowers[i], at, userns, 0, MOUNT_ATTR_RDONLY);
		lower = lower ? text("%s:%s", lower, at) : at;
	}
	make_folder("/run/upper");
	make_folder(ROOT);
	copy_mount(options.upper, "/run/upper", userns, 0, 0);
	mount_overlay(lower, "/run/upper", ROOT);
	/* the overlay has its own copies of the layers */
	umount2("/run/upper", MNT_DETACH);
	for (int i = 0; i < options.lower_count; i++)
		umount2(text("/run/l%d", i), MNT_DETACH);
}

struct extra {
	char *kind, *source, *target;
};

static struct extra parse_mount(const char *argument)
{
	struct extra e;
	char *copy = strdup(argument);

	e.kind = strsep(&copy, ":");
	e.source = strsep(&copy, ":");
	e.target = copy;
	if (!e.source || !e.target || e.target[0] != '/') {
		errno = EINVAL;
		fail("--mount %s", argument);
	}
	return e;
}

/* the further mounts wait at /run/m0, /run/m1, … */
static void mount_extras(int userns)
{
	for (int i = 0; i < options.mount_count; i++) {
		struct extra e = parse_mount(options.mounts[i]);
		char *at = text("/run/m%d", i);

		make_folder(at);
		if (!strncmp(e.kind, "overlay=", 8)) {
			make_folder("/run/below");
			make_folder("/run/above");
			copy_mount(e.source, "/run/below", userns, 0, MOUNT_ATTR_RDONLY);
			copy_mount(e.kind + 8, "/run/above", userns, 0, 0);
			mount_overlay("/run/below", "/run/above", at);
			umount2("/run/above", MNT_DETACH);
			umount2("/run/below", MNT_DETACH);
		} else {
			copy_mount(e.source, at, userns, 0,
				   MOUNT_ATTR_NODEV | MOUNT_ATTR_NOSUID | (strcmp(e.kind, "ro") ? 0 : MOUNT_ATTR_RDONLY));
		}
	}
}

/* a mount namespace of our own whose /run is ours */
static void private_mounts(void)
{
	check(unshare(CLONE_NEWNS), "unshare");
	check(mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL), "make mounts private");
}

/* ---- processes */

static int clone_into(uint64_t flags, int cgroup)
{
	struct clone_args args = { .flags = flags, .exit_signal = SIGCHLD };

	if (cgroup >= 0) {
		args.flags |= CLONE_INTO_CGROUP;
		args.cgroup = cgroup;
	}
	return syscall(SYS_clone3, &args, sizeof(args));
}

static void await(int fd, const char *whom)
{
	char byte;

	if (read(fd, &byte, 1) != 1) {
		errno = EPIPE;
		fail("%s", whom);
	}
}

static void become_root(void)
{
	gid_t none = 0;

	check(syscall(SYS_setgroups, 0, &none), "setgroups");
	check(setresgid(0, 0, 0), "setresgid");
	check(setresuid(0, 0, 0), "setresuid");
}

static void raise_loopback(void)
{
	struct ifreq request = { .ifr_name = "lo", .ifr_flags = IFF_UP | IFF_RUNNING };
	int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);

	if (fd < 0 || ioctl(fd, SIOCSIFFLAGS, &request))
		fail("loopback");
	close(fd);
}

/*
 * Let loopback drop every packet of this network namespace, or none.
 *
 * While a sandbox is dumped its tasks stand still, but the kernel's timers do not: an acknowledgement or a retransmission
 * would move bytes between two sockets of which one is dumped already. And while it is restored, CRIU sends what a socket had
 * not sent yet to a peer that may not exist yet, which the kernel would answer with a reset. TCP repeats what was dropped.
 * A queueing discipline without a queue ("blackhole") does it with one message, and needs no rules to find.
 */
static int block_loopback(int on)
{
	struct {
		struct nlmsghdr head;
		struct tcmsg body;
		struct rtattr attribute;
		char kind[16];
	} request = {
		.head = { .nlmsg_type = on ? RTM_NEWQDISC : RTM_DELQDISC, .nlmsg_seq = 1,
			  .nlmsg_flags = NLM_F_REQUEST | NLM_F_ACK | (on ? NLM_F_CREATE | NLM_F_REPLACE : 0) },
		.body = { .tcm_family = AF_UNSPEC, .tcm_ifindex = 1, .tcm_parent = TC_H_ROOT },
		.attribute = { RTA_LENGTH(sizeof("blackhole")), TCA_KIND },
		.kind = "blackhole",
	};
	struct {
		struct nlmsghdr head;
		struct nlmsgerr error;
		char rest[512];
	} answer;
	int fd = socket(AF_NETLINK, SOCK_RAW | SOCK_CLOEXEC, NETLINK_ROUTE), result = -1;

	request.head.nlmsg_len = on ? sizeof(request) : NLMSG_LENGTH(sizeof(request.body));
	if (fd < 0)
		return -1;
	if (send(fd, &request, request.head.nlmsg_len, 0) > 0 && recv(fd, &answer, sizeof(answer), 0) > 0) {
		errno = -answer.error.error;
		result = answer.error.error && !(answer.error.error == -ENOENT && !on) ? -1 : 0;
	}
	close(fd);
	return result;
}

/* whether a TCP connection of this network namespace has bytes that its peer has not acknowledged */
static int has_unacknowledged(void)
{
	static const char *const tables[] = { "/proc/thread-self/net/tcp", "/proc/thread-self/net/tcp6" };
	int found = 0;

	for (size_t i = 0; i < 2; i++) {
		FILE *table = fopen(tables[i], "re");
		unsigned int state, queued;
		char line[512];

		while (table && fgets(line, sizeof(line), table))
			if (sscanf(line, "%*d: %*s %*s %x %x:", &state, &queued) == 2 && state != 10 /* listening */ && queued)
				found = 1;
		if (table)
			fclose(table);
	}
	return found;
}

/*
 * Block loopback for a dump, but only if it must be: what is lost there is sent again only after a while, which the program
 * notices if it happens often. What is under way to a task that stands still is usually acknowledged at once.
 */
static void settle_loopback(void)
{
	for (int round = 0; has_unacknowledged(); round++) {
		if (round == 10) {
			check(block_loopback(1), "loopback");
			return;
		}
		usleep(300);
	}
}

static void drop_capabilities(void)
{
	struct __user_cap_header_struct header = { _LINUX_CAPABILITY_VERSION_3, 0 };
	struct __user_cap_data_struct data[2];
	uint64_t mask = 0;

	for (size_t i = 0; i < sizeof(kept) / sizeof(kept[0]); i++)
		mask |= 1ULL << kept[i];
	for (int cap = 0; cap < 64; cap++)
		if (!(mask >> cap & 1))
			prctl(PR_CAPBSET_DROP, cap, 0, 0, 0);
	for (int half = 0; half < 2; half++) {
		uint32_t bits = mask >> 32 * half;

		data[half] = (struct __user_cap_data_struct){ bits, bits, 0 };
	}
	check(syscall(SYS_capset, &header, data), "capset");
	check(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs");
}

/* ---- pid 1 */

static int bind_listener(void)
{
	struct sockaddr_un address = { .sun_family = AF_UNIX };
	int fd = socket(AF_UNIX, SOCK_SEQPACKET, 0);

	memcpy(address.sun_path, LISTENER_NAME, sizeof(LISTENER_NAME) - 1);
	if (fd < 0 || bind(fd, (void *)&address, offsetof(struct sockaddr_un, sun_path) + sizeof(LISTENER_NAME) - 1))
		fail("bind the listener");
	return fd;
}

/* A sandbox in the host's network namespace still listens in one of its own, that nobody else is in: an abstract name has
   no permissions, so in the host's any process could give commands to init. The host finds it through the socket. */
static void bind_listener_apart(void)
{
	int own = open("/proc/self/ns/net", O_RDONLY | O_CLOEXEC);

	check(own, "network namespace");
	check(unshare(CLONE_NEWNET), "unshare");
	options.listener = bind_listener();
	check(setns(own, CLONE_NEWNET), "setns");
	close(own);
}

/* make a folder and those above it, below the sandbox's root */
static void make_path(const char *path)
{
	char *copy = strdup(path);

	for (char *p = copy + 1; *p; p++)
		if (*p == '/') {
			*p = 0;
			make_folder(copy);
			*p = '/';
		}
	make_folder(copy);
}

#define READY_FD 4

/* `ready` is told by one byte that nothing is left but to execute init */
static void run_init(int ready)
{
	static char *arguments[] = { "crab-init", NULL }, *environment[] = { NULL };
	int listener, null, extras[MAX_LIST];

	check(mount(ROOT, ROOT, NULL, MS_BIND, NULL), "bind root"); /* a mount of ours: the one we inherited is locked */
	check(chdir(ROOT), "chdir root");
	check(mount("proc", "proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL), "mount proc");
	check(mount("devpts", "dev/pts", "devpts", MS_NOSUID | MS_NOEXEC, "newinstance,ptmxmode=0666,mode=620,gid=5"),
	      "mount devpts");
	for (int i = 0; i < options.mount_count; i++) {
		extras[i] = syscall(SYS_open_tree, AT_FDCWD, text("/run/m%d", i), OPEN_TREE_CLONE | O_CLOEXEC);
		check(extras[i], options.mounts[i]);
	}
	check(syscall(SYS_pivot_root, ".", "."), "pivot_root");
	check(umount2(".", MNT_DETACH), "leave the host's root");
	check(chdir("/"), "chdir");
	for (int i = 0; i < options.mount_count; i++) { /* only now: a link in the sandbox must not lead to a folder of the host */
		struct extra e = parse_mount(options.mounts[i]);

		make_path(e.target);
		check(syscall(SYS_move_mount, extras[i], "", AT_FDCWD, e.target, MOVE_MOUNT_F_EMPTY_PATH), options.mounts[i]);
	}
	check(setsid(), "setsid");
	listener = options.listener < 0 ? bind_listener() : options.listener;
	check(listen(listener, 128), "listen for the host"); /* only here: its clients check that pid 1 did it */
	null = open("/dev/null", O_RDWR);
	check(null, "/dev/null");
	drop_capabilities();
	/* the numbers may be taken by each other: first out of the way */
	check(listener = fcntl(listener, F_DUPFD_CLOEXEC, 10), "dup");
	check(ready = fcntl(ready, F_DUPFD_CLOEXEC, 10), "dup");
	check(null = fcntl(null, F_DUPFD_CLOEXEC, 10), "dup");
	check(dup2(listener, LISTENER_FD), "dup2");
	check(dup3(ready, READY_FD, O_CLOEXEC), "dup2");
	for (int fd = 0; fd < 3; fd++)
		check(dup2(null, fd), "dup2");
	close_range(READY_FD + 1, ~0U, 0);
	if (write(READY_FD, "", 1) == 1)
		execve("/.crab/bin/crab-init", arguments, environment);
	if (write(READY_FD, "", 1) < 0)
		_exit(126);
	_exit(126);
}

/* ---- the three commands */

static int open_cgroup(void)
{
	int fd = -1;

	if (options.cgroup) {
		fd = open(options.cgroup, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
		check(fd, options.cgroup);
	}
	return fd;
}

/* enter the v1 groups; 0: ourselves. The first one waits for a grace period of the kernel's, some 10 ms */
static void join(pid_t pid)
{
	for (int i = 0; i < options.join_count; i++)
		put(text("%s/cgroup.procs", options.joins[i]), text("%d", pid));
}

/*
 * In a restore that wait is hidden behind criu's own start: criu is moved while it gets ready, and its hook holds it before it
 * makes the first process of the sandbox. We hold a lock until then, which the kernel lets go if we die; what the
 * file says tells one from the other.
 */
#define JOINED "/run/joined"

static int promise_to_join(void)
{
	struct flock lock = { .l_type = F_WRLCK };
	int fd = open(JOINED, O_CREAT | O_RDWR | O_CLOEXEC, 0644);

	check(fd, JOINED);
	check(fcntl(fd, F_SETLK, &lock), JOINED);
	return fd;
}

static void keep_promise(int fd, pid_t pid)
{
	join(pid);
	check(write(fd, "1", 1), JOINED);
	close(fd);
}

static int await_join(void)
{
	struct flock lock = { .l_type = F_RDLCK };
	int fd = open(JOINED, O_RDONLY | O_CLOEXEC);
	char byte;

	check(fd, JOINED);
	check(fcntl(fd, F_SETLKW, &lock), JOINED);
	return read(fd, &byte, 1) != 1;
}

static void show_binds(int userns)
{
	for (int i = 0; i < options.bind_count; i++) {
		char *source = strdup(options.binds[i]), *name = strrchr(source, ':'), *at;

		if (!name) {
			errno = EINVAL;
			fail("--bind %s", source);
		}
		*name++ = 0;
		at = text("/run/%s", name);
		make_folder(at);
		copy_mount(source, at, userns, 0, 0);
	}
}

/* let the caller make a way to the network */
static void await_network(int out)
{
	int null = open("/dev/null", O_RDONLY | O_CLOEXEC);

	check(null, "/dev/null");
	dprintf(out, "network %d\n", getpid());
	await(STDIN_FILENO, "the caller has made no way to the network");
	check(dup2(null, STDIN_FILENO), "dup2");
}

/* a time namespace whose clocks go on where those of the checkpoint stopped; criu makes none with --unprivileged */
static void shift_clocks(const char *clock)
{
	long long shift[2], giga = 1000000000;
	int fd;

	if (sscanf(clock, "%lld:%lld", &shift[0], &shift[1]) != 2) {
		errno = EINVAL;
		fail("--clock %s", clock);
	}
	check(unshare(CLONE_NEWTIME), "time namespace");
	prctl(PR_SET_DUMPABLE, 1); /* a change of ids has made our own files in /proc root's, who is somebody else here */
	for (int i = 0; i < 2; i++) {
		long long nanoseconds = (shift[i] % giga + giga) % giga;

		put("/proc/self/timens_offsets", text("%s %lld %lld\n", i ? "boottime" : "monotonic", (shift[i] - nanoseconds) / giga, nanoseconds));
	}
	fd = open("/proc/self/ns/time_for_children", O_RDONLY | O_CLOEXEC);
	check(fd, "time namespace");
	check(setns(fd, CLONE_NEWTIME), "enter the time namespace");
	close(fd);
}

/*
 * A network namespace whose TCP connections have a hash table of their own. In the host's, which has room for as many as the
 * host's memory, every list of them (/proc/net/tcp, and each of criu's questions) reads all of it while the sandbox stands
 * still: 3.5 ms with 24 GB. The size is said by the namespace in which a new one is made, so there is one before it
 * that nobody stays in. Linux 6.1; before that it is a namespace like any other.
 */
static void enter_network(void)
{
	int fd;

	check(unshare(CLONE_NEWNET), "unshare");
	fd = open("/proc/sys/net/ipv4/tcp_child_ehash_entries", O_WRONLY | O_CLOEXEC);
	if (fd < 0)
		return;
	if (write(fd, "4096", 4) == 4)
		check(unshare(CLONE_NEWNET), "unshare");
	close(fd);
}

/* unlike put: what this kernel does not have, or does not let us set, is only slower */
static void tune(const char *name, const char *value)
{
	int fd = open(name, O_WRONLY | O_CLOEXEC);

	if (fd >= 0 && write(fd, value, strlen(value)) < 0)
		fprintf(stderr, "crab-box: %s: %s\n", name, strerror(errno));
	if (fd >= 0)
		close(fd);
}

/*
 * A packet that a capture drops (see block_loopback) comes again after a timeout, which doubles each time that the next one is
 * dropped, too: captures in quick succession would hold a connection up for a minute. So the first six times it does not
 * double, and where there is nothing but loopback the caller makes it short. (Linux 6.11; before that it is 200 ms.)
 */
static void set_timeouts(void)
{
	tune("/proc/sys/net/ipv4/tcp_thin_linear_timeouts", "1");
	if (options.timeout)
		tune("/proc/sys/net/ipv4/tcp_rto_min_us", options.timeout);
}

/* start and restore: the first process of the new user namespace */
static void inside(int go, int out, int starting)
{
	int ready[2], told = 0, apart = strcmp(options.network, "host");
	char byte;
	pid_t pid;

	await(go, "the parent of the user namespace is gone");
	become_root();
	check(unshare(CLONE_NEWNS | CLONE_NEWUTS | (starting ? CLONE_NEWIPC : 0)), "unshare");
	check(sethostname(options.hostname, strlen(options.hostname)), "hostname");
	if (apart) {
		enter_network();
		raise_loopback();
		set_timeouts();
	}
	if (options.clock)
		shift_clocks(options.clock);
	if (!starting) {
		if (!strcmp(options.network, "await"))
			await_network(out);
		close(go);
		execv(options.command[0], options.command);
		fail("%s", options.command[0]);
	}
	check(pipe2(ready, O_CLOEXEC), "pipe");
	pid = clone_into(CLONE_NEWPID, -1);
	check(pid, "clone init");
	if (pid == 0) {
		close(ready[0]);
		run_init(ready[1]);
	}
	close(ready[1]);
	while (read(ready[0], &byte, 1) == 1) /* the end comes with the exec; one byte: it worked */
		told++;
	if (told != 1) {
		errno = ECHILD;
		fail(told ? "/.crab/bin/crab-init cannot be executed" : "init could not be set up");
	}
	dprintf(out, "%d\n", pid);
	_exit(0);
}

/* this program as /run/crab-box: criu's action script must be a path that the sandbox's root may go */
static void show_self(void)
{
	int fd = open("/run/crab-box", O_CREAT | O_WRONLY | O_CLOEXEC, 0755);
	char path[4096];
	ssize_t size = readlink("/proc/self/exe", path, sizeof(path) - 1);

	check(fd, "/run/crab-box");
	close(fd);
	check(size, "/proc/self/exe");
	path[size] = 0; /* by its name: the link itself leads into the mount namespace that we came from */
	check(mount(path, "/run/crab-box", NULL, MS_BIND, NULL), "show crab-box");
}

static int enter_new(int starting)
{
	int cgroup = open_cgroup(), go[2], userns, status, promise = -1;
	char *map = text("0 %u %u", options.range, IDS);
	pid_t pid;

	if (starting)
		join(0);
	prctl(PR_SET_SECUREBITS, SECBIT_NO_SETUID_FIXUP); /* a change of fsuid keeps the capabilities */
	private_mounts();
	check(mount("tmpfs", "/run", "tmpfs", MS_NOSUID | MS_NODEV, "mode=755,size=1m"), "tmpfs");
	if (!strcmp(options.network, "host"))
		bind_listener_apart();
	check(pipe2(go, O_CLOEXEC), "pipe");
	pid = clone_into(CLONE_NEWUSER, cgroup);
	check(pid, "clone into a user namespace");
	if (pid == 0) {
		close(go[1]);
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		inside(go[0], STDOUT_FILENO, starting);
	}
	close(go[0]);
	signal(SIGPIPE, SIG_IGN); /* if it dies early, its status is what tells */
	put(text("/proc/%d/uid_map", pid), map);
	put(text("/proc/%d/gid_map", pid), map);
	userns = open(text("/proc/%d/ns/user", pid), O_RDONLY | O_CLOEXEC);
	check(userns, "user namespace");
	mount_root(userns);
	mount_extras(userns);
	show_binds(userns);
	if (!starting) {
		show_self();
		promise = promise_to_join();
	}
	if (write(go[1], "", 1) != 1)
		fprintf(stderr, "crab-box: the first process of the sandbox died at once\n");
	if (!starting)
		keep_promise(promise, pid);
	check(waitpid(pid, &status, 0), "wait");
	return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

static void enter_sandbox(void)
{
	static const char *const kinds[] = { "net", "uts" };

	for (size_t i = 0; i < sizeof(kinds) / sizeof(kinds[0]); i++) {
		int fd = open(text("/proc/%d/ns/%s", options.target, kinds[i]), O_RDONLY | O_CLOEXEC);

		check(fd, "namespace of the sandbox");
		check(setns(fd, 0), "setns");
	}
	private_mounts();
	for (int i = 0; i < options.bind_count; i++) { /* a tmpfs over /run: criu keeps what it learnt of the kernel there */
		char *source = strdup(options.binds[i]), *name = strrchr(source, ':');

		if (name)
			*name = 0;
		check(mount(source, "/run", NULL, MS_BIND, NULL), source);
	}
}

static double now_ms(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1e3 + t.tv_nsec / 1e6;
}

static int is_frozen(void)
{
	char events[256];
	int fd = open(text("%s/cgroup.events", options.cgroup), O_RDONLY | O_CLOEXEC);
	ssize_t size = fd < 0 ? -1 : read(fd, events, sizeof(events) - 1);

	if (fd >= 0)
		close(fd);
	if (size < 0)
		return 0;
	events[size] = 0;
	return strstr(events, "frozen 1") != NULL;
}

static void set_frozen(int on)
{
	int fd = open(text("%s/cgroup.freeze", options.cgroup), O_WRONLY | O_CLOEXEC);

	if (fd >= 0) {
		if (write(fd, on ? "1" : "0", 1) != 1 && on)
			fail("freeze");
		close(fd);
	}
}

/* wait for criu; if the daemon dies meanwhile, criu still gets a moment to end by itself, as that is the cleanest way to
   let go of the tasks that it holds */
static int await_criu(pid_t pid, const sigset_t *watched)
{
	double end = 0;
	int status;

	for (;;) {
		struct timespec step = { .tv_nsec = 50000000 };
		pid_t got = waitpid(pid, &status, WNOHANG);

		if (got == pid)
			return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
		if (got < 0)
			return 125;
		if (end && now_ms() > end)
			kill(pid, SIGKILL);
		if (sigtimedwait(watched, NULL, &step) == SIGTERM && !end)
			end = now_ms() + 800;
	}
}

static int snapshot(void)
{
	const char *from = getenv("CRAB_SNAPSHOT_OF"), *folder = getenv("CRAB_SNAPSHOT_IN"), *name = getenv("CRAB_SNAPSHOT_AS");
	struct btrfs_ioctl_vol_args_v2 args = { .flags = BTRFS_SUBVOL_RDONLY };
	int folder_fd;

	if (!from || !folder || !name || strlen(name) >= sizeof(args.name)) {
		fprintf(stderr, "crab-box: the environment does not say what to snapshot\n");
		return 1;
	}
	args.fd = open(from, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	check(args.fd, from);
	folder_fd = open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	check(folder_fd, folder);
	strcpy(args.name, name);
	check(ioctl(folder_fd, BTRFS_IOC_SNAP_CREATE_V2, &args), "snapshot");
	return 0;
}

/* "ready" on stdout, a byte on stdin (no line leads into the sandbox any more), freeze, "frozen", a byte (the caller has
   looked at what does not move) */
static int freeze_with_caller(int in, int out)
{
	double start, end;
	char byte;

	if (write(out, "ready\n", 6) != 6 || read(in, &byte, 1) != 1)
		return 1;
	start = now_ms();
	end = start + 10000;
	set_frozen(1);
	while (!is_frozen()) {
		if (now_ms() > end) {
			set_frozen(0);
			errno = ETIMEDOUT;
			fail("freeze");
		}
		usleep(50);
	}
	if (options.command || getenv("CRTOOLS_SCRIPT_ACTION"))
		settle_loopback();
	dprintf(out, "frozen %.3f\n", start);
	return read(in, &byte, 1) != 1;
}

/* criu's action script; it calls at every stage, with all descriptors closed: the caller's pipes are those of CRAB_BOX */
static int hook(void)
{
	const char *action = getenv("CRTOOLS_SCRIPT_ACTION"), *box = getenv("CRAB_BOX");

	options.cgroup = getenv("CRAB_FREEZE");
	if (!strcmp(action, "pre-dump") && options.cgroup && box) {
		int in = open(text("/proc/%s/fd/0", box), O_RDONLY | O_CLOEXEC), out = open(text("/proc/%s/fd/1", box), O_WRONLY | O_CLOEXEC);

		check(in, "the caller's input");
		check(out, "the caller's output");
		return freeze_with_caller(in, out);
	}
	if (!strcmp(action, "pre-restore")) /* not earlier: criu tries the kernel out with a connection */
		return await_join() || block_loopback(1) ? 1 : 0;
	if (!strcmp(action, "post-restore")) /* all sockets are there, nothing runs yet */
		return block_loopback(0) ? 1 : 0;
	return strcmp(action, "post-dump") ? 0 : snapshot();
}

/* whether criu had begun to put its code into tasks: it opens the image files of a task right after that */
static int has_touched_tasks(void)
{
	DIR *folder = options.images ? opendir(options.images) : NULL;
	struct dirent *entry;
	int found = !folder;

	while (folder && (entry = readdir(folder)))
		found |= !strncmp(entry->d_name, "core-", 5) || !strncmp(entry->d_name, "mm-", 3) ||
			 !strncmp(entry->d_name, "pagemap-", 8);
	if (folder)
		closedir(folder);
	return found;
}

/*
 * Run criu, or take the snapshot alone; thaw whatever comes. The freezing is begun by criu's pre-dump hook, when criu has
 * been loaded and has learnt about the kernel: all that happens while the sandbox still runs. This process owns it: it
 * is ended by the death of the daemon (PDEATHSIG), and by nothing else without the thaw.
 */
static int capture(void)
{
	sigset_t watched;
	int status = 125, init = syscall(SYS_pidfd_open, options.target, 0);
	pid_t pid, self;

	check(init, "init of the sandbox");
	sigemptyset(&watched);
	sigaddset(&watched, SIGCHLD);
	sigaddset(&watched, SIGTERM);
	sigaddset(&watched, SIGINT);
	sigprocmask(SIG_BLOCK, &watched, NULL);
	signal(SIGPIPE, SIG_IGN);
	check(prctl(PR_SET_PDEATHSIG, SIGTERM), "prctl");
	if (!options.command) {
		status = freeze_with_caller(STDIN_FILENO, STDOUT_FILENO) || snapshot();
	} else {
		enter_sandbox();
		check(setenv("CRAB_FREEZE", options.cgroup, 1), "environment");
		check(setenv("CRAB_BOX", text("%d", getpid()), 1), "environment");
		self = getpid();
		pid = fork();
		if (pid == 0) {
			prctl(PR_SET_PDEATHSIG, SIGKILL);
			if (getppid() != self) /* killed before that: nobody would end criu, which waits for a frozen group for ever */
				_exit(125);
			sigprocmask(SIG_UNBLOCK, &watched, NULL);
			signal(SIGPIPE, SIG_DFL);
			execv(options.command[0], options.command);
			fail("%s", options.command[0]);
		}
		if (pid > 0)
			status = await_criu(pid, &watched);
		/* Killed while its code may have been running in the tasks: some of them may never wake up again, and nothing
		   tells which. The sandbox goes on whole or not at all: it is lost, and its head can be recovered. */
		if (status > 128) {
			fprintf(stderr, "criu was killed by signal %d in the middle of the capture\n", status - 128);
			if (has_touched_tasks())
				syscall(SYS_pidfd_send_signal, init, SIGKILL, NULL, 0);
		}
		if (block_loopback(0))
			fprintf(stderr, "crab-box: loopback stays blocked: %s\n", strerror(errno));
	}
	set_frozen(0);
	dprintf(STDOUT_FILENO, "thawed %.3f\n", now_ms());
	return status;
}

static void add(const char **list, int *count, const char *value)
{
	if (*count == MAX_LIST) {
		errno = E2BIG;
		fail("%s", value);
	}
	list[(*count)++] = value;
}

static void parse(int argc, char **argv)
{
	for (int i = 2; i < argc; i += 2) {
		const char *name = argv[i], *value = argv[i + 1];

		if (!strcmp(name, "--")) {
			options.command = argv + i + 1;
			return;
		}
		if (!value) {
			errno = EINVAL;
			fail("%s", name);
		}
		if (!strcmp(name, "--range"))
			options.range = strtoul(value, NULL, 10);
		else if (!strcmp(name, "--cgroup"))
			options.cgroup = value;
		else if (!strcmp(name, "--upper"))
			options.upper = value;
		else if (!strcmp(name, "--images"))
			options.images = value;
		else if (!strcmp(name, "--clock"))
			options.clock = value;
		else if (!strcmp(name, "--hostname"))
			options.hostname = value;
		else if (!strcmp(name, "--network"))
			options.network = value;
		else if (!strcmp(name, "--timeout"))
			options.timeout = value;
		else if (!strcmp(name, "--target"))
			options.target = atoi(value);
		else if (!strcmp(name, "--join"))
			add(options.joins, &options.join_count, value);
		else if (!strcmp(name, "--lower"))
			add(options.lowers, &options.lower_count, value);
		else if (!strcmp(name, "--mount"))
			add(options.mounts, &options.mount_count, value);
		else if (!strcmp(name, "--bind"))
			add(options.binds, &options.bind_count, value);
		else {
			errno = EINVAL;
			fail("%s", name);
		}
	}
}

int main(int argc, char **argv)
{
	const char *verb = argc > 1 ? argv[1] : "";
	int complete;

	if (getenv("CRTOOLS_SCRIPT_ACTION"))
		return hook();
	parse(argc, argv);
	complete = options.range && options.upper && options.lower_count;
	if (!strcmp(verb, "start") && complete)
		return enter_new(1);
	if (!strcmp(verb, "restore") && complete && options.command && strcmp(options.network, "host"))
		return enter_new(0);
	if (!strcmp(verb, "unblock") && options.target > 1) {
		enter_sandbox();
		return block_loopback(0) ? 125 : 0;
	}
	if (!strcmp(verb, "capture") && options.target > 1 && options.cgroup)
		return capture();
	fprintf(stderr, "usage: crab-box start|restore|capture OPTIONS [-- COMMAND …]; see the head of box.c\n");
	return 125;
}
