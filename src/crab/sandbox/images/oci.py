"""`oci:…`: an image from a container image: an OCI layout, an archive (`docker save`, `oci-archive`), or a registry.

Registries and docker's own storage are left to `skopeo`. Layers are unpacked here and not by umoci, although that
exists: what another program unpacks as root could not be held to the rules for archives that nobody vouches for (no
device nodes, bounded size), and one more program would have to be installed.
"""

from __future__ import annotations

import fcntl
import re
from pathlib import Path
from typing import Self

import msgspec
from blake3 import blake3

from crab.errors import CrabError, InvalidRequest, NotFound
from crab.sandbox.images import bundle, programs, seal
from crab.sandbox.images.source import ImageConfig, Workshop, absolute
from crab.sandbox.images.unpack import Budget, unpack

_REMOTE = ("docker://", "docker-daemon:", "containers-storage:")
_LOCAL_REGISTRY = re.compile(r"docker://(localhost|127(\.\d+){3}|\[::1\])(:\d+)?/")


class Oci(msgspec.Struct, frozen=True):
    """One container image."""

    remote: str = ""
    """What skopeo copies from; else empty."""
    path: Path = Path("/")
    """A layout or an archive."""
    tag: str = ""

    @classmethod
    def parse(cls, rest: str) -> Self:
        """Of the part after `oci:`."""
        if rest.startswith(_REMOTE):
            return cls(remote=rest)
        if "://" in rest:
            raise InvalidRequest(
                f"unknown place of a container image: {rest!r}", remedy="write oci:docker://REGISTRY/NAME:TAG"
            )
        path, tag = absolute(rest, "oci:/LAYOUT[:TAG] or oci:/ARCHIVE.tar[:TAG]"), ""
        if not path.exists() and ":" in rest:
            before, _, tag = rest.rpartition(":")
            path = Path(before)
        if not path.exists():
            raise NotFound(
                f"there is no container image {path}",
                remedy="give a layout or an archive on the machine that Crab runs on; from a registry: "
                "oci:docker://REGISTRY/NAME",
            )
        return cls(path=path, tag=tag)

    def build(self, root: Path, workshop: Workshop) -> ImageConfig:
        """Unpack its layers, one over the other."""
        image = bundle.read(*self._layout(workshop))
        seal.require_architecture(image.architecture, "the container image")
        budget = Budget(workshop.limits)
        for number, layer in enumerate(image.layers, 1):
            workshop.progress(f"unpacking layer {number} of {len(image.layers)}")
            with image.opened(layer) as archive:
                # A layer may go through a symlink of a lower one (/var/run), so these are followed inside the root.
                unpack(archive, root, budget, links="in-root", whiteouts=True)
        if budget.lost_acls:
            workshop.progress(f"{budget.lost_acls} access lists left out: they name users in text form")
        return image.config

    def _layout(self, workshop: Workshop) -> tuple[Path, str]:
        if self.remote:
            return self._download(workshop)
        if self.path.is_dir():
            return self.path, self.tag
        layout = workshop.scratch / "layout"
        layout.mkdir()
        workshop.progress(f"unpacking {self.path}")
        unpack(self.path, layout, Budget(workshop.limits))
        return layout, self.tag

    def _download(self, workshop: Workshop) -> tuple[Path, str]:
        skopeo = programs.require("skopeo")
        # One layout for all downloads: skopeo fetches only the layers that are not there yet.
        layout, tag = workshop.cache / "oci", blake3(self.remote.encode()).hexdigest()[:16]
        workshop.progress(f"downloading {self.remote}")
        # Registries on this machine usually speak plain HTTP; docker makes the same exception.
        plain = ["--src-tls-verify=false"] if _LOCAL_REGISTRY.match(self.remote) else []
        with open(workshop.cache / "oci.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # two at once would lose each other's entry in the layout's index
            programs.run(
                [skopeo, "--override-os", "linux", "copy", "--quiet", *plain, self.remote, f"oci:{layout}:{tag}"],
                f"downloading {self.remote}",
                place=workshop.cache,
                explain=self._explain,
                remedy=f"`skopeo inspect {self.remote}` shows whether it is there and you may read it (`skopeo login`)",
            )
        return layout, tag

    def _explain(self, output: str) -> CrabError | None:
        if re.search(r"manifest unknown|name unknown|NAME_UNKNOWN|MANIFEST_UNKNOWN|No such image", output):
            return NotFound(f"there is no container image {self.remote}", remedy="check its name and tag")
        return None
