"""Interface of a mover: the helper process that moves blocks between the arena and one remote.

The daemon's loop drives it like a tier: ``submit`` never waits, ``event_fd`` becomes readable when
``poll`` has something to report. The remote's client library is loaded in the helper only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from kvhearth.model import Records
from kvhearth_server.tiers.base import BlockSpec, Outcome, Throttled


@dataclass(frozen=True)
class Caps:
    """Properties of a remote, as its driver reports them.

    Attributes:
        value_bytes_max: most bytes of one value, header included.
        evicts: whether the remote makes room by itself.
        durable: whether an acknowledged value survives a restart of the remote.
        creates_once: whether a second create of a name is refused by the remote.
    """

    value_bytes_max: int
    evicts: bool
    durable: bool
    creates_once: bool


@dataclass(frozen=True)
class Exists:
    """Keys of one space to look for: ``Done`` for present ones, ``Missing`` for absent ones.

    Attributes:
        space: the name of a namespace's KV group at the remote (``names.space_name``).
        family: properties of every block.
        keys: n keys of 1 to 64 bytes.
    """

    space: str
    family: BlockSpec
    keys: list[bytes]


@dataclass(frozen=True)
class Delete(Exists):
    """Keys of one space to remove: ``Done`` whether they were present or not."""


@dataclass(frozen=True)
class Get(Exists):
    """Blocks to load into slots; it ends at its first miss: later rows are ``Missing``.

    Attributes:
        places: ``ADDRESS_DTYPE`` (n, shards), as ``LoadBatch.places``.
    """

    places: Records


@dataclass(frozen=True)
class Put(Get):
    """Blocks to publish; their slots must not change before the final answer.

    Attributes:
        checksums: xxh3_128 of each shard, ``V16`` (n, shards).
        parents: key of the block that each one continues; empty for none.
        replace: write blocks that are there, too.
    """

    checksums: Records
    parents: list[bytes]
    replace: bool = False


@dataclass(frozen=True)
class Answer:
    """Outcomes of a request's rows.

    Attributes:
        ticket: return value of ``submit``.
        outcomes: one for each key.
        final: the slots belong to the caller again. An answer that is not final tells outcomes at
            the deadline, while the mover may still write to the slots.
        checksums: of a ``Get``: as read from the records, ``V16`` (n, shards), zero where not
            ``Done``; otherwise None.
        parents: of a ``Get``: keys of the blocks that these continue, empty for none; otherwise
            empty.
    """

    ticket: int
    outcomes: list[Outcome]
    final: bool = True
    checksums: Records | None = None
    parents: list[bytes] = field(default_factory=list)


@dataclass(frozen=True)
class MoverState:
    """Condition of a mover.

    Attributes:
        up: whether it takes requests.
        problem: reason why it does not, or what its first probe found, as a sentence that says
            what to do; empty for none.
        caps: properties of the remote; None until it has answered.
        restarts: helper processes that were started again, since the daemon's start.
        staging_bytes, staging_free_bytes: size of the staging memory, and what of it is free.
        counts: counters by name; they only rise.
        alone: whether no helper of an earlier daemon can write to the arena any more.
    """

    up: bool
    problem: str
    caps: Caps | None
    restarts: int
    staging_bytes: int
    staging_free_bytes: int
    counts: Mapping[str, int]
    alone: bool = True


class Mover(Protocol):
    """One remote's helper process, as the daemon's loop sees it. All calls come from one thread."""

    event_fd: int

    def submit(self, request: Exists, deadline_s: float) -> int | Throttled:
        """Begin a request. Return its ticket, or ``Throttled`` where the queue or the staging
        memory is full or no helper runs.

        Args:
            deadline_s: time after which the request is answered as ``Failed("timeout")``, whatever
                the library does.
        """

    def cancel(self, ticket: int) -> None:
        """Give up a request: what has not begun ends as ``Failed("cancelled")``."""

    def poll(self) -> list[Answer]:
        """Return the answers since the last call; restart a helper that ended."""

    @property
    def state(self) -> MoverState:
        """The present condition."""

    def drain(self, deadline_s: float) -> bool:
        """Take no requests any more and wait for those in flight; false if that takes too long."""

    def close(self) -> None:
        """End the helper and release all resources."""
