"""The manifest: everything that is known of one checkpoint, as it is written to disk.

Version 1 of the schema. A reader refuses a version above its own and reads all below. Fields may be added, never
change their meaning.
"""

from __future__ import annotations

import msgspec

from crab import __version__, lenient
from crab.checkpoint.evidence import Evidence
from crab.errors import Damaged, Incompatible
from crab.host.clocks import Clocks
from crab.model import Artefact, Checkpoint, HostPrint, SandboxSpec, Struct

SCHEMA = 1


class Manifest(Struct, kw_only=True):
    """See the module."""

    schema: int = SCHEMA
    written_by: str = f"crab {__version__}"
    checkpoint: Checkpoint
    sandbox_name: str
    spec: SandboxSpec
    runtime: str
    """Name of what the sandbox stands on (`crab.sandbox.runtime`)."""
    host: HostPrint
    artefacts: tuple[Artefact, ...] = ()
    groups: dict[str, tuple[int, ...]] = {}
    """Processes (numbers inside the sandbox) of each exec's cgroup."""
    addresses: tuple[str, ...] = ()
    """IPv4 addresses that the sandbox had besides loopback's: its sockets may be bound to them."""
    clocks: Clocks = Clocks()
    """What the processes saw at the freeze."""
    clock_shift: Clocks = Clocks()
    """How far that was ahead of the host's clocks."""
    stored_as: str = ""
    """Of a checkpoint that came out of a store: its id there. What is sent back needs less of it."""
    evidence: Evidence = Evidence()
    """What was running at the freeze; `crab verify` compares a restore with it."""


class _Schema(Struct):
    schema: int


def encode(manifest: Manifest) -> bytes:
    """JSON of a manifest."""
    return lenient.encode(manifest)


def decode(data: bytes) -> Manifest:
    """Inverse of `encode`. Raises `Incompatible` for a newer schema and `Damaged` for what is no manifest."""
    try:
        version = lenient.decode(data, _Schema).schema
    except msgspec.DecodeError as error:
        raise Damaged(
            f"the manifest cannot be read: {error}", remedy="restore another checkpoint (`crab turns`)"
        ) from error
    if version > SCHEMA:
        raise Incompatible(f"the manifest has schema {version}, this Crab reads up to {SCHEMA}", remedy="upgrade Crab")
    try:
        return lenient.decode(data, Manifest)
    except msgspec.DecodeError as error:
        raise Damaged(
            f"the manifest cannot be read: {error}", remedy="restore another checkpoint (`crab turns`)"
        ) from error


def with_processes_of(manifest: Manifest, other: Manifest) -> Manifest:
    """A manifest with all that another one says of its processes; the checkpoint's own entry stays as it is."""
    return msgspec.structs.replace(
        manifest,
        host=other.host,
        artefacts=other.artefacts,
        groups=other.groups,
        addresses=other.addresses,
        clocks=other.clocks,
        clock_shift=other.clock_shift,
        evidence=other.evidence,
    )
