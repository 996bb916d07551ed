"""bpf(2): load packs, maps, links, pins, iterators. Knows nothing of what the programs are for.

Numbers of commands and the layout of `union bpf_attr` are those of `include/uapi/linux/bpf.h`; they never change.
A pack (`crab.native.bpf`) is run as a `BPF_PROG_TYPE_SYSCALL` program, which needs Linux >= 5.17 and type information
(`/sys/kernel/btf/vmlinux`).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import platform
import struct
from collections.abc import Iterator
from pathlib import Path

from crab.host import mounts
from crab.native.bpf import Pack

_SYSCALL = {"x86_64": 321, "aarch64": 280}
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]

MAP_CREATE, MAP_LOOKUP, MAP_UPDATE, MAP_DELETE, MAP_NEXT_KEY, PROG_LOAD = 0, 1, 2, 3, 4, 5
OBJ_PIN, OBJ_GET, PROG_RUN, MAP_FD_BY_ID, OBJ_INFO, RAW_TRACEPOINT_OPEN = 6, 7, 10, 14, 15, 17
MAP_LOOKUP_BATCH, LINK_CREATE, ITER_CREATE, MAP_DELETE_BATCH = 24, 28, 33, 27
HASH, ARRAY = 1, 2
_SYSCALL_PROGRAM, _SLEEPABLE, _TRACE_ITER = 31, 0x10, 28
_LOG = 1 << 16
ANY, MUST_BE_NEW = 0, 1


class Refused(OSError):
    """The kernel refused a pack; `log` is what its verifier said."""

    def __init__(self, code: int, message: str, log: str = "") -> None:
        super().__init__(code, message)
        self.log = log


def why_refused(error: OSError, pack: Pack) -> str:
    """In words, why a pack was not loaded or attached."""
    if error.errno == errno.EPERM and any(section.startswith("fentry/") for section in pack.sections):
        return "fentry is not permitted (EPERM): the kernel lets nobody patch its text"
    if error.errno in (errno.ESRCH, errno.ENOENT):
        return "this kernel has not all that is hooked"
    return os.strerror(error.errno or 0)


def call(command: int, attributes: bytes | bytearray) -> tuple[int, bytes]:
    """bpf(2); its result and the attributes as the kernel left them. Raises OSError (but not for the last part of a batch:
    its result is -1, and what it brought counts)."""
    number = _SYSCALL.get(platform.machine())
    if number is None:
        raise OSError(errno.ENOSYS, f"bpf(2) of {platform.machine()} is not known")
    buffer = ctypes.create_string_buffer(bytes(attributes), len(attributes))
    result = _libc.syscall(number, command, buffer, len(attributes))
    if result < 0 and not (command == MAP_LOOKUP_BATCH and ctypes.get_errno() == errno.ENOENT):
        code = ctypes.get_errno()
        raise OSError(code, f"bpf command {command}: {os.strerror(code)}")
    return result, buffer.raw


# ---------------------------------------------------------------- loading


class Loaded:
    """Descriptors of the maps and programs of a pack. A context manager: closes them."""

    def __init__(self, maps: dict[str, int], programs: dict[str, int]) -> None:
        self.maps, self.programs = maps, programs

    def __enter__(self) -> Loaded:
        return self

    def __exit__(self, *_: object) -> None:
        for fd in (*self.maps.values(), *self.programs.values()):
            os.close(fd)


def load(pack: Pack, rodata: bytes = b"") -> Loaded:
    """Create the maps and load the programs of a pack; `rodata` replaces the constants. Raises `Refused` or OSError."""
    keep: list[object] = []

    def address(data: bytes) -> int:
        buffer = ctypes.create_string_buffer(data, len(data))
        keep.append(buffer)
        return ctypes.addressof(buffer)

    log = ctypes.create_string_buffer(_LOG)
    # struct bpf_loader_ctx, a descriptor for each map (fd, size, initial value), one for each program (fd)
    maps_at = 24
    programs_at = maps_at + 16 * len(pack.maps)
    size = programs_at + 4 * len(pack.programs)
    context = bytearray(size + -size % 8)
    struct.pack_into("<IIIIQ", context, 0, size, 0, 1, _LOG, ctypes.addressof(log))
    for index, name in enumerate(pack.maps):
        value = address(rodata or pack.rodata) if name == "rodata" else 0
        struct.pack_into("<iIQ", context, maps_at + 16 * index, 0, 0, value)

    # a map of one element: type information, instructions and relocations that the loader works on
    with _closing(_create(ARRAY, 4, len(pack.data), 1, b"__loader.map")) as data:
        update(data, bytes(4), pack.data)
        attributes = bytearray(144)
        head = (_SYSCALL_PROGRAM, len(pack.instructions) // 8, address(pack.instructions), address(b"Dual BSD/GPL\0"))
        struct.pack_into("<IIQQIIQ", attributes, 0, *head, 0, 0, 0)
        struct.pack_into("<II16s", attributes, 40, 0, _SLEEPABLE, b"__loader.prog")
        struct.pack_into("<Q", attributes, 120, address(struct.pack("<i", data)))  # fd_array
        with _closing(call(PROG_LOAD, attributes)[0]) as loader:
            buffer = ctypes.create_string_buffer(bytes(context), len(context))
            attributes = bytearray(80)
            struct.pack_into("<I", attributes, 0, loader)
            struct.pack_into("<IIQ", attributes, 40, size, 0, ctypes.addressof(buffer))
            answer = struct.unpack_from("<i", call(PROG_RUN, attributes)[1], 4)[0]
    if answer < 0:
        raise Refused(-answer, os.strerror(-answer), log.value.decode("latin1")[-4000:])
    raw = buffer.raw
    maps = {name: struct.unpack_from("<i", raw, maps_at + 16 * i)[0] for i, name in enumerate(pack.maps)}
    programs = {name: struct.unpack_from("<i", raw, programs_at + 4 * i)[0] for i, name in enumerate(pack.programs)}
    return Loaded(maps, programs)


def attach(program: int, section: str) -> int:
    """Attach a program by the kind that its section names; a descriptor of the link. Raises OSError."""
    if section.startswith("iter/"):
        return call(LINK_CREATE, struct.pack("<IIII", program, 0, _TRACE_ITER, 0) + bytes(48))[0]
    return call(RAW_TRACEPOINT_OPEN, struct.pack("<QI4x", 0, program) + bytes(16))[0]


# ---------------------------------------------------------------- pins


def pin(fd: int, path: Path) -> None:
    """Give an object a name in a bpf file system: it lives as long as that. Raises OSError."""
    name = ctypes.create_string_buffer(os.fsencode(path))
    call(OBJ_PIN, struct.pack("<QII", ctypes.addressof(name), fd, 0) + bytes(8))


def pinned(path: Path) -> int:
    """A descriptor of a pinned object. Raises OSError."""
    name = ctypes.create_string_buffer(os.fsencode(path))
    return call(OBJ_GET, struct.pack("<QII", ctypes.addressof(name), 0, 0) + bytes(8))[0]


def file_system() -> Path:
    """Where the bpf file system is mounted; it is mounted where systemd does, if it is nowhere. Raises OSError."""
    with open("/proc/self/mountinfo") as f:
        for line in f:
            if line.partition(" - ")[2].split()[0] == "bpf":
                return Path(line.split()[4])
    path = Path("/sys/fs/bpf")
    mounts.mount("bpf", path, "bpf", data="mode=0700")
    return path


# ---------------------------------------------------------------- maps


def create_hash(key_size: int, value_size: int, entries: int, name: bytes) -> int:
    """A preallocated hash map."""
    return _create(HASH, key_size, value_size, entries, name)


def _create(kind: int, key_size: int, value_size: int, entries: int, name: bytes) -> int:
    attributes = struct.pack("<IIIIIII16s", kind, key_size, value_size, entries, 0, 0, 0, name[:15]) + bytes(76)
    return call(MAP_CREATE, attributes)[0]


def update(fd: int, key: bytes, value: bytes, flags: int = ANY) -> None:
    """Set an entry. Raises OSError (E2BIG: the map is full)."""
    a, b = ctypes.create_string_buffer(key, len(key)), ctypes.create_string_buffer(value, len(value))
    call(MAP_UPDATE, struct.pack("<I4xQQQ", fd, ctypes.addressof(a), ctypes.addressof(b), flags))


def lookup(fd: int, key: bytes, size: int) -> bytes | None:
    """The value of an entry; None if there is none."""
    a, b = ctypes.create_string_buffer(key, len(key)), ctypes.create_string_buffer(size)
    try:
        call(MAP_LOOKUP, struct.pack("<I4xQQQ", fd, ctypes.addressof(a), ctypes.addressof(b), 0))
    except FileNotFoundError:
        return None
    return b.raw


def delete(fd: int, key: bytes) -> None:
    """Remove an entry; no error if there is none."""
    a = ctypes.create_string_buffer(key, len(key))
    with contextlib.suppress(FileNotFoundError):
        call(MAP_DELETE, struct.pack("<I4xQQQ", fd, ctypes.addressof(a), 0, 0))


def delete_all(fd: int, keys: list[bytes]) -> None:
    """Remove entries of a hash map; no error for those that are not there."""
    if not keys:
        return
    packed = ctypes.create_string_buffer(b"".join(keys), sum(map(len, keys)))
    attributes = bytearray(56)
    struct.pack_into("<QQQQI", attributes, 0, 0, 0, ctypes.addressof(packed), 0, len(keys))
    struct.pack_into("<I", attributes, 36, fd)
    try:
        call(MAP_DELETE_BATCH, attributes)
    except FileNotFoundError:  # stops at the first that is not there
        for key in keys:
            delete(fd, key)


def map_by_id(number: int) -> int:
    """A descriptor of the map with that id."""
    return call(MAP_FD_BY_ID, struct.pack("<III", number, 0, 0) + bytes(4))[0]


def map_entries(fd: int) -> int:
    """How many entries a map has room for."""
    info = ctypes.create_string_buffer(80)  # struct bpf_map_info: type, id, key_size, value_size, max_entries, …
    call(OBJ_INFO, struct.pack("<IIQ", fd, len(info), ctypes.addressof(info)))
    return struct.unpack_from("<I", info, 16)[0]


def entries(fd: int, key_size: int, value_size: int, limit: int) -> Iterator[tuple[bytes, bytes]]:
    """All entries of a hash map of at most `limit` of them, a few thousand with each call (BPF_MAP_LOOKUP_BATCH)."""
    batch = min(limit, 4096)
    keys, values = ctypes.create_string_buffer(key_size * batch), ctypes.create_string_buffer(value_size * batch)
    token = ctypes.create_string_buffer(4)
    begin = 0
    while True:
        attributes = bytearray(56)
        places = [ctypes.addressof(buffer) for buffer in (token, keys, values)]
        struct.pack_into("<QQQQI", attributes, 0, begin, *places, batch)
        struct.pack_into("<I", attributes, 36, fd)
        try:
            result, answer = call(MAP_LOOKUP_BATCH, attributes)
        except OSError as error:
            if error.errno != errno.ENOSPC or batch >= limit:
                raise
            batch = min(limit, batch * 4)  # one bucket holds more
            keys, values = (
                ctypes.create_string_buffer(key_size * batch),
                ctypes.create_string_buffer(value_size * batch),
            )
            continue
        raw_keys, raw_values = keys.raw, values.raw
        for i in range(struct.unpack_from("<I", answer, 32)[0]):
            yield raw_keys[i * key_size : (i + 1) * key_size], raw_values[i * value_size : (i + 1) * value_size]
        if result < 0:
            return
        begin = ctypes.addressof(token)


class Memory:
    """The values of an array map made with BPF_F_MMAPABLE, as memory."""

    def __init__(self, fd: int, size: int) -> None:
        size += -size % mmap.PAGESIZE
        found = _libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd, 0)
        if found == ctypes.c_void_p(-1).value:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), "mmap of a bpf map")
        self._address, self._size = found, size
        self.view = memoryview((ctypes.c_char * size).from_address(found)).cast("B")

    def close(self) -> None:
        """Unmap. The view must not be used any more."""
        self.view.release()
        _libc.munmap(ctypes.c_void_p(self._address), ctypes.c_size_t(self._size))


def read_iterator(link: int) -> bytes:
    """Run an iterator once; all that it wrote."""
    fd = call(ITER_CREATE, struct.pack("<II", link, 0) + bytes(8))[0]
    pieces: list[bytes] = []
    with open(fd, "rb", buffering=0) as f:
        while piece := f.read(1 << 20):
            pieces.append(piece)
    return b"".join(pieces)


@contextlib.contextmanager
def _closing(fd: int) -> Iterator[int]:
    try:
        yield fd
    finally:
        os.close(fd)
