"""What a sandbox looks like from inside. This file runs *in* the sandbox, under whatever python3 (3.8 or newer) is there.

It is sent over standard input, so it imports nothing but what a minimal Python has (Debian's has no json), and takes its
rules as one literal: {"roots": [path], "leave_out": [expression], "contents": [(expression, how)]}. It prints JSON, the form
of `state.Inside`. Nothing is changed but access times. Knows nothing of Crab but the name of its init.
"""

from __future__ import annotations

import ast
import hashlib
import marshal
import os
import re
import socket
import stat
import sys
import time
from importlib.util import MAGIC_NUMBER

INIT = 1  # Crab's own; what it holds open is the line to the host
INIT_SOCKET = "@crab-init"
LARGE_FILE = 0o100000  # O_LARGEFILE: depends on how a program was built, means nothing on 64 bits
BLINK = 0.1  # seconds: what lives shorter than this (a command just ending, one of a polling loop) is no state


def shown(path: str) -> str:
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


# ---------------------------------------------------------------- files


def observe_files(roots: list[str], leave_out: list[str], contents: list[tuple[str, str]]) -> dict[str, object]:
    omit = re.compile("|".join(f"(?:{one})" for one in leave_out) or "(?!)", re.S)
    special = [(re.compile(one, re.S), how) for one, how in contents]
    found: dict[str, object] = {}
    known: dict[tuple[int, int], str] = {}
    waiting = list(roots)
    while waiting:
        path = waiting.pop()
        try:
            status = os.lstat(path)
        except OSError:
            continue  # went away, or a root that does not exist
        entry = describe(path, status, special, known)
        found[shown(path)] = entry
        if entry["type"] == "folder":
            try:
                names = os.listdir(path)
            except OSError as error:
                entry["unreadable"] = str(error.strerror)
                continue
            waiting += [one for one in (os.path.join(path, name) for name in names) if not omit.fullmatch(shown(one))]
    return found


def describe(
    path: str,
    status: os.stat_result,
    special: list[tuple[re.Pattern[str], str]],
    known: dict[tuple[int, int], str],
) -> dict[str, str | int]:
    mode = status.st_mode
    entry: dict[str, str | int] = {"mode": f"{stat.S_IMODE(mode):04o}", "owner": f"{status.st_uid}:{status.st_gid}"}
    if attributes := attributes_of(path):
        entry["attributes"] = attributes
    if stat.S_ISREG(mode):
        entry.update(type="file", size=status.st_size)
        if status.st_nlink > 1:
            entry["links"] = status.st_nlink
        for expression, how in special:
            if expression.fullmatch(shown(path)):
                del entry["size"]
                entry["content"] = SPECIAL[how](path)
                break
        else:
            key = (status.st_dev, status.st_ino)
            if status.st_nlink == 1 or key not in known:
                known[key] = digest(path)
            entry["content"] = known[key]
    elif stat.S_ISDIR(mode):
        entry["type"] = "folder"
    elif stat.S_ISLNK(mode):
        del entry["mode"]
        entry.update(type="link", target=shown(os.readlink(path)))
    elif stat.S_ISCHR(mode) or stat.S_ISBLK(mode):
        entry.update(type="device", number=f"{os.major(status.st_rdev)}:{os.minor(status.st_rdev)}")
    else:
        entry["type"] = "fifo" if stat.S_ISFIFO(mode) else "socket"
    return entry


def attributes_of(path: str) -> str:
    try:
        names = os.listxattr(path, follow_symlinks=False)
        return (
            ascii([(name, os.getxattr(path, name, follow_symlinks=False)) for name in sorted(names)]) if names else ""
        )
    except OSError:
        return ""  # of a file system without them


def digest(path: str) -> str:
    total = hashlib.blake2b(digest_size=16)
    try:
        with open(path, "rb", buffering=0) as file:
            while piece := file.read(1 << 20):
                total.update(piece)
    except OSError as error:
        return f"unreadable: {error.strerror}"
    return total.hexdigest()


def of_bytes(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def python_cache(path: str) -> str:
    """The code of a .pyc, without the head (whose bytes 8 to 16 are time and size of the source) and marshal's flags."""
    data = read(path)
    try:
        # what another Python has written is not for this one's marshal: it may raise anything, or worse
        if data[:4] == MAGIC_NUMBER:
            return of_bytes(data[:8] + ascii(plain_code(marshal.loads(data[16:]))).encode())
    except (ValueError, EOFError, TypeError):
        pass  # damaged
    return of_bytes(data[:8] + data[16:])


def plain_code(value: object) -> object:
    if isinstance(value, (tuple, list)):
        return [plain_code(one) for one in value]
    if isinstance(value, (set, frozenset)):
        return sorted(ascii(plain_code(one)) for one in value)
    if hasattr(value, "co_code"):
        names = sorted(
            name for name in dir(value) if name.startswith("co_") and name not in ("co_lines", "co_positions")
        )
        return [(name, plain_code(getattr(value, name))) for name in names]
    return (type(value).__name__, value)


def git_index(path: str) -> str:
    """Modes, objects, flags and names of an index (gitformat-index(5), versions 2 and 3), without its stat data."""
    data = read(path)
    if data[:4] != b"DIRC" or data[4:8] not in (b"\0\0\0\2", b"\0\0\0\3"):
        return of_bytes(data)
    at, listed = 12, []
    for _ in range(int.from_bytes(data[8:12], "big")):
        flags = int.from_bytes(data[at + 60 : at + 62], "big")
        name = at + (64 if flags & 0x4000 else 62)
        end = data.index(b"\0", name)
        listed.append((data[at + 24 : at + 28], data[at + 40 : at + 62], data[name:end]))
        at += (end - at) // 8 * 8 + 8  # padded with one to eight zeros
    return of_bytes(ascii(listed).encode())


SPECIAL = {"python-cache": python_cache, "git-index": git_index}


# ---------------------------------------------------------------- processes


def stat_of(pid: int) -> list[str]:
    """Fields of /proc/PID/stat from the third on."""
    return read(f"/proc/{pid}/stat").decode("utf-8", "replace").rpartition(")")[2].split()


def living() -> dict[int, str]:
    """pid: time of its start, so that a number that is taken again is another process."""
    found: dict[int, str] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                found[int(name)] = stat_of(int(name))[19]
            except (OSError, IndexError):
                pass  # ended meanwhile
    return found


def observe_processes() -> list[object]:
    mine, pid = {INIT}, os.getpid()
    while pid > INIT:
        mine.add(pid)
        pid = int(stat_of(pid)[1])
    first = living()
    if not first.keys() - mine:
        return []
    time.sleep(BLINK)
    second = living()
    found: list[object] = []
    for pid in sorted(second):
        if pid in mine or first.get(pid) != second[pid]:
            continue
        try:
            found.append(process(pid))
        except (FileNotFoundError, ProcessLookupError, IndexError):
            pass  # ended meanwhile
    return found


def process(pid: int) -> dict[str, object]:
    folder = f"/proc/{pid}/"
    words = read(folder + "cmdline").split(b"\0")[:-1]
    state = stat_of(pid)[0]
    entry: dict[str, object] = {
        "argv": [shown(os.fsdecode(word)) for word in words]
        or [f"[{shown(os.fsdecode(read(folder + 'comm').strip()))}]"],
        "uid": os.stat(folder).st_uid,
        "state": {"T": "stopped", "t": "traced", "Z": "ended, not waited for"}.get(state, "alive"),
        "cwd": "",
    }
    if state != "Z":
        try:
            entry["cwd"] = shown(os.readlink(folder + "cwd"))
            entry["descriptors"] = {fd: descriptor(folder, fd) for fd in sorted(os.listdir(folder + "fd"), key=int)}
        except PermissionError:
            entry["cwd"] = "not permitted to see"
    return entry


def descriptor(folder: str, fd: str) -> str:
    target = os.readlink(folder + "fd/" + fd)
    if target.startswith("/dev/pts/"):
        return "terminal"
    if not target.startswith("/"):  # pipe:[123], socket:[123], anon_inode:[eventpoll]
        return re.sub(r":\[\d+\]$", "", target)
    target = re.sub(r"/#\d+ \(deleted\)$", "/# (deleted)", target)  # of O_TMPFILE: the number of its inode
    status = os.stat(folder + "fd/" + fd)
    if not stat.S_ISREG(status.st_mode):
        return shown(target)
    info = dict(line.split(":", 1) for line in read(folder + "fdinfo/" + fd).decode().splitlines())
    flags = int(info["flags"], 8) & ~LARGE_FILE
    text = f"{shown(target)} at {info['pos'].strip()}, flags {flags:o}"
    # no path leads to it, so nothing else would look at its content
    return text if status.st_nlink else f"{text}, content {digest(folder + 'fd/' + fd)}"


# ---------------------------------------------------------------- ports


def observe_ports() -> list[str]:
    found: set[str] = set()
    for kind in ("tcp", "tcp6", "udp", "udp6"):
        for line in table(kind):
            if line[3] == "0A" or (kind.startswith("udp") and line[2].endswith(":0000")):
                host, port = line[1].split(":")
                found.add(f"{kind} {address(host)}:{int(port, 16)}")
    for line in table("unix"):
        if int(line[3], 16) & 0x10000 and len(line) > 7 and line[7] != INIT_SOCKET:  # __SO_ACCEPTCON
            found.add(f"unix {line[7]}")
    return sorted(found)


def table(kind: str) -> list[list[str]]:
    try:
        text = read("/proc/net/" + kind).decode("utf-8", "backslashreplace")
    except OSError:
        return []  # a kernel without IPv6, say
    return [line.split() for line in text.splitlines()[1:]]


def address(digits: str) -> str:
    """An address as the kernel prints it: 32-bit words in the byte order of the machine."""
    words = [bytes.fromhex(digits[at : at + 8]) for at in range(0, len(digits), 8)]
    data = b"".join(word[::-1] if sys.byteorder == "little" else word for word in words)
    return socket.inet_ntop(socket.AF_INET if len(data) == 4 else socket.AF_INET6, data)


# ---------------------------------------------------------------- output


def encoded(value: object) -> str:
    """JSON."""
    if isinstance(value, str):
        return '"' + re.sub(r"[^ !#-\[\]-~]", escaped, value) + '"'
    if isinstance(value, dict):
        return "{" + ",".join(f"{encoded(name)}:{encoded(one)}" for name, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(encoded(one) for one in value) + "]"
    return str(value)


def escaped(match: re.Match[str]) -> str:
    units = match.group().encode("utf-16-be")  # two of them for what lies beyond the basic plane
    return "".join(f"\\u{units[at]:02x}{units[at + 1]:02x}" for at in range(0, len(units), 2))


def main() -> None:
    rules = ast.literal_eval(sys.argv[1])
    # processes first: reading the files takes a second, in which what is short-lived would end
    processes, ports = observe_processes(), observe_ports()
    files = observe_files(rules["roots"], rules["leave_out"], rules["contents"])
    print(encoded({"files": files, "processes": processes, "ports": ports}))


if __name__ == "__main__":
    main()
