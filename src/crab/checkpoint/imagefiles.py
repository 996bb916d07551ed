"""CRIU's image files: the few fields that Crab reads or edits.

An image file is two or one magic numbers, then messages of protobuf, each after its 32-bit size. Fields are named by
number as in CRIU's `images/*.proto` (stable across versions: protobuf fields never change their meaning). What is not
understood is kept byte for byte.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from pathlib import Path

Field = tuple[int, int, int | bytes]
"""Field number, wire type, value (an integer for wire type 0, else bytes)."""

ROOT_IDS = 3  # inventory_entry.root_ids, a task_kobj_ids_entry
USER_NS_ID = 10  # task_kobj_ids_entry.user_ns_id
PSTREE_PID = 1  # pstree_entry.pid
FILE_REGULAR = 3  # file_entry.reg, a reg_file_entry
SIZE, MODE = 8, 10  # reg_file_entry
REMAP_TYPE, LINKED = 3, 0  # remap_file_path_entry
FILE_TIMERFD = 12  # file_entry.tfd, a timerfd_entry
TICKS, VALUE, INTERVAL = 5, (7, 8), (9, 10)  # timerfd_entry: expirations nobody has read; seconds and nanoseconds each


def parse(message: bytes) -> list[Field]:
    """The fields of one protobuf message, in order."""
    fields: list[Field] = []
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = message[at]
            at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while at < len(message):
        number, wire = divmod(varint(), 8)
        value: int | bytes
        if wire == 0:
            value = varint()
        else:
            length = varint() if wire == 2 else {1: 8, 5: 4}[wire]
            value = message[at : at + length]
            at += length
        fields.append((number, wire, value))
    return fields


def serialize(fields: list[Field]) -> bytes:
    """Inverse of `parse`."""

    def varint(value: int) -> bytes:
        out = bytearray()
        while value > 127:
            out.append(value & 127 | 128)
            value >>= 7
        return bytes([*out, value])

    out = bytearray()
    for number, wire, value in fields:
        out += varint(number << 3 | wire)
        if isinstance(value, int):
            out += varint(value)
        else:
            out += (varint(len(value)) if wire == 2 else b"") + value
    return bytes(out)


def messages(path: Path) -> Iterator[bytes]:
    """The messages of an image file with two magic numbers (all but `inventory.img`)."""
    data = path.read_bytes()
    at = 8
    while at + 4 <= len(data):
        (size,) = struct.unpack_from("<I", data, at)
        yield data[at + 4 : at + 4 + size]
        at += 4 + size


def rewrite(path: Path, change: Callable[[bytes], bytes]) -> None:
    """Apply a function to every message of an image file with two magic numbers."""
    data = path.read_bytes()
    changed = [change(message) for message in messages(path)]
    new = data[:8] + b"".join(struct.pack("<I", len(message)) + message for message in changed)
    if new != data:
        path.write_bytes(new)


def first(message: bytes, number: int) -> int | bytes | None:
    """The first field of that number."""
    return next((value for n, _, value in parse(message) if n == number), None)


def process_ids(images: Path) -> list[int]:
    """The pids (inside the sandbox) of the dumped processes."""
    found = (first(message, PSTREE_PID) for message in messages(images / "pstree.img"))
    return [pid for pid in found if isinstance(pid, int)]


def keep_user_namespace(images: Path) -> None:
    """State in `inventory.img` that CRIU was in the sandbox's user namespace, so that a restore there makes no new one.

    CRIU dumps from the host's user namespace and would create a user namespace at restore, which its `--unprivileged`
    mode (needed inside ours) does not do. It compares the recorded id of its own namespace with that of the root task.
    """
    (ids,) = list(messages(images / "ids-1.img"))[:1]
    namespace = first(ids, USER_NS_ID)

    def edit(fields: list[Field], number: int, change: Callable[[int | bytes], int | bytes]) -> list[Field]:
        return [(n, wire, change(value) if n == number else value) for n, wire, value in fields]

    def same(value: int | bytes) -> bytes:
        if not isinstance(value, bytes) or namespace is None:
            raise ValueError(f"{images} is not a dump of a process in a user namespace")
        found = namespace
        return serialize(edit(parse(value), USER_NS_ID, lambda _: found))

    path = images / "inventory.img"
    data = path.read_bytes()
    (size,) = struct.unpack_from("<I", data, 4)
    message = serialize(edit(parse(data[8 : 8 + size]), ROOT_IDS, same))
    path.write_bytes(data[:4] + struct.pack("<I", len(message)) + message + data[8 + size :])


def trust_files(images: Path) -> None:
    """Take away the sizes and modes of open files that CRIU would compare at a restore: the files are ours, and a process that
    slept while another one wrote to its file is restored on the file as it was written."""

    def change(message: bytes) -> bytes:
        return serialize(
            [
                (n, w, _without_size(v) if n == FILE_REGULAR and isinstance(v, bytes) else v)
                for n, w, v in parse(message)
            ]
        )

    path = images / "files.img"
    if path.exists():
        rewrite(path, change)


def _without_size(file: bytes) -> bytes:
    return serialize([field for field in parse(file) if field[0] not in (SIZE, MODE)])


def has_links(images: Path) -> bool:
    """Whether the restore needs names that CRIU gave to open files and that only the snapshot of the same freeze has."""
    path = images / "remap-fpath.img"
    return path.exists() and any((first(message, REMAP_TYPE) or 0) == LINKED for message in messages(path))


def rearm_timers(images: Path) -> None:
    """Keep periodic timerfds alive whose last tick was not read at the dump (hazard C10, checkpoint-restore/criu#3162).

    The kernel arms such a timer anew only when the tick is read, and until then reports no time left. CRIU takes that for
    a timer that is switched off, so after the restore it would never fire again. Here it gets one interval: the tick that is
    kept is read as before, the next one comes on time.
    """

    tag = bytes([FILE_TIMERFD << 3 | 2])

    def change(message: bytes) -> bytes:
        if tag not in message:  # most are other files
            return message
        fields = parse(message)
        return serialize(
            [(n, w, _rearmed(v) if n == FILE_TIMERFD and isinstance(v, bytes) else v) for n, w, v in fields]
        )

    path = images / "files.img"
    if path.exists():
        rewrite(path, change)


def _rearmed(timer: bytes) -> bytes:
    fields = parse(timer)
    known = {number: value for number, _, value in fields}
    waiting = known.get(TICKS, 0) and not any(known.get(n, 0) for n in VALUE) and any(known.get(n, 0) for n in INTERVAL)
    if not waiting:
        return timer
    interval = dict(zip(VALUE, (known.get(n, 0) for n in INTERVAL), strict=True))
    return serialize([(number, wire, interval.get(number, value)) for number, wire, value in fields])
