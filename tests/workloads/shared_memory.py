"""Memory of two processes: anonymous, POSIX (/dev/shm), System V; System V semaphores and message queues."""

import ctypes
import mmap
import os
import struct

from heartbeat import all_of, keep, readable
from kernel import call, libc

IPC_PRIVATE, IPC_CREAT, IPC_NOWAIT, SETVAL, GETVAL = 0, 0o1000, 0o4000, 16, 12
libc.shmat.restype = ctypes.c_void_p

anonymous = mmap.mmap(-1, 1 << 20)
path = f"/dev/shm/workload-{os.getpid()}"
with open(path, "w+b") as f:
    f.truncate(1 << 20)
    posix = mmap.mmap(f.fileno(), 1 << 20)
segment = call("shmget", IPC_PRIVATE, 1 << 20, IPC_CREAT | 0o600)
address = libc.shmat(segment, None, 0)
system_v = (ctypes.c_char * (1 << 20)).from_address(address)
keyed = call("shmget", 0x77, 4096, IPC_CREAT | 0o600)
semaphores = call("semget", IPC_PRIVATE, 2, IPC_CREAT | 0o600)
call("semctl", semaphores, 0, SETVAL, 5)
queue = call("msgget", IPC_PRIVATE, IPC_CREAT | 0o600)
posix[4096:4104] = b"still me"
asked, ask = os.pipe()
answered, answer = os.pipe()
if os.fork() == 0:
    os.close(ask)
    while os.read(asked, 1):
        for memory in (anonymous, posix, system_v):
            memory[8:16] = memory[0:8]
        os.write(answer, b"x")
    os._exit(0)
waiting = 0
for waiting in range(3):
    call("msgsnd", queue, struct.pack("q8s", 1, b"%08d" % waiting), 8, IPC_NOWAIT)
taken = 0


def memories(counter):
    text = b"%08d" % counter
    for memory in (anonymous, posix, system_v):
        memory[0:8] = text
    os.write(ask, b"x")
    if not readable(answered, 10):
        return "the other process does not answer"
    os.read(answered, 1)
    found = [bytes(memory[8:16]) for memory in (anonymous, posix, system_v)]
    return found == [text] * 3 or found


def semaphore(counter):
    call("semop", semaphores, struct.pack("Hhh", 0, -1, IPC_NOWAIT), 1)
    value = call("semctl", semaphores, 0, GETVAL, 0)
    call("semop", semaphores, struct.pack("Hhh", 0, 1, IPC_NOWAIT), 1)
    return value == 4 or f"its value is {value + 1} instead of 5"


def messages(counter):
    global waiting, taken
    buffer = ctypes.create_string_buffer(16)
    call("msgrcv", queue, buffer, 8, 0, IPC_NOWAIT)
    if buffer.raw[8:16] != b"%08d" % taken:
        return f"{buffer.raw[8:16]!r} instead of {taken}"
    taken += 1
    waiting += 1
    call("msgsnd", queue, struct.pack("q8s", 1, b"%08d" % waiting), 8, IPC_NOWAIT)
    return True


def named(counter):
    with open(path, "rb") as f:
        f.seek(4096)
        return f.read(8) == b"still me" and call("shmget", 0x77, 4096, 0) == keyed


keep(all_of(memories=memories, semaphore=semaphore, messages=messages, named=named))
