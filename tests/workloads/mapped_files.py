"""Files in memory: private and shared mappings, of a file that was deleted, grew, or is of the lower layer."""

import mmap
import os

from heartbeat import all_of, keep, scratch

SIZE = 64 << 10
scratch()


def new_file(name, fill):
    f = open(name, "w+b")  # noqa: SIM115  it stays open
    f.write(fill * (SIZE // len(fill)))
    f.flush()
    return f


shared_file = new_file("shared", b"shared..")
shared = mmap.mmap(shared_file.fileno(), SIZE)
private_file = new_file("private", b"private.")
private = mmap.mmap(private_file.fileno(), SIZE, flags=mmap.MAP_PRIVATE)
private[0:8] = b"changed!"
deleted_file = new_file("deleted", b"deleted.")
deleted = mmap.mmap(deleted_file.fileno(), SIZE)
os.unlink("deleted")
closed_file = new_file("closed", b"closed..")
closed = mmap.mmap(closed_file.fileno(), SIZE)
closed_file.close()
os.unlink("closed")
lower_file = open("/usr/bin/git", "rb")  # noqa: SIM115  it stays open
lower = mmap.mmap(lower_file.fileno(), SIZE, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
lower[4096:4104] = b"in mine."
forbidden = mmap.mmap(-1, SIZE, prot=mmap.PROT_READ)
guarded = mmap.mmap(-1, SIZE)
guarded.madvise(mmap.MADV_DONTFORK)


def shared_and_file(counter):
    shared[0:8] = b"%08d" % counter
    os.pwrite(shared_file.fileno(), b"%08d" % counter, 4096)
    with open("shared", "rb") as f:
        return f.read(8) == b"%08d" % counter and shared[4096:4104] == b"%08d" % counter


def private_stays(counter):
    private[8:16] = b"%08d" % counter
    return private[0:8] == b"changed!" and os.pread(private_file.fileno(), 16, 0) == b"private." * 2


def deleted_stays(counter):
    deleted[0:8] = b"%08d" % counter
    tail = deleted[-8:] == b"deleted." and os.pread(deleted_file.fileno(), 8, 0) == b"%08d" % counter
    return tail and closed[-8:] == b"closed.." and not os.path.exists("deleted")


keep(
    all_of(
        shared=shared_and_file,
        private=private_stays,
        deleted=deleted_stays,
        lower=lambda n: lower[1:4] == b"ELF" and lower[4096:4104] == b"in mine.",
        empty=lambda n: forbidden[SIZE - 1] == 0,
        guarded=lambda n: guarded[0] == 0,
    )
)
