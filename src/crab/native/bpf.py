"""The programs for the kernel: compile `bpf/*.bpf.c` and pack each into one file that needs no compiler and no libbpf.

A pack is what libbpf calls a light skeleton: a small program that is run once in the kernel, creates the maps, relocates
the others for that kernel (CO-RE) and loads them, and the data that it works on (`bpf_object__gen_loader`, Linux >= 5.17).
`crab.host.bpf` runs it. Needs clang and libbpf (with its headers) to build; a wheel carries the packs.
"""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec

from crab.errors import HostUnsuitable

HERE = Path(__file__).resolve().parent
SOURCES = HERE.parents[2] / "bpf"
"""Of a source tree; there is none in an installed wheel."""
BIN = HERE / "bin"
FLAGS = ("-g", "-O2", "-mcpu=v3", "-target", "bpf", "-Wall", "-Wextra", "-Wno-unused-parameter", "-Werror")
ARCHITECTURES = {"x86_64": "x86", "aarch64": "arm64"}
TIERS = {"ctime-memory": "A", "hooks": "A", "hooks-6.1": "A", "ctime": "B", "syscalls": "C"}
"""Packs that say what changed, best first, and what the documentation calls them. At most one of tier A fits a kernel."""
BY_TIME = frozenset({"ctime-memory", "ctime"})
"""Packs that see a change by the change time of an inode."""
REMEDY = (
    "install clang, llvm and libbpf-dev (Debian, Ubuntu) or clang, llvm and libbpf-devel (Fedora); without these programs "
    "every checkpoint is a full one"
)


class Pack(msgspec.Struct, frozen=True):
    """A light skeleton."""

    data: bytes
    instructions: bytes
    maps: tuple[str, ...]
    """In the order of the loader's descriptors."""
    programs: tuple[str, ...]
    sections: tuple[str, ...]
    """Of each program: `tp_btf/…`, `fentry/…`, `iter/…`."""
    rodata: bytes
    """Initial content of the constants."""


def names() -> list[str]:
    """Names of the packs that the source tree can be built into."""
    return sorted(path.name.removesuffix(".bpf.c") for path in SOURCES.glob("*.bpf.c"))


def built() -> list[str]:
    """Names of the packs that are there."""
    return sorted(path.stem for path in BIN.glob("*.bpf"))


def is_built() -> bool:
    """Whether every pack is there and no older than its sources (true in an installed wheel, which has none)."""
    newest = max((path.stat().st_mtime for path in SOURCES.glob("*.[ch]")), default=0.0)
    return all((BIN / f"{n}.bpf").is_file() and (BIN / f"{n}.bpf").stat().st_mtime >= newest for n in names())


def build() -> None:
    """Build what is not up to date. Raises `HostUnsuitable` without clang or libbpf."""
    if is_built():
        return
    tools = compiler()
    if tools is None:
        raise HostUnsuitable("no clang or no llvm-strip to build the programs for the kernel", remedy=REMEDY)
    BIN.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        for name in names():
            made = Path(folder, f"{name}.o")
            _compile(*tools, SOURCES / f"{name}.bpf.c", made)
            new = BIN / f".{name}.bpf.new"
            new.write_bytes(msgspec.msgpack.encode(_pack(made)))
            new.rename(BIN / f"{name}.bpf")


def read(name: str) -> Pack:
    """A built pack. Raises `HostUnsuitable` if it is not there."""
    path = BIN / f"{name}.bpf"
    if not path.is_file():
        raise HostUnsuitable(f"{path.name} is not built", remedy=f"run `python -m crab.native`; {REMEDY}")
    return msgspec.msgpack.decode(path.read_bytes(), type=Pack)


def compiler() -> tuple[str, str] | None:
    """Paths of clang and llvm-strip; None if one is missing."""
    found = [next(filter(None, map(shutil.which, _versions(name))), None) for name in ("clang", "llvm-strip")]
    return (found[0], found[1]) if found[0] and found[1] else None


def _versions(program: str) -> list[str]:
    """A program under its plain name, or as Debian calls one of a certain version."""
    return [program, *(f"{program}-{version}" for version in range(22, 13, -1))]


def _compile(clang: str, strip: str, source: Path, made: Path) -> None:
    architecture = ARCHITECTURES.get(platform.machine())
    if architecture is None:
        raise HostUnsuitable(
            f"no programs for the kernel of {platform.machine()}", remedy="use an x86-64 or arm64 machine"
        )
    include = f"-I/usr/include/{platform.machine()}-linux-gnu"  # Debian's place for asm/types.h
    for command in (
        [clang, *FLAGS, f"-D__TARGET_ARCH_{architecture}", include, "-c", str(source), "-o", str(made)],
        [strip, "-g", str(made)],  # DWARF; the type information stays
    ):
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise HostUnsuitable(f"{source.name} does not compile:\n{done.stderr}", remedy=REMEDY)


# ---------------------------------------------------------------- libbpf


class _LoaderOptions(ctypes.Structure):
    """`struct gen_loader_opts`: libbpf fills in what it would have done."""

    _fields_ = [
        ("size", ctypes.c_size_t),
        ("data", ctypes.c_void_p),
        ("instructions", ctypes.c_void_p),
        ("data_size", ctypes.c_uint32),
        ("instructions_size", ctypes.c_uint32),
    ]


def _libbpf() -> ctypes.CDLL:
    try:
        library = ctypes.CDLL("libbpf.so.1", use_errno=True)
    except OSError as error:
        raise HostUnsuitable(f"libbpf cannot be loaded: {error}", remedy=REMEDY) from error
    pointer, text = ctypes.c_void_p, ctypes.c_char_p
    for name, result, arguments in (
        ("bpf_object__open_file", pointer, [text, pointer]),
        ("bpf_object__gen_loader", ctypes.c_int, [pointer, pointer]),
        ("bpf_object__load", ctypes.c_int, [pointer]),
        ("bpf_object__close", None, [pointer]),
        ("bpf_object__next_map", pointer, [pointer, pointer]),
        ("bpf_object__next_program", pointer, [pointer, pointer]),
        ("bpf_map__name", text, [pointer]),
        ("bpf_map__initial_value", pointer, [pointer, pointer]),
        ("bpf_program__name", text, [pointer]),
        ("bpf_program__section_name", text, [pointer]),
    ):
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


def _pack(made: Path) -> Pack:
    """Let libbpf write down how it would load an object file."""
    library = _libbpf()
    opened = library.bpf_object__open_file(os.fsencode(made), None)
    if not opened:
        raise HostUnsuitable(f"libbpf cannot read {made.name}", remedy="install libbpf 1.0 or newer")
    try:
        options = _LoaderOptions(size=ctypes.sizeof(_LoaderOptions))
        if library.bpf_object__gen_loader(opened, ctypes.byref(options)) or library.bpf_object__load(opened):
            raise HostUnsuitable(f"libbpf cannot make a loader of {made.name}", remedy="install libbpf 1.0 or newer")
        maps = list(_all(library.bpf_object__next_map, opened))
        programs = list(_all(library.bpf_object__next_program, opened))
        rodata = b""
        for each in maps:
            if library.bpf_map__name(each).endswith(b".rodata"):
                size = ctypes.c_size_t()
                rodata = ctypes.string_at(library.bpf_map__initial_value(each, ctypes.byref(size)), size.value)
        return Pack(
            data=ctypes.string_at(options.data or 0, options.data_size),
            instructions=ctypes.string_at(options.instructions or 0, options.instructions_size),
            maps=tuple(library.bpf_map__name(each).decode().rpartition(".")[2] for each in maps),
            programs=tuple(library.bpf_program__name(each).decode() for each in programs),
            sections=tuple(library.bpf_program__section_name(each).decode() for each in programs),
            rodata=rodata,
        )
    finally:
        library.bpf_object__close(opened)


def _all(following: ctypes._NamedFuncPointer, opened: int) -> Iterator[int]:
    each = following(opened, None)
    while each:
        yield each
        each = following(opened, each)
