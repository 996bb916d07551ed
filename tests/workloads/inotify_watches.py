"""inotify on a folder of the upper layer, on a folder and a file of the lower layer, and with an unread event."""

import os
import struct

from heartbeat import all_of, keep, readable, scratch
from kernel import call

IN_CREATE, IN_ATTRIB, IN_MOVED_TO, IN_NONBLOCK = 0x100, 0x4, 0x80, 0o4000
scratch()
os.makedirs("watched", exist_ok=True)


def instance(*watches):
    fd = call("inotify_init1", IN_NONBLOCK)
    for path, mask in watches:
        call("inotify_add_watch", fd, os.fsencode(path), mask)
    return fd


upper = instance(("watched", IN_CREATE | IN_MOVED_TO))
lower = instance(("/usr/share/doc", IN_CREATE), ("/etc/passwd", IN_ATTRIB))


def events(fd):
    found = []
    while readable(fd, 0.2 if found else 5):
        data, at = os.read(fd, 65536), 0
        while at < len(data):
            watch, mask, _, length = struct.unpack_from("iIII", data, at)
            found.append((watch, mask, data[at + 16 : at + 16 + length].rstrip(b"\0").decode()))
            at += 16 + length
    return found


def upper_folder(counter):
    open(f"watched/{counter}", "w").close()
    os.rename(f"watched/{counter}", f"watched/{counter}.x")
    found = events(upper)
    os.unlink(f"watched/{counter}.x")
    wanted = {(1, IN_CREATE, f"{counter}"), (1, IN_MOVED_TO, f"{counter}.x")}
    return wanted <= set(found) or f"events {found}"


def lower_layer(counter):
    open(f"/usr/share/doc/{counter}", "w").close()
    os.utime("/etc/passwd")
    found = events(lower)
    os.unlink(f"/usr/share/doc/{counter}")
    return {(1, IN_CREATE, str(counter)), (2, IN_ATTRIB, "")} <= set(found) or f"events {found}"


keep(all_of(upper=upper_folder, lower=lower_layer))
