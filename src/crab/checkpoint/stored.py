"""A checkpoint in a store: what its root says. docs/store.md has the table.

The root is a node. It names the manifest, and the nodes of every tree that an archive of the checkpoint would have, in the
same order. How it is written and read back is in `stored_write` and `stored_read`.
"""

from __future__ import annotations

import msgspec

from crab.checkpoint import manifest as manifests
from crab.checkpoint.archive import Header
from crab.checkpoint.manifest import Manifest
from crab.errors import Damaged, Incompatible
from crab.model import Struct
from crab.store.repository import Repository

VERSION = 1


class Tree(Struct, kw_only=True):
    """One tree of files."""

    name: bytes
    """What it is called in an archive: `image`, `ground/dev`, `files/u`, `process`, …"""
    segments: tuple[bytes, ...]
    """Names of its nodes (numbers of links, as it is stored)."""
    size: int
    entries: int


class Root(Struct, kw_only=True):
    """See the module."""

    header: Header
    manifest: Manifest
    trees: tuple[Tree, ...]
    files: str
    """UUID of the snapshot with the files: who has the same one has the same files."""


class _Tree(Struct, array_like=True):
    name: bytes
    segments: tuple[int, ...]
    size: int
    entries: int


class _Root(Struct, kw_only=True):
    version: int = VERSION
    header: Header
    manifest: int
    trees: tuple[_Tree, ...]
    files: str


class _Version(Struct):
    version: int


def encode(root: Root, manifest: bytes) -> tuple[list[bytes], bytes]:
    """Links and content of the root; `manifest` is the name of the blob with that."""
    links: dict[bytes, int] = {manifest: 0}
    trees = tuple(
        _Tree(tree.name, tuple(links.setdefault(one, len(links)) for one in tree.segments), tree.size, tree.entries)
        for tree in root.trees
    )
    content = _Root(header=root.header, manifest=0, trees=trees, files=root.files)
    return list(links), msgspec.msgpack.encode(content)


def read(repository: Repository, identity: bytes) -> Root:
    """The root of that name. Raises `Damaged`, `Incompatible` (a newer version), `StoreUnavailable`."""
    links, content = repository.node(identity)
    try:
        version = msgspec.msgpack.decode(content, type=_Version).version
        if version > VERSION:
            raise Incompatible(
                f"the stored checkpoint has version {version}, this Crab reads up to {VERSION}", remedy="upgrade Crab"
            )
        found = msgspec.msgpack.decode(content, type=_Root)
        trees = tuple(
            Tree(
                name=tree.name,
                segments=tuple(links[one] for one in tree.segments),
                size=tree.size,
                entries=tree.entries,
            )
            for tree in found.trees
        )
        manifest = manifests.decode(repository.get(links[found.manifest]))
    except (msgspec.DecodeError, IndexError) as error:
        raise Damaged(
            f"a stored checkpoint cannot be read: {error}", remedy="`crab store check` says what is affected"
        ) from error
    return Root(header=found.header, manifest=manifest, trees=trees, files=found.files)
