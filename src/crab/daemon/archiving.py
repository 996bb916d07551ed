"""Checkpoints in and out of archives: `export` and `import`. What stores share with that is here, too."""

from __future__ import annotations

import contextlib
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from crab.checkpoint import archive, compatible, refs
from crab.checkpoint import manifest as manifests
from crab.checkpoint.archive import Header, Parts
from crab.checkpoint.archive_unpack import Unpacked, unpacked
from crab.checkpoint.manifest import Manifest
from crab.daemon import requests as ask
from crab.daemon.core import Core, new_id
from crab.daemon.dispatch import answers
from crab.daemon.history import find
from crab.daemon.lifecycle import check_mounts
from crab.daemon.registry import Record
from crab.errors import AlreadyExists, ArchiveRefused, InvalidRequest, NotFound
from crab.host import btrfs
from crab.model import Checkpoint, Image, Proof, Sandbox, State
from crab.sandbox import box, runtime
from crab.sandbox.images import UnpackLimits
from crab.store.local import FILES

_installing = threading.Lock()
"""Two imports of one image must not add it twice."""


# ---------------------------------------------------------------- export


@answers(ask.Export)
def export(core: Core, request: ask.Export) -> Checkpoint:
    """Write a checkpoint into an archive. The sandbox is held only until the checkpoint is pinned: it can go on, and the
    checkpoint can even be removed, while the archive is written."""
    with contextlib.ExitStack() as stack:
        with core.operation(request.sandbox, "export") as record:
            checkpoint = find(core, record, request.ref)
            parts = stack.enter_context(pinned(core, checkpoint, request.with_image))
        archive.write(parts, Path(request.path))
        return checkpoint


@contextlib.contextmanager
def pinned(core: Core, checkpoint: Checkpoint, with_image: bool) -> Iterator[Parts]:
    """All that a checkpoint stands on, kept from removal and change for the length of the block: snapshots and links."""
    manifest, source = _whole(core, checkpoint)
    image = core.images.get(manifest.spec.image)
    compatible.check_image(image.name, manifest.checkpoint.image_fingerprint, image.fingerprint)
    folder = core.pool.staging / new_id("x")
    linked: Path | None = None
    folder.mkdir(mode=0o700)
    try:
        sources = {
            FILES: core.ground.files_of(checkpoint),
            "ground": runtime.path(core.pool, manifest.runtime),
        }
        if with_image:
            sources["image"] = core.images.path(image.name)
        try:
            for name, path in sources.items():
                btrfs.snapshot(path, folder / name, read_only=True)
            if source is not None:
                linked = core.ground.store.link(source, [artefact.name for artefact in manifest.artefacts], folder)
        except FileNotFoundError as error:
            raise NotFound(
                f"checkpoint {checkpoint.id} is incomplete, or was removed a moment ago: {error.filename} is missing",
                remedy="export another checkpoint (`crab turns`)",
            ) from error
        yield Parts(
            manifest=manifest,
            image=image,
            config=core.images.config(image.name),
            image_folder=folder / "image" if with_image else None,
            ground=folder / "ground",
            files=folder / FILES,
            process=linked,
        )
    finally:
        core.discard_later(folder)
        shutil.rmtree(core.ground.store.scratch(folder.name), ignore_errors=True)


def _whole(core: Core, checkpoint: Checkpoint) -> tuple[Manifest, str | None]:
    """The manifest, changed so that its processes are its own if they are those of an earlier checkpoint, and the id of the one
    that has the process images."""
    manifest = core.manifest(checkpoint.id)
    manifest = msgspec.structs.replace(manifest, checkpoint=msgspec.structs.replace(manifest.checkpoint, files_from=""))
    source = manifest.checkpoint.processes_from
    if source is None:
        return manifest, None
    if source == checkpoint.id:
        return manifest, source
    other = core.manifest(source)
    own = msgspec.structs.replace(
        manifest.checkpoint,
        processes_from=checkpoint.id,
        process_bytes=other.checkpoint.process_bytes,
        process_count=other.checkpoint.process_count,
    )
    return manifests.with_processes_of(msgspec.structs.replace(manifest, checkpoint=own), other), source


# ---------------------------------------------------------------- import


@answers(ask.Import)
def import_(core: Core, request: ask.Import) -> Sandbox:
    """Make a sandbox of an archive: all of it, or nothing. It is stopped, and `recover` brings it to life."""
    if request.name:
        check_free(core, refs.check_name(request.name))
    limits = limits_of(request.limit)

    def accept(header: Header, manifest: Manifest) -> None:
        check_host_use(core, manifest, request.allow_host)

    path, identity = Path(request.path), new_id("c")
    with unpacked(path, core.ground, core.images, identity, limits, accept) as found:
        return install(core, found, identity, request.name)


def limits_of(size: int | None) -> UnpackLimits:
    """How much may come out of an archive or a store; None: as much as of any archive."""
    if size is None:
        return UnpackLimits()
    if size <= 0:
        raise InvalidRequest(f"a limit of {size} bytes makes no sense", remedy="give a positive number")
    return msgspec.structs.replace(UnpackLimits(), size=size)


def install(core: Core, found: Unpacked, identity: str, name: str, stored_as: str = "") -> Sandbox:
    """Make a sandbox of what was unpacked, durably. `stored_as` is the id that the checkpoint has in a store."""
    with _installing:
        record = _install(core, found, identity, name, stored_as)
    with btrfs.checked(core.pool.root):
        btrfs.sync(core.pool.root)
        core.ground.store.commit(identity)
    return core.view(record)


def check_free(core: Core, name: str) -> None:
    if any(one.name == name for one in (*core.registry.all(), *core.registry.broken())):
        raise AlreadyExists(f"a sandbox named {name!r} exists", remedy=f"choose another name, or `crab rm {name}`")


def check_host_use(core: Core, manifest: Manifest, allowed: bool) -> None:
    """Whoever made the archive must not choose what of this host its programs see (law 6)."""
    spec = manifest.spec
    uses = [f"the folder {mount.source} (at {mount.target}, {mount.kind})" for mount in spec.mounts]
    if spec.network == "host":
        uses.append("its network")
    if uses and not allowed:
        raise ArchiveRefused(
            f"the sandbox of the archive uses of the host: {', '.join(uses)}",
            remedy="if it may have that of this host too, allow it (--allow-host)",
        )
    try:
        check_mounts(spec.mounts, core.state_dir)
    except InvalidRequest as error:
        raise ArchiveRefused(error.message, remedy="do not use it") from error


def _install(core: Core, found: Unpacked, identity: str, name: str, stored_as: str) -> Record:
    """Make what was unpacked visible, the sandbox last. On a failure everything is taken back."""
    with contextlib.ExitStack() as undo:
        image = _image(core, found, undo)
        _ground(core, found, undo)
        sandbox = new_id("s")
        spec = msgspec.structs.replace(found.manifest.spec, image=image.name)
        checkpoint = msgspec.structs.replace(
            found.manifest.checkpoint,
            id=identity,
            sandbox=sandbox,
            parent=None,
            processes_from=identity if found.manifest.checkpoint.processes_from else None,
            image=image.name,
            proof=Proof(reason="imported"),
        )
        manifest = msgspec.structs.replace(
            found.manifest, checkpoint=checkpoint, spec=spec, runtime=found.ground, stored_as=stored_as
        )
        core.ground.store.publish(found.staging, manifests.encode(manifest))
        undo.callback(core.ground.store.discard, identity)
        core.registry.index(checkpoint)
        undo.callback(core.registry.unindex, identity)
        record = Record(
            id=sandbox,
            name=name or _free_name(core, manifest.sandbox_name),
            generation=0,
            spec=spec,
            created=time.time(),
            image_fingerprint=image.fingerprint,
            runtime=found.ground,
            wanted=State.STOPPED,
            head=identity,
            turn=checkpoint.turn,
        )
        record = core.registry.add(record, box.RANGES)
        undo.pop_all()
    return record


def _image(core: Core, found: Unpacked, undo: contextlib.ExitStack) -> Image:
    """The image on this host, added under its name or one like it if it is new."""
    header = found.header
    here = [image for image in core.images.list() if image.fingerprint == header.image.fingerprint]
    if here:  # it was there, or another import added it meanwhile
        return next((image for image in here if found.known and image.name == found.known.name), here[0])

    def build(root: Path) -> None:
        # moved and not cloned: of a clone nothing is in memory, and its fingerprint is taken next
        btrfs.delete(root)
        found.image.rename(root)

    taken = {image.name for image in core.images.list()}
    for name in _alike(header.image.name):
        if name in taken:
            continue
        try:
            image = core.images.add_subvolume(
                name, header.image.source, build, config=header.config, fingerprint=header.image.fingerprint
            )
        except AlreadyExists:
            if found.image.exists():
                continue
            raise  # it was added while this one was being sealed
        except InvalidRequest as error:  # its name, or what no image may be like
            raise ArchiveRefused(error.message, remedy="do not use it") from error
        undo.callback(core.images.remove, name)
        return image
    raise AlreadyExists(f"too many images are called like {header.image.name}", remedy="remove some of them")


def _ground(core: Core, found: Unpacked, undo: contextlib.ExitStack) -> None:
    if found.made is not None and runtime.publish(core.pool, found.ground, *found.made):
        for path in (runtime.blank(core.pool, found.ground), core.pool.runtime / found.ground):
            undo.callback(core.pool.discard, path)
    runtime.path(core.pool, found.ground)


def _free_name(core: Core, wanted: str) -> str:
    taken = {one.name for one in (*core.registry.all(), *core.registry.broken())}
    return next(name for name in _alike(wanted) if name not in taken)


def _alike(name: str) -> Iterator[str]:
    """The name itself, then NAME-2, NAME-3, …, all of a length that names may have."""
    yield name
    for number in range(2, 10_000):
        end = f"-{number}"
        yield name[: 63 - len(end)] + end
