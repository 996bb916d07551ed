"""The programs in C: where they are, and how to build them.

`crab-init` runs inside sandboxes, `crab-box` on the host; both are static, so that they run under any libc and in any
image. `crab-criu.so` is preloaded into CRIU (`native/criu.c` says why). A wheel carries them built; in a source tree
`python -m crab.native` (or `make`) builds them.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from crab.errors import HostUnsuitable

HERE = Path(__file__).resolve().parent
BIN = HERE / "bin"
_PROGRAM, _LIBRARY = ("-static",), ("-shared", "-fPIC")
PROGRAMS = {
    "crab-init": ("init.c", _PROGRAM),
    "crab-box": ("box.c", _PROGRAM),
    "crab-criu.so": ("criu.c", _LIBRARY),
}
FLAGS = ("-std=gnu11", "-O2", "-g0", "-Wall", "-Wextra", "-Wno-missing-field-initializers")


def program(name: str) -> Path:
    """Path of a built program. Raises `HostUnsuitable` if it has not been built."""
    path = BIN / name
    if not path.is_file():
        raise HostUnsuitable(
            f"{name} is not built", remedy="run `python -m crab.native` (needs a C compiler and libc's headers)"
        )
    return path


def is_built() -> bool:
    """Whether every program is there and no older than its sources."""
    newest = max(source.stat().st_mtime for source in [*HERE.glob("*.c"), *HERE.glob("*.h")])
    return all((BIN / name).is_file() and (BIN / name).stat().st_mtime >= newest for name in PROGRAMS)


def build(compiler: str | None = None) -> None:
    """Compile what is not up to date. Raises `HostUnsuitable` without a compiler or a static libc."""
    if is_built():
        return
    compiler = compiler or os.environ.get("CC") or "cc"
    if not shutil.which(compiler):
        raise HostUnsuitable(
            f"no C compiler ({compiler})",
            remedy="install gcc and libc6-dev (Debian, Ubuntu) or gcc and glibc-static (Fedora)",
        )
    BIN.mkdir(exist_ok=True)
    for name, (source, kind) in PROGRAMS.items():
        made = BIN / f".{name}.new"
        done = subprocess.run([compiler, *FLAGS, *kind, "-o", made, HERE / source], capture_output=True, text=True)
        if done.returncode:
            raise HostUnsuitable(
                f"{source} does not compile:\n{done.stderr}", remedy="install a static libc (Fedora: glibc-static)"
            )
        made.rename(BIN / name)  # a running sandbox keeps the old file
