"""A checkpoint on its way into a store: only what is not there yet is read.

What the checkpoint shares with one that is stored (its `Base`, the newest of its ancestors) is taken over without a look:
  - the image and the ground, by fingerprint and name, of any checkpoint of the store;
  - all files, if both point at the same snapshot;
  - the content of a file, if btrfs says that its inode was not changed in any way since the base's snapshot, and number, times
    and size are the same. btrfs counts transactions, so no clock and no list of changes has to be believed;
  - all processes, if both point at the same images; the pages of memory that are equal (`pages`).
Everything else is read, and found again by its digest.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from crab.checkpoint import archive, pages, stored
from crab.checkpoint import manifest as manifests
from crab.checkpoint.archive import RULES, Parts
from crab.checkpoint.extents import Extent, Extents
from crab.checkpoint.pages import Earlier, Layout
from crab.checkpoint.pieces import pieces
from crab.checkpoint.stored import Root, Tree
from crab.checkpoint.stored_tree import Content, Stored, TreeWriter, read_tree
from crab.checkpoint.trees import Size, measure, members
from crab.errors import Damaged
from crab.host import btrfs
from crab.host.fingerprint import Entry, file_digest
from crab.model import StoredCheckpoint
from crab.store.closure import is_whole
from crab.store.repository import Record
from crab.store.writing import Writer

_FEW = 512
"""A content of at most so many bytes stands in the list of files: it would cost a tenth of that to name it elsewhere."""
_FEW_OF_PROCESSES = 8 << 10
"""Most images of CRIU are that small, and all are new in every dump: hundreds of blobs less in the indexes."""


class Snapshot(msgspec.Struct, frozen=True):
    """What btrfs says of the snapshot with the files of a checkpoint."""

    uuid: str
    made_in: int

    @classmethod
    def of(cls, path: Path) -> Snapshot:
        """That of a subvolume."""
        found = btrfs.info(path)
        return cls(found.uuid, found.made_in)


class Base(msgspec.Struct, frozen=True, kw_only=True):
    """An ancestor of the checkpoint that is in the store and still here."""

    root: Root
    files: Snapshot
    process: Path | None
    """Folder of its process images, as they were captured."""


def write(parts: Parts, files: Snapshot, base: Base | None, writer: Writer) -> Record:
    """Send a checkpoint; what is returned makes it durable. `files` is the snapshot that `parts.files` is one of.

    Raises what `Writer` does, and `Damaged`, `InvalidRequest`, `NotFound` for parts that no archive could have.
    """
    return _Sending(parts, files, base, writer).run()


class _Sending:
    def __init__(self, parts: Parts, files: Snapshot, base: Base | None, writer: Writer) -> None:
        self._parts = parts
        self._files = files
        self._base = base
        self._writer = writer
        self._repository = writer.repository
        self._cut = self._repository.plan.cut
        sealing = self._repository.sealing
        # where a file is cut tells what file it is, unless that depends on the key
        self._seed = int.from_bytes(sealing.identify(b"where files are cut")[:4], "little") if sealing.encrypted else 0

    def run(self) -> Record:
        parts, writer = self._parts, self._writer
        self._check_images()
        twin = self._twin()
        trees: list[Tree] = []
        for name, path in archive.tops(parts):
            trees.append(self._known(name, twin) or self._tree(name, path))
        measured = [(tree.name, Size(size=tree.size, entries=tree.entries)) for tree in trees]
        header = archive.header_of(parts, measured)
        root = Root(header=header, manifest=parts.manifest, trees=tuple(trees), files=self._files.uuid)
        links, content = stored.encode(root, writer.add(manifests.encode(parts.manifest)))
        checkpoint = parts.manifest.checkpoint
        shown = StoredCheckpoint(
            id=checkpoint.id,
            sandbox=checkpoint.sandbox,
            sandbox_name=parts.manifest.sandbox_name,
            turn=checkpoint.turn,
            kind=checkpoint.kind,
            created=checkpoint.created,
            stored=time.time(),
            parent=checkpoint.parent,
            label=checkpoint.label,
            image=parts.image.name,
            image_fingerprint=parts.image.fingerprint,
            architecture=header.architecture,
            processes=parts.process is not None,
            logical=sum(header.sizes.values()),
        )
        return writer.publish(Record(checkpoint=shown, root=writer.node(links, content)))

    def _check_images(self) -> None:
        """A damaged image must not become a durable one."""
        folder = self._parts.process
        if folder is None:
            return
        for artefact in self._parts.manifest.artefacts:
            path = folder / artefact.name
            if not path.is_file() or file_digest(path) != artefact.digest:
                raise Damaged(
                    f"checkpoint {self._parts.manifest.checkpoint.id}: {artefact.name} is not what was written",
                    remedy="store another checkpoint (`crab turns`)",
                )

    # ---- what is there already

    def _twin(self) -> Root | None:
        """A stored checkpoint with the same image and, if there is such a one, ground."""
        fingerprint = self._parts.image.fingerprint
        if self._base and self._base.root.header.image.fingerprint == fingerprint:
            return self._base.root
        for record in reversed(self._repository.records()):
            if record.checkpoint.image_fingerprint == fingerprint:
                with contextlib.suppress(Damaged):
                    return stored.read(self._repository, record.root)
        return None

    def _known(self, name: bytes, twin: Root | None) -> Tree | None:
        """A tree that is stored as it is."""
        base, section = self._base, name.partition(b"/")[0]
        source: Root | None = None
        if section == b"image" or (
            section == b"ground" and twin is not None and twin.header.ground == self._parts.manifest.runtime
        ):
            source = twin
        elif base is not None and (
            (section == b"files" and base.root.files == self._files.uuid)
            or (section == b"process" and base.root.manifest.artefacts == self._parts.manifest.artefacts)
        ):
            source = base.root
        found = next((tree for tree in source.trees if tree.name == name), None) if source else None
        return found if found and is_whole(self._repository, found.segments) else None

    def _stored(self, name: bytes) -> list[Stored]:
        """The members of the base's tree of that name; none if the store has lost some: then everything is read."""
        trees = self._base.root.trees if self._base else ()
        with contextlib.suppress(Damaged):
            return [one for tree in trees if tree.name == name for one in read_tree(self._repository, tree.segments)]
        return []

    # ---- what is not

    def _tree(self, name: bytes, path: Path) -> Tree:
        out = TreeWriter(self._writer)
        section = name.partition(b"/")[0]
        if section == b"process":
            self._processes(path, out)
        else:
            known = self._unchanged(name, path) if section == b"files" else {}
            if section == b"image":
                measure(path)  # as before an export: the disk reads small files ahead
            for entry, member, content in members(path, name, RULES[section]):
                stamp = (entry.stat.st_ino, entry.stat.st_ctime_ns)
                before = known.get(member.name)
                if before and _same(before, entry) and self._is_there(before.content):
                    member.size, member.real_size = before.member.size, before.member.real_size
                    out.add(member, before.content, stamp)
                else:
                    out.add(member, self._content(content, _FEW) if member.kind == "file" else b"", stamp)
        out.finish()
        return Tree(name=name, segments=tuple(out.segments), size=out.size.size, entries=out.size.entries)

    def _unchanged(self, name: bytes, path: Path) -> dict[bytes, Stored]:
        """The files of the base whose inodes were not touched since."""
        base = self._base
        if base is None or base.root.files != base.files.uuid:
            return {}  # the snapshot that was stored is not here any more
        changed = btrfs.changed_inodes(path, base.files.made_in)
        return {
            one.member.name: one
            for one in self._stored(name)
            if one.member.kind == "file" and one.stamp[0] and one.stamp[0] not in changed
        }

    def _is_there(self, content: Content) -> bool:
        """Whether the store still has all of a content: a repair makes it forget what is damaged, to get it again."""
        if isinstance(content, bytes):
            return True
        place = self._repository.place
        return all(not extent.blob or place(extent.blob) is not None for extent in content)

    def _content(self, content: Iterable[bytes], few: int) -> Content:
        found: list[Extent] = []
        for piece in pieces(content, self._cut, self._seed):
            if not found and len(piece) <= few and len(piece) < self._cut.least:
                return piece  # and it is the only one: all but the last piece are larger
            found.append(Extent(self._writer.add(piece), 0, len(piece)))
        return found

    # ---- process images

    def _processes(self, folder: Path, out: TreeWriter) -> None:
        before = {
            one.member.name.rpartition(b"/")[2].decode(errors="replace"): one.content
            for one in self._stored(b"process")
        }
        same = self._same_images()
        memory = dict(self._memory(folder, before))
        for entry, member, content in members(folder, b"process", RULES[b"process"]):
            name = entry.path.decode(errors="replace")
            if name in same and name in before and self._is_there(before[name]):
                out.add(member, before[name])
            elif name in memory:
                out.add(member, memory[name])
            else:
                out.add(member, self._content(content, _FEW_OF_PROCESSES) if member.kind == "file" else b"")

    def _same_images(self) -> set[str]:
        """Names of the images that the base has just so."""
        known = set(self._base.root.manifest.artefacts) if self._base else set()
        return {artefact.name for artefact in self._parts.manifest.artefacts if artefact in known}

    def _memory(self, folder: Path, before: dict[str, Content]) -> Iterator[tuple[str, list[Extent]]]:
        try:
            now = Layout(folder)
        except ValueError:
            return  # stored like any other file
        earlier: Earlier | None = None
        if self._base and self._base.process:
            try:
                contents = {
                    name: Extents(content)
                    for name, content in before.items()
                    if name.startswith(pages.PREFIX) and isinstance(content, list) and self._is_there(content)
                }
                earlier = Earlier(Layout(self._base.process), contents)
            except (OSError, ValueError):
                earlier = None  # it was removed a moment ago
        yield from pages.contents_of(now, earlier, self._writer.add, self._size_of, self._cut.pages)

    def _size_of(self, blob: bytes) -> int:
        found = self._repository.place(blob)
        return found[0].entry(found[1])[3] if found else 0


def _same(before: Stored, entry: Entry) -> bool:
    """Beside what btrfs says, and in case that it does not mean what is thought here."""
    status, member = entry.stat, before.member
    size = member.size if member.real_size is None else member.real_size
    return (
        before.stamp == (status.st_ino, status.st_ctime_ns)
        and member.mtime == status.st_mtime_ns
        and size == status.st_size
    )
