"""memfd: written, mapped, sealed, shared with a child that got it by inheritance."""

import fcntl
import mmap
import os

from heartbeat import all_of, child, keep, talk

fd = os.memfd_create("plain")
os.write(fd, b"memfd" * 5000)
mapped = mmap.mmap(fd, 25000)
sealed = os.memfd_create("sealed", os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
os.write(sealed, b"fixed")
SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK
fcntl.fcntl(sealed, fcntl.F_ADD_SEALS, SEALS)
reader = child(
    "perl",
    "-e",
    f"open(F, '<&={fd}'); $| = 1; while (<STDIN>) {{ seek(F, 0, 0); read(F, $x, 8); print \"$x\\n\" }}",
    pass_fds=[fd],
)


def shared(counter):
    mapped[0:8] = b"%08d" % counter
    return talk(reader, b"?") == b"%08d" % counter and os.pread(fd, 8, 0) == b"%08d" % counter


def is_sealed(counter):
    if fcntl.fcntl(sealed, fcntl.F_GET_SEALS) != SEALS or os.pread(sealed, 5, 0) != b"fixed":
        return "seals or content"
    try:
        os.pwrite(sealed, b"x", 0)
    except PermissionError:
        return True
    return "it can be written"


keep(
    all_of(
        shared=shared,
        tail=lambda n: mapped[-5:] == b"memfd",
        sealed=is_sealed,
    )
)
