"""What a process image says of processes and of their kernel objects, in terms that two images of one sandbox share.

CRIU names objects by numbers: ids that it deals out while it dumps, inode numbers of pipes and sockets, identities of
mounts. They say which things are the same thing, and are different in the next dump if one process more or less is there.
Here every object is named by who holds it (`descriptor 3 of process 12`), and what is shared by several is named after the
first of them. What is left is facts: a place and a value. Two images tell the same state if their facts are equal.

Left out: pid 1, which is Crab's own, except for its ends of the pipes and terminals of commands; the time that is left on
a clock, which passes by itself; of files size and mode, which are told by the files; and what `imagenames` leaves out.
Memory is `imagememory`'s.
"""

from __future__ import annotations

import hashlib
import io
import os
import struct
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from crab.checkpoint.imagefiles import messages
from crab.checkpoint.imagenames import Record, read, read_all, several
from crab.checkpoint.threads import RESTART, Thread, thread

Place = tuple[str, ...]
Facts = dict[Place, Any]
INIT = 1
CALL = "system call"
_KINDS = ("reg", "inet", "ns", "packet", "netlink", "eventfd", "epoll", "signalfd", "tun", "timerfd", "inotify", "fanotify",
          "ext", "unix", "fifo", "pipe", "tty", "memfd", "bpf", "pidfd")  # fmt: skip
_OF_COMMANDS = ("pipe", "fifo", "tty")
_CHARACTERS = 8
"""Numbers of four bytes that hold a terminal's c_cc[19]; CRIU fills the rest of its array with whatever lay in memory."""
_LARGE = 0o100000
"""O_LARGEFILE: a 64-bit kernel sets it at every open(2) but not for files made otherwise, and never looks at it."""
_LINKED, _GHOST = 0, 1  # remap_type


@dataclass
class Process:
    """One process of an image."""

    pid: int
    tree: Record
    task: Record
    threads: list[Thread]
    ids: Record
    mm: Record
    fs: Record
    descriptors: dict[int, Record] = field(default_factory=dict[int, Record])
    """By number: what `fdinfo` says."""


class Image:
    """One set of image files. `linked` gives the digest of a file of the checkpoint by its path, for open files that have no
    name: CRIU makes one for the time of the snapshot."""

    def __init__(self, folder: Path, linked: Callable[[str], str] = lambda path: "") -> None:
        self.folder = folder
        self._linked = linked

    def _one(self, name: str, table: str) -> Record:
        return next(read_all(self.folder / name, table), {})

    def _named(self, prefix: str) -> list[Path]:
        return sorted(self.folder.glob(f"{prefix}*.img"))

    @cached_property
    def processes(self) -> dict[int, Process]:
        """By pid inside the sandbox."""
        found: dict[int, Process] = {}
        for entry in read_all(self.folder / "pstree.img", "pstree"):
            pid = entry["pid"]
            core = self._one(f"core-{pid}.img", "core")
            ids = self._one(f"ids-{pid}.img", "ids")
            threads = [
                thread(tid, core if tid == pid else self._one(f"core-{tid}.img", "core"))
                for tid in several(entry.get("threads"))
            ]
            table = self.folder / f"fdinfo-{ids.get('files')}.img"
            found[pid] = Process(
                pid=pid,
                tree=entry,
                task=core.get("task", {}),
                threads=threads,
                ids=ids,
                mm=self._one(f"mm-{pid}.img", "mm"),
                fs=self._one(f"fs-{pid}.img", "fs"),
                descriptors={held["fd"]: held for held in read_all(table, "fdinfo")},
            )
        return found

    @cached_property
    def files(self) -> dict[int, tuple[str, Record]]:
        """Open files by CRIU's id: kind, and what is said of it."""
        found: dict[int, tuple[str, Record]] = {}
        for entry in read_all(self.folder / "files.img", "file"):
            kind = next((kind for kind in _KINDS if kind in entry), "")
            known = entry.get(kind, {})
            found[entry["id"]] = (kind, known if isinstance(known, dict) else {"raw": known})
        return found

    @cached_property
    def holders(self) -> dict[int, str]:
        """For each open file (by id) the name of the first descriptor of it; a process's own before those of init."""
        found: dict[int, str] = {}
        for process in sorted(self.processes.values(), key=lambda process: (process.pid == INIT, process.pid)):
            for fd, held in sorted(process.descriptors.items()):
                found.setdefault(held["id"], f"descriptor {fd} of process {process.pid}")
        return found

    def file_name(self, identity: int) -> str:
        """The path of an open file as the kernel says it, or what it is."""
        kind, known = self.files.get(identity, ("", {}))
        if kind == "memfd":
            return self.object_name(kind, known["inode"])
        return os.fsdecode(known["name"]) if kind == "reg" else kind

    # ---------------------------------------------------------------- what several descriptors share

    @cached_property
    def _objects(self) -> dict[tuple[str, int], str]:
        """Names of pipes, sockets, terminals and memory files by kind and number: after the first descriptor of one."""
        found: dict[tuple[str, int], str] = {}
        for identity, name in self.holders.items():
            kind, known = self.files.get(identity, ("", {}))
            key = {"pipe": "pipe", "fifo": "pipe", "unix": "inode", "tty": "tty", "memfd": "inode"}.get(kind)
            if key is not None and key in known:
                found.setdefault((_family(kind), known[key]), f"{_family(kind)} at {name}")
        return found

    def object_name(self, family: str, number: int) -> str:
        """What a pipe, socket, terminal or memory file is called here."""
        return self._objects.get((family, number), f"a {family} that no descriptor leads to")

    @cached_property
    def _nameless(self) -> dict[int, str]:
        """For each open file without a name (by id) what is in it."""
        found: dict[int, str] = {}
        for entry in read_all(self.folder / "remap-fpath.img", "remap"):
            if entry.get("kind", _GHOST) == _LINKED:
                found[entry["file"]] = self._linked(self.file_name(entry["target"]))
            elif entry.get("kind", _GHOST) == _GHOST:
                path = self.folder / f"ghost-file-{entry['target']:x}.img"
                if path.exists():
                    (message, data), *_ = pieces(path, lambda _, rest: len(rest))
                    found[entry["file"]] = f"{read(message, 'ghost')} {digest(data)}"
        return found

    # ---------------------------------------------------------------- facts

    @cached_property
    def facts(self) -> Facts:
        """Everything but memory and threads' registers (see `thread_facts`)."""
        found: Facts = {}
        for process in self.processes.values():
            if process.pid != INIT:
                self._process(process, found)
            for fd, held in process.descriptors.items():
                kind, known = self.files.get(held["id"], ("", {}))
                if process.pid != INIT or kind in _OF_COMMANDS:
                    place = (f"process {process.pid}", f"descriptor {fd}") if process.pid != INIT else ("init", kind)
                    self._descriptor(place, held, kind, known, found)
        self._queues(found)
        self._terminals(found)
        self._namespaces(found)
        return found

    def _process(self, process: Process, found: Facts) -> None:
        place = (f"process {process.pid}",)
        _flatten(place, {name: value for name, value in process.tree.items() if name != "pid"}, found)
        task = {**process.task}
        if "timers" in task:
            task["timers"] = _without_time_left(task["timers"])
        _flatten(place, task, found)
        for name in ("vm", "files", "fs", "sighand"):
            if name in process.ids:
                sharing = [p.pid for p in self.processes.values() if p.ids.get(name) == process.ids[name]]
                found[*place, f"shares {name} with"] = min(sharing)
        mm = {name: value for name, value in process.mm.items() if name not in ("vmas", "exe")}
        _flatten((*place, "mm"), mm, found)
        if "exe" in process.mm:
            found[*place, "program"] = self.file_name(process.mm["exe"])
        for name in ("cwd", "root"):
            if name in process.fs:
                found[*place, name] = self.file_name(process.fs[name])
                if process.fs[name] in self._nameless:
                    found[*place, name, "nameless"] = self._nameless[process.fs[name]]
        if "umask" in process.fs:
            found[*place, "umask"] = f"{process.fs['umask']:03o}"
        for one in process.threads:
            _flatten((*place, f"thread {one.tid}"), self._thread(one), found)

    def _thread(self, one: Thread) -> Record:
        known = {name: value for name, value in one.other.items() if name not in ("cg_set", "rseq", "seccomp_filter")}
        if "rseq" in one.other:
            known["rseq"] = {name: value for name, value in one.other["rseq"].items() if name != "section"}
        if "seccomp_filter" in one.other and one.other.get("seccomp_mode"):
            known["seccomp_filter"] = self._filter_chain(one.other["seccomp_filter"])
        return known

    @cached_property
    def _filters(self) -> list[Record]:
        return [*several(self._one("seccomp.img", "filters").get("filter"))]

    def _filter_chain(self, number: int | None) -> str:
        words: list[str] = []
        while number is not None and number < len(self._filters):
            one = self._filters[number]
            words.append(digest(one["code"]) + str(one.get("flags", "")))
            number = one.get("before")
        return " ".join(words)

    def _descriptor(self, place: Place, held: Record, kind: str, known: Record, found: Facts) -> None:
        shown = {name: value for name, value in known.items() if name not in ("pipe", "inode", "file", "tty")}
        name = self.holders[held["id"]]
        if place[0] == "init":  # by the command that it is for: the numbers of init's own descriptors are no state
            family = _family(kind)
            place = (
                f"init's end of {self.object_name(family, known[family])}",
                "writes" if _writes(known) else "reads",
            )
            found[place] = True
            return
        found[*place, "kind"] = kind
        found[*place, "close on exec"] = held.get("flags", 0)
        found[*place, "open file"] = name
        if isinstance(shown.get("flags"), int):
            shown["flags"] &= ~_LARGE
        if held["id"] in self._nameless:
            found[*place, "nameless"] = self._nameless[held["id"]]
        if kind in ("pipe", "fifo"):
            shown["pipe"] = self.object_name("pipe", known["pipe"])
        if "file" in known:
            shown["file"] = self.file_name(known["file"])
        if kind == "unix":
            shown["peer"] = self.object_name("socket", known["peer"]) if known.get("peer") else ""
        elif kind == "tty":
            shown["terminal"] = self.object_name("tty", known["tty"])
        elif kind == "timerfd":
            shown = _armed(shown)
        elif kind == "epoll":
            shown["targets"] = tuple(
                sorted((t["fd"], t.get("events"), t.get("data")) for t in several(known.get("targets")))
            )
        elif kind == "memfd":
            shown["memory"] = self._memory_files.get(known["inode"], {})
        elif kind == "inet":
            shown["stream"] = self._stream(known["inode"])
        _flatten(place, shown, found)

    @cached_property
    def _memory_files(self) -> dict[int, Record]:
        """What is said of memory files, by inode; their content is memory."""
        return {
            entry["inode"]: {name: value for name, value in entry.items() if name not in ("inode", "pages")}
            for entry in read_all(self.folder / "memfd.img", "memfd_inode")
        }

    def _stream(self, inode: int) -> Record:
        path = self.folder / f"tcp-stream-{inode:x}.img"
        if not path.exists():
            return {}
        (message, data), *_ = pieces(path, lambda _, rest: len(rest))
        return {**read(message, "tcp"), "data": digest(data)}

    def _queues(self, found: Facts) -> None:
        for name in ("pipes-data.img", "fifo-data.img"):
            for message, data in pieces(self.folder / name, lambda message, _: read(message, "pipe_data")["bytes"]):
                entry = read(message, "pipe_data")
                pipe = self.object_name("pipe", entry["pipe"])
                _flatten((pipe,), {"bytes": entry["bytes"], "size": entry.get("size"), "data": digest(data)}, found)
        queues: dict[str, list[Any]] = {}
        for message, data in pieces(
            self.folder / "sk-queues.img", lambda message, _: read(message, "queued")["length"]
        ):
            entry = read(message, "queued")
            socket = self.holders.get(entry["socket"], "a socket that no descriptor leads to")
            rights = [
                self._shown(identity)
                for one in several(entry.get("descriptors"))
                for identity in several(one.get("files"))
            ]
            queues.setdefault(socket, []).append((digest(data), tuple(rights)))
        for socket, waiting in queues.items():
            if not socket.endswith(f"process {INIT}"):
                found[f"queue of the socket at {socket}",] = tuple(waiting)

    def _shown(self, identity: Any) -> str:
        kind, known = self.files.get(identity, ("", {}))
        shown = {name: value for name, value in known.items() if name not in ("pipe", "inode", "file", "tty", "peer")}
        return f"{kind} {sorted(shown.items(), key=str)}"

    def _terminals(self, found: Facts) -> None:
        for entry in read_all(self.folder / "tty-info.img", "tty_info"):
            name = self.object_name("tty", entry.pop("id"))
            for settings in ("settings", "locked_settings"):
                if settings in entry:
                    characters = several(entry[settings].get("characters"))[:_CHARACTERS]
                    entry[settings] = {**entry[settings], "characters": characters}
            _flatten((name,), entry, found)
        for entry in read_all(self.folder / "tty-data.img", "tty_data"):
            found[self.object_name("tty", entry["tty"]), "input"] = digest(entry["data"])

    # ---------------------------------------------------------------- namespaces

    def _namespaces(self, found: Facts) -> None:
        for entry in sorted(read_all(self.folder / "filelocks.img", "lock"), key=str):
            place = ("lock", f"process {entry.get('pid')}", f"descriptor {entry.get('fd')}", str(entry.get("start")))
            if entry.get("pid") != INIT:
                _flatten(place, entry, found)
        for path in self._named("utsns-"):
            _flatten(("names of the machine",), self._one(path.name, "names"), found)
        for path in self._named("ipcns-sem-"):
            for message, data in pieces(path, lambda message, _: -(-2 * read(message, "sem")["count"] // 8) * 8):
                known = read(message, "sem")
                _flatten((f"semaphores {known['key'].get('id', 0)}",), {**known, "values": data}, found)
        for path in self._named("ipcns-shm-"):
            for entry in read_all(path, "shm"):
                _flatten((f"shared memory {entry['key'].get('id', 0)}",), entry, found)
        for path in self._named("ipcns-msg-"):
            for known, waiting in _message_queues(path):
                _flatten((f"message queue {known['key'].get('id', 0)}",), {**known, "waiting": waiting}, found)
        for path in self._named("ipcns-var-"):
            found["limits of System V objects",] = tuple(messages(path))
        for path in self._named("mountpoints-"):
            self._mounts(path, found)
        for prefix in (
            "netdev-",
            "ifaddr-",
            "route-",
            "route6-",
            "rule-",
            "iptables-",
            "ip6tables-",
            "nftables-",
            "netns-",
        ):
            for path in self._named(prefix):
                found["network", prefix.rstrip("-")] = digest(path.read_bytes())

    def _mounts(self, path: Path, found: Facts) -> None:
        mounts = {entry["id"]: entry for entry in read_all(path, "mount")}
        for entry in mounts.values():
            lies_on = mounts.get(entry.get("parent", 0), {}).get("place", b"")
            place = (f"mount {os.fsdecode(entry['place'])} on {os.fsdecode(lies_on)}",)
            crabs_own = (
                ("options",) if entry["place"] == b"/" else ()
            )  # of the root, which each restore mounts as it needs
            left_out = ("id", "parent", *crabs_own)
            _flatten(place, {name: value for name, value in entry.items() if name not in left_out}, found)
            for archive in self.folder.glob(f"tmpfs-{entry['id']}.tar.gz*"):
                _flatten((*place, "files"), dict(_packed(archive)), found)

    # ---------------------------------------------------------------- threads

    def thread_facts(self) -> Facts:
        """Registers of all threads but init's."""
        found: Facts = {}
        for process in self.processes.values():
            for one in process.threads if process.pid != INIT else []:
                place = (f"process {process.pid}", f"thread {one.tid}")
                found[*place, CALL] = one.call
                _flatten((*place, "register"), one.registers, found)
                _flatten((*place, "floating point"), one.floating, found)
        return found


def _family(kind: str) -> str:
    return {"fifo": "pipe", "unix": "socket", "memfd": "memfd"}.get(kind, kind)


def _writes(known: Record) -> bool:
    return bool(known.get("flags", 0) & os.O_ACCMODE)


def _without_time_left(timers: Record) -> Record:
    """Timers of a task: whether they run, not how long yet."""
    found: Record = {}
    for name, value in timers.items():
        for number, one in enumerate(several(value)):
            left = {key: part for key, part in one.items() if key.startswith("left_")}
            known = {key: part for key, part in one.items() if key not in left and key != "overrun"}
            found[f"{name} {one.get('id', number)}"] = {**known, "armed": any(left.values())}
    return found


def _armed(timer: Record) -> Record:
    """A timerfd: what it was set to. One that has run off and one that runs are the same timer some time later."""
    set_to = any(timer.get(name) for name in ("left_s", "left_ns", "ticks"))
    return {k: v for k, v in timer.items() if k not in ("left_s", "left_ns", "ticks")} | {"armed": set_to}


def pieces(path: Path, length: Callable[[bytes, bytes], int]) -> Iterator[tuple[bytes, bytes]]:
    """Messages of an image file that each have raw data behind them, with it; none if there is no such file.

    `length` says how many bytes that is, from the message and all that follows.
    """
    if not path.exists():
        return
    data = path.read_bytes()
    at = 8
    while at + 4 <= len(data):
        (size,) = struct.unpack_from("<I", data, at)
        message = data[at + 4 : at + 4 + size]
        at += 4 + size
        follows = length(message, data[at:])
        yield message, data[at : at + follows]
        at += follows


def _message_queues(path: Path) -> Iterator[tuple[Record, tuple[tuple[int, str], ...]]]:
    """System V message queues: each is followed by its messages, and each of these by its text."""
    waiting: list[tuple[int, str]] = []
    known: Record = {}
    left = 0

    def length(message: bytes, _: bytes) -> int:
        nonlocal left
        if left:
            return -(-read(message, "message")["size"] // 8) * 8
        return 0

    for message, data in pieces(path, length):
        if left:
            head = read(message, "message")
            waiting.append((head["type"], digest(data)))
            left -= 1
        else:
            known, waiting = read(message, "queue"), []
            left = known.get("count", 0)
        if not left:
            yield known, tuple(waiting)


def _packed(archive: Path) -> Iterator[tuple[str, str]]:
    """What is in the archive of a tmpfs, without times."""
    with tarfile.open(fileobj=io.BytesIO(archive.read_bytes())) as packed:
        for member in packed:
            content = packed.extractfile(member)
            kept = {k: v for k, v in sorted(member.pax_headers.items()) if k not in ("mtime", "atime", "ctime")}
            words = (
                member.type,
                member.mode,
                member.uid,
                member.gid,
                member.linkname,
                member.devmajor,
                member.devminor,
            )
            yield member.name, f"{words} {kept} {digest(content.read()) if content else ''}"


def digest(data: bytes) -> str:
    """A short name of some bytes."""
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def _flatten(place: Place, value: Any, found: Facts) -> None:
    if isinstance(value, dict):
        for name, inner in value.items():
            _flatten((*place, name), inner, found)
    elif isinstance(value, tuple) and any(isinstance(one, dict) for one in value):
        for number, one in enumerate(value):
            _flatten((*place, str(number)), one, found)
    else:
        found[place] = value


def differences(before: Facts, after: Facts) -> Iterator[tuple[Place, Any, Any]]:
    """Places where two sets of facts differ, with both values; None is what is not there."""
    for place in sorted(before.keys() | after.keys()):
        old, new = before.get(place), after.get(place)
        unknown = place[-1] == CALL and RESTART in (old, new)
        if old != new and not unknown:
            yield place, old, new
