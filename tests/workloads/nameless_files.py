"""Open files whose name is gone or has changed, of the upper and of the lower layer, and file descriptors that share."""

import mmap
import os

from heartbeat import all_of, keep, scratch

scratch()
deleted = os.open("deleted", os.O_RDWR | os.O_CREAT | os.O_TRUNC)
os.write(deleted, b"gone" * 50)
os.unlink("deleted")
big = os.open("big", os.O_RDWR | os.O_CREAT | os.O_TRUNC)
os.write(big, b"0123456789abcdef" * (3 << 16))  # 3 MiB
os.unlink("big")
unnamed = os.open(".", os.O_TMPFILE | os.O_RDWR)
os.write(unnamed, b"tmpf")

for name in ("half1", "half2", "moved", "moved-again"):
    if os.path.exists(name):
        os.unlink(name)
with open("half1", "w") as f:
    f.write("half")
os.link("half1", "half2")
half = os.open("half1", os.O_RDONLY)
os.unlink("half1")

os.makedirs("old/b/c", exist_ok=True)
with open("old/b/c/f", "w") as f:
    f.write("renamed.")
renamed = os.open("old/b/c/f", os.O_RDWR)
folder = os.open("old/b", os.O_RDONLY)
os.rename("old", "new")

lower = os.open("/etc/services", os.O_RDONLY)
lower_head = os.pread(lower, 64, 0)
lower_deleted = os.open("/etc/issue", os.O_RDONLY)
issue = os.pread(lower_deleted, 20, 0)
os.unlink("/etc/issue")
library = next(
    path for path in ("/usr/lib/x86_64-linux-gnu/libm.so.6", "/lib/libm.so.6", "/usr/bin/true") if os.path.exists(path)
)
with open(library, "rb") as f:
    library_map = mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ)
library_tail = library_map[-100:]
copied_up = os.open("/etc/debian_version", os.O_RDWR)

shared = os.open("shared", os.O_RDWR | os.O_CREAT | os.O_TRUNC)
twin = os.dup(shared)
os.write(shared, b"ab")


def half_deleted(counter):
    return (
        os.pread(half, 4, 0) == b"half"
        and os.path.samestat(os.fstat(half), os.stat("half2"))
        and not os.path.exists("half1")
    )


def moved(counter):
    os.pwrite(renamed, b"%08d" % counter, 0)
    with open("new/b/c/f", "rb") as f:
        text = f.read(8)
    return text == b"%08d" % counter and not os.path.exists("old") and os.listdir(folder) == ["c"]


def copied(counter):
    os.pwrite(copied_up, b"%08d" % counter, 0)
    with open("/etc/debian_version", "rb") as f:
        return f.read(8) == b"%08d" % counter


def shared_offset(counter):
    os.lseek(twin, counter, os.SEEK_SET)
    return os.lseek(shared, 0, os.SEEK_CUR) == counter


keep(
    all_of(
        deleted=lambda n: os.pread(deleted, 4, 4) == b"gone" and os.fstat(deleted).st_nlink == 0,
        deleted_has_no_name=lambda n: not os.path.exists("deleted") and not os.path.exists("big"),
        written_on=lambda n: os.pwrite(deleted, b"%08d" % n, 300) == 8 and os.pread(deleted, 8, 300) == b"%08d" % n,
        big=lambda n: os.pread(big, 16, n % (3 << 16) * 16) == b"0123456789abcdef",
        unnamed=lambda n: os.pread(unnamed, 4, 0) == b"tmpf",
        one_link_of_two=half_deleted,
        renamed_folder=moved,
        lower=lambda n: os.pread(lower, 64, 0) == lower_head,
        lower_deleted=lambda n: os.pread(lower_deleted, 20, 0) == issue and not os.path.exists("/etc/issue"),
        lower_mapped=lambda n: library_map[1:4] == b"ELF" and library_map[-100:] == library_tail,
        lower_copied_up=copied,
        shared_offset=shared_offset,
    )
)
