"""What the engine schedules: a job, how urgent it is, and what the host can bear. Plain data; times are seconds of one
monotonic clock."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from typing import Literal

from crab.model import Struct

JobKind = Literal["capture", "restore", "verify", "upload", "compact"]
Pool = Literal["slots", "transfers"]
"""What a job takes one of: most a processor, some the network."""


TRANSFERS = 2
"""One waits for an answer while the other sends."""


class Urgency(enum.IntEnum):
    """Who waits for a job. The lower, the sooner."""

    URGENT = 0
    """Somebody waits now: an agent whose answer is there, or a person."""
    NORMAL = 1
    """Somebody is expected to wait later: an agent whose model still thinks."""
    BACKGROUND = 2
    """Nobody will."""


class Job(Struct, kw_only=True):
    """Work on one sandbox that takes a processor, or the network, for a while."""

    number: int
    """In the order in which jobs came."""
    sandbox: str
    kind: JobKind
    urgency: Urgency
    since: float
    """When it came."""
    urgent_since: float = math.inf
    """When somebody began to wait for it."""
    due: float = math.inf
    """When somebody is expected to begin to wait for it."""
    seconds: float = 0.0
    """How long it is expected to take."""
    writes: int = 0
    """Bytes that it is expected to write."""

    @property
    def pool(self) -> Pool:
        return "transfers" if self.kind == "upload" else "slots"


class Capacity(Struct, kw_only=True):
    """What the host can bear."""

    slots: int
    """Jobs at once that take a processor."""
    transfers: int = TRANSFERS
    """Uploads at once."""
    unwritten: int
    """Bytes in the page cache that wait for the disk, from which on the kernel makes writers wait: also the dump of a sandbox
    that is frozen."""


class Queue(Struct, kw_only=True):
    """All that the choice depends on."""

    now: float
    waiting: tuple[Job, ...] = ()
    running: tuple[Job, ...] = ()
    unwritten: int = 0
    """Bytes in the page cache that wait for the disk now."""
    served: Mapping[str, float] = {}
    """Seconds of work that each sandbox had lately."""
