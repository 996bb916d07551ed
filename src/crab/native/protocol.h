/* SPDX-License-Identifier: Apache-2.0 */
/*
 * protocol.h - what the host and crab-init say to each other over a SOCK_SEQPACKET socket.
 *
 * Its name is abstract, so it lives in the sandbox's network namespace and nowhere in its file system. (CRIU could not
 * restore one with a path in an init that has lost a child with a session of its own: checkpoint-restore/criu#2687.)
 *
 * Each message is a struct frame, followed by `size - sizeof(struct frame)` bytes. Numbers are in host byte order: both
 * ends are on one machine. src/crab/sandbox/wire.py is the other end; the two change together (PROTOCOL).
 */
#ifndef CRAB_PROTOCOL_H
#define CRAB_PROTOCOL_H

#include <stdint.h>

#define PROTOCOL 1
#define LISTENER_FD 3
#define LISTENER_NAME "\0crab-init"
#define NAME_SIZE 64
#define WINDOW 65536 /* bytes of one output stream that init keeps until they are acknowledged */

enum frame_type {
	/* host to init */
	START = 1,  /* value: flags; payload: struct start, then strings. Attaches this connection */
	ATTACH,	    /* exec; payload: int64 offsets of stdout and stderr to go on from. Steals from an older connection */
	ACK,	    /* exec, stream, value: offset up to which the host has the output */
	INPUT,	    /* exec, value: offset of the first byte; payload: data. No payload: end of file at that offset */
	SIGNAL,	    /* exec, value: number of the signal; to the process group of the command, or the tty's foreground */
	RESIZE,	    /* exec, value: rows << 16 | columns */
	LIST,	    /* answered by one ENTRY per exec, then DONE */
	RELEASE,    /* exec: forget it. Its pipes are drained until nobody holds them */
	DETACH,	    /* close every connection; answered by DONE, then this one is closed too. Output waits inside until ATTACH */

	/* init to host */
	STARTED = 64, /* exec, value: pid inside the sandbox */
	FAILED,	      /* value: errno, stream: what failed (a character) */
	OUTPUT,	      /* exec, stream, value: offset of the first byte; payload: data */
	DRAINED,      /* exec, stream, value: offset; the command has ended and all it wrote before is sent */
	EXITED,	      /* exec, value: wait status */
	INPUT_ACK,    /* exec, value: offset up to which the command's pipe has taken the input; -1: it is closed */
	ENTRY,	      /* exec, value: pid; payload: struct entry */
	DONE,	      /* value: PROTOCOL */
};

enum start_flag { WITH_TTY = 1, WITH_INPUT = 2 };

struct frame {
	uint8_t type;
	uint8_t stream; /* 1 stdout (all output of a tty), 2 stderr */
	uint16_t unused;
	uint32_t exec;
	int64_t value;
};

/* strings follow: name, cwd, argc arguments, envc environment entries; each ends with a zero byte */
struct start {
	uint32_t uid, gid, group_count, argc, envc;
	uint16_t rows, columns;
	uint32_t groups[64];
};

struct entry {
	int32_t exited; /* 1: status holds the wait status */
	int32_t status;
	int64_t acknowledged[2]; /* of stdout and stderr */
	int64_t input;
	int32_t tty, has_input;
	char name[NAME_SIZE];
};

#endif
