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


LEAN_TOOLS = ("python3", "tar", "sed", "ln", "chmod", "chown", "rmdir", "cut", "find", "seq")
LEAN_TREES = ("usr/lib/python3.11", "usr/share/perl5", "usr/share/zoneinfo", "etc/apt")


def lean_root(image: Path, target: Path, *more: str) -> None:
    """A root folder with Python and little else, and more trees if they are wanted: 70 MB of the 700 of the image."""
    small_root(image, target, *LEAN_TOOLS)
    for folder in ("usr/bin", "opt"):
        (target / folder).mkdir(parents=True)
    (target / "usr/bin/python3").symlink_to("/bin/python3")
    for tree in (*LEAN_TREES, *more):
        shutil.copytree(image / tree, target / tree, symlinks=True, ignore=shutil.ignore_patterns("test"))
    modules = [f"/{path.relative_to(target)}" for path in (target / LEAN_TREES[0]).rglob("*.so")]
    listed = subprocess.run(["chroot", image, "ldd", *modules], capture_output=True, text=True, check=True).stdout
    for library in {word for line in listed.splitlines() for word in line.split() if word.startswith("/")}:
        copy = target / library.strip(":")[1:]
        if not copy.exists():
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(image / library[1:], copy)
    for name in ("issue", "motd", "profile", "fstab", "shells"):
        (target / "etc" / name).write_text(f"{name}\n")
