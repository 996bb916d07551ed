"""The state of a sandbox, as `crab.replay.state.observe` sees it, read from what the sandbox has written above its image.

An image for real work has a gigabyte in 40,000 files, which would be read at every look. But it is the read-only lower layer of
an overlay: a path that is not in the upper layer is the image's. So only the paths of the upper layer are looked at (from
inside, by `observe`), names that hide one of the image count as `gone`, and what was copied up and not changed is left
out. Two such observations are equal if and only if those of all files are.

Reads the layout of a state directory (ARCHITECTURE.md, "On disk"), which only a benchmark of the same repository may.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

import crab
from crab.replay import observer, volatile
from crab.replay.state import FileState, Observation, observe
from crab.sdk.sync import Sandbox, Shell

GONE = FileState(type="gone")
_REPLACED = ("trusted.overlay.opaque", "trusted.overlay.redirect")
"""Of a folder in the upper layer: what is below it in the image is not what is seen there."""


@dataclass
class Written:
    """The paths of an upper layer, as the sandbox names them."""

    single: list[str] = field(default_factory=list[str])
    """There is something of that name in the image, too; of a folder that alone, not what is in it."""
    trees: list[str] = field(default_factory=list[str])
    """With everything in them: nothing of it is the image's."""
    folders: list[str] = field(default_factory=list[str])
    """Those of `single` that are folders."""
    gone: list[str] = field(default_factory=list[str])


def written(upper: Path, lower: Path) -> Written:
    """What an upper layer has above a lower one; nothing but names and attributes is read."""
    found = Written(single=["/"], folders=["/"])
    waiting = ["/"]
    while waiting:
        folder = waiting.pop()
        for entry in os.scandir(f"{upper}{folder}"):
            path = os.path.join(folder, entry.name)
            below = f"{lower}{path}"
            status = entry.stat(follow_symlinks=False)
            if stat.S_ISCHR(status.st_mode) and status.st_rdev == 0:
                found.gone.append(path)
            elif not os.path.lexists(below):
                found.trees.append(path)
            elif not entry.is_dir(follow_symlinks=False):
                found.single.append(path)
            elif not os.path.isdir(below) or any(name in _REPLACED for name in os.listxattr(entry.path)):
                found.trees.append(path)
            else:
                found.single.append(path)
                found.folders.append(path)
                waiting.append(path)
    return found


class Looker:
    """Looks at the sandboxes of a state directory that is owned by this process (an `Observer` of `crab.replay.runner`)."""

    def __init__(self, state: Path, image: crab.Image) -> None:
        digest = image.fingerprint.partition(":")[2][:12]
        self._pool = state / "pool"
        self._lower = self._pool / "images" / f"{image.name}@{digest}"
        if not self._lower.is_dir():
            raise FileNotFoundError(self._lower)
        self._known: dict[str, FileState | None] = {}

    def __call__(
        self,
        sandbox: Sandbox,
        *,
        shell: Shell | None = None,
        commands: Iterable[str] = (),
        left_out: Iterable[str] = (),
        timeout: float = 600.0,
    ) -> Observation:
        info, left_out = sandbox.info(), tuple(left_out)
        seen = written(self._pool / "live" / f"{info.id}.{info.generation}" / "u", self._lower)
        omitted = re.compile("|".join(volatile.path_rules(left_out)), re.S)
        roots = [path for path in (*seen.single, *seen.trees) if not omitted.fullmatch(path)]
        folders = [f"{'' if path == '/' else path}/*" for path in seen.folders]
        found = observe(
            sandbox, shell=shell, commands=commands, roots=roots, left_out=(*left_out, *folders), timeout=timeout
        )
        files = {
            **{path: GONE for path in seen.gone if not omitted.fullmatch(path)},
            **{path: state for path, state in found.files.items() if state != self._of_image(path)},
        }
        return msgspec.structs.replace(found, files=files, left_out=(*volatile.PATHS, *left_out))

    def _of_image(self, path: str) -> FileState | None:
        """A path as the image has it; None: it has none. (A folder of the image that was replaced differs in what is in it.)"""
        if path not in self._known:
            try:
                status = os.lstat(f"{self._lower}{path}")
            except OSError:
                self._known[path] = None
            else:
                rules = [(re.compile(one, re.S), how) for one, how in volatile.content_rules()]
                entry = observer.describe(f"{self._lower}{path}", status, rules, {})
                self._known[path] = msgspec.convert(entry, FileState)
        return self._known[path]
