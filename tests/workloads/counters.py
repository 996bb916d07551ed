"""One number in five places, changed in step: memory, a file, the end of a log, a shared mapping, the file's name."""

import mmap
import os

from heartbeat import keep, scratch

scratch()
number = 0
plain = os.open("plain", os.O_RDWR | os.O_CREAT | os.O_TRUNC)
log = os.open("log", os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
mapped_file = open("mapped", "w+b")  # noqa: SIM115  it stays open
mapped_file.truncate(4096)
mapped = mmap.mmap(mapped_file.fileno(), 4096)
for name in os.listdir("."):
    if name.startswith("name-"):
        os.unlink(name)
open("name-0", "w").close()


def places():
    size = os.fstat(log).st_size
    return {
        "memory": number,
        "file": int(os.pread(plain, 20, 0) or b"0"),
        "log": int(os.pread(log, 9, size - 9)) if size else 0,
        "lines": size // 9,
        "offset": os.lseek(log, 0, os.SEEK_CUR) // 9,
        "mapping": int.from_bytes(mapped[:8], "little"),
        "mapping, as the file shows it": int.from_bytes(os.pread(mapped_file.fileno(), 8, 0), "little"),
        "name": next(int(name[5:]) for name in os.listdir(".") if name.startswith("name-")),
    }


def check(counter):
    global number
    found = places()
    if len(set(found.values())) != 1:
        return found
    for _ in range(20):
        number += 1
        os.pwrite(plain, b"%020d" % number, 0)
        os.write(log, b"%08d\n" % number)
        mapped[:8] = number.to_bytes(8, "little")
        os.rename(f"name-{number - 1}", f"name-{number}")
    return True


keep(check)
