"""Small root folders for sandboxes, where an image of Debian would be too much."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path


def small_root(image: Path, target: Path, *more: str) -> None:
    """A root folder with a shell and a few tools, taken from an image."""
    tools = (
        "sh",
        "cat",
        "sleep",
        "dd",
        "ls",
        "mv",
        "rm",
        "true",
        "echo",
        "head",
        "mkdir",
        "stat",
        "perl",
        "env",
        "touch",
        "setsid",
        "cp",
        "tail",
        "grep",
        *more,
    )
    for folder in ("bin", "tmp", "etc", "root", "proc", "sys", "dev", "mnt"):
        (target / folder).mkdir(parents=True, exist_ok=True)
    os.chmod(target / "tmp", 0o1777)
    (target / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/sh\n")
    for tool in tools:
        program = next(path for path in (image / "usr/bin" / tool, image / "bin" / tool) if path.exists())
        shutil.copyfile(os.path.realpath(program), target / "bin" / tool)
        os.chmod(target / "bin" / tool, 0o755)
        listed = subprocess.run(
            ["chroot", image, "ldd", f"/bin/{tool}"], capture_output=True, text=True, check=True
        ).stdout
        for library in [word for line in listed.splitlines() for word in line.split() if word.startswith("/")]:
            (target / library[1:]).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(image / library[1:], target / library[1:])
            os.chmod(target / library[1:], 0o755)
