"""What a tier promises: blocks in from arena slots, blocks out to arena slots, never a wrong byte.

A tier is driven by one loop. ``submit_store`` and ``submit_load`` take batches and never wait;
``event_fd`` becomes readable when ``poll`` has something to say; ``poll`` never waits either. How a
block fared is an outcome, not an exception: exceptions are for callers that break a rule here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvhearth.model import CHECKSUM_BYTES, I64, U8, Bools, Records

NAMESPACE_BYTES = 32
KEY_BYTES_MAX = 64
SHARDS_MAX = 0xFFFF

U64 = npt.NDArray[np.uint64]

PLACE_DTYPE = np.dtype([("region", "<u4"), ("reserved", "<u4"), ("offset", "<u8")])
"""Where in the arena a shard is: number of the region (an arena segment), bytes inside it."""


# -- outcomes --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Done:
    """Stored: it will be found after a crash of this process. Loaded: verified and in place."""


@dataclass(frozen=True)
class Throttled:
    """Not now. ``reason``: queue, admission, budget, recovering, degraded, full, draining; or not
    as the tier is set up: too_large.
    """

    reason: str
    retry_after_s: float = 0.0


@dataclass(frozen=True)
class Missing:
    """The tier has no such block (any more)."""


@dataclass(frozen=True)
class Corrupt:
    """The bytes do not match their checksum. ``where``: ``source`` (a store's slot) or ``tier``.

    A tier forgets what it found corrupt in itself. After a load the slot's bytes are undefined.
    """

    where: str


@dataclass(frozen=True)
class Failed:
    """The device, or the caller by ``cancel``, ended it. ``reason``: io, short, no_space,
    read_only, cancelled, stuck.
    """

    reason: str


Outcome = Done | Throttled | Missing | Corrupt | Failed


# -- what goes in ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class BlockSpec:
    """What all blocks of a batch have in common.

    Attributes:
        namespace: 32 bytes.
        group: KV group, 0 to 255.
        epoch: weights epoch.
        length: bytes of one shard.
        shards: shards of a block.
    """

    namespace: bytes
    group: int
    epoch: int
    length: int
    shards: int = 1

    def __post_init__(self) -> None:
        if len(self.namespace) != NAMESPACE_BYTES:
            raise ValueError(f"a namespace has {NAMESPACE_BYTES} bytes, not {len(self.namespace)}")
        if not 0 <= self.group <= 0xFF or not 0 <= self.epoch <= 0xFFFF_FFFF:
            raise ValueError(f"group {self.group} or epoch {self.epoch} is out of range")
        if not 0 < self.length <= 0xFFFF_FFFF or not 0 < self.shards <= SHARDS_MAX:
            raise ValueError(f"{self.shards} shards of {self.length} bytes are no block")


@dataclass(frozen=True)
class LoadBatch:
    """Blocks to bring into slots.

    Attributes:
        family: of all of them.
        keys: n keys of 1 to 64 bytes.
        places: ``PLACE_DTYPE`` (n, shards): whole pages of 4 KiB that hold a shard each. They
            belong to the tier until the batch's last completion.
        is_use: whether a load says that the blocks are wanted, and so worth keeping.
    """

    family: BlockSpec
    keys: list[bytes]
    places: Records
    is_use: bool = field(default=True, kw_only=True)

    def __post_init__(self) -> None:
        shape = (len(self.keys), self.family.shards)
        if not self.keys or self.places.shape != shape or self.places.dtype != PLACE_DTYPE:
            raise ValueError(f"places must be {shape} of PLACE_DTYPE, not {self.places.shape}")
        if not all(0 < len(key) <= KEY_BYTES_MAX for key in self.keys):
            raise ValueError(f"a key has 1 to {KEY_BYTES_MAX} bytes")


@dataclass(frozen=True)
class StoreBatch(LoadBatch):
    """Blocks to copy from slots, which must not change until the batch's last completion.

    Attributes:
        checksums: xxh3_128 of each shard, ``V16`` (n, shards).
        sequences: the core's commit sequence of each block, u64 (n,).
        parents: the sequence of the block that each continues, 0 for none, u64 (n,).
    """

    checksums: Records
    sequences: U64
    parents: U64

    def __post_init__(self) -> None:
        super().__post_init__()
        sums = np.dtype(f"V{CHECKSUM_BYTES}")
        if self.checksums.shape != self.places.shape or self.checksums.dtype != sums:
            raise ValueError(f"checksums must be V{CHECKSUM_BYTES} of shape {self.places.shape}")
        if self.sequences.shape != (len(self.keys),) or self.parents.shape != (len(self.keys),):
            raise ValueError("sequences and parents must have one number a block")


# -- what comes out --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Facts:
    """What a tier knows of n blocks of one family; rows of absent ones are zero.

    Attributes:
        present: which are there, of the right epoch, length and shard count, shape (n,).
        checksums: ``V16`` (n, shards).
        sequences, parents: u64 (n,), as they were stored.
    """

    present: Bools
    checksums: Records
    sequences: U64
    parents: U64

    @classmethod
    def none(cls, family: BlockSpec, count: int) -> Facts:
        """Facts of blocks that are not there."""
        sums = np.zeros((count, family.shards), f"V{CHECKSUM_BYTES}")
        numbers = np.zeros((2, count), np.uint64)
        return cls(np.zeros(count, np.bool_), sums, numbers[0], numbers[1])


@dataclass(frozen=True)
class Completion:
    """How blocks of a batch fared.

    Attributes:
        ticket: what ``submit_store`` or ``submit_load`` returned.
        parts: outcome and the batch's rows it is for, i64; every row comes in exactly one part of
            the final completion.
        final: the slots are the caller's again. A completion that is not final says that the
            device holds on to the rows it names (``Failed("stuck")``): nobody should wait for
            them, but their slots must not be used until the final one.
    """

    ticket: int
    parts: list[tuple[Outcome, I64]]
    final: bool = True

    def rows(self, kind: type[Outcome]) -> I64:
        """Rows whose outcome is of ``kind``, in order."""
        found = [rows for outcome, rows in self.parts if isinstance(outcome, kind)]
        return np.sort(np.concatenate(found)) if found else np.zeros(0, np.int64)


@dataclass(frozen=True)
class Evicted:
    """Blocks that a tier let go of by itself.

    ``cause``: ``space`` (to make room), ``checksum`` (it found their bytes wrong), ``asked`` (by an
    operator), or what a ``Failed`` says (they could not be read). What an outcome of a batch says
    is not told again.
    """

    namespace: bytes
    group: int
    keys: list[bytes]
    cause: str = "space"


@dataclass(frozen=True)
class Health:
    """``degraded`` is true while something works less well than it should; ``reasons`` say what
    and where, ready to be shown.
    """

    degraded: bool = False
    reasons: tuple[str, ...] = ()


@dataclass
class Counts:
    """Counters of a tier, by name; they only rise."""

    values: dict[str, int] = field(default_factory=dict)

    def add(self, name: str, amount: int = 1) -> None:
        """Count ``amount`` more."""
        if amount:
            self.values[name] = self.values.get(name, 0) + amount

    def __getitem__(self, name: str) -> int:
        return self.values.get(name, 0)


class Tier(Protocol):
    """One place for blocks. All calls from one thread."""

    name: str
    event_fd: int
    counts: Counts

    @property
    def batch_blocks_max(self) -> int:
        """Most blocks of a batch; larger ones are a ValueError."""

    def submit_store(self, batch: StoreBatch) -> int | Throttled:
        """Begin to store; a ticket, or ``Throttled`` for all of it.

        A block that is there already is ``Done`` without being written again.

        Raises:
            ValueError: the batch breaks a rule (places outside of the arena, not whole pages, too
                many blocks).
        """

    def submit_load(self, batch: LoadBatch) -> int | Throttled:
        """Begin to load; a ticket, or ``Throttled`` for all of it. Every shard is verified.

        Raises:
            ValueError: as ``submit_store``.
        """

    def cancel(self, ticket: int) -> None:
        """Nobody waits for it any more: what the device has not begun ends as
        ``Failed("cancelled")``. The final completion still comes.
        """

    def poll(self) -> list[Completion]:
        """What has ended since the last call, and the tier's own work that waits for a turn."""

    def look_up(self, family: BlockSpec, keys: Sequence[bytes]) -> Facts:
        """What is there, without reading it; counts as no use of the blocks."""

    def forget(self, namespace: bytes, group: int, keys: Sequence[bytes]) -> int:
        """Serve these keys no more; how many there were. Loads that run are not affected."""

    def take_evicted(self) -> list[Evicted]:
        """Blocks let go of since the last call."""

    def health(self) -> Health:
        """How the tier is doing."""

    def drain(self, deadline_s: float) -> bool:
        """Take no more and wait until nothing is in flight; false if the deadline came first."""

    def close(self) -> None:
        """Let go of all resources. Slots of what is in flight must never be used again."""


def check_places(places: Records, length: int, regions: Sequence[U8], page_bytes: int) -> None:
    """Raise ValueError unless all places are whole pages inside their regions."""
    room = -(-length // page_bytes) * page_bytes
    sizes = np.array([len(region) for region in regions], np.uint64)
    if (places["region"] >= len(sizes)).any():
        raise ValueError(f"there are {len(sizes)} regions, and a place is in none of them")
    if (places["offset"] % np.uint64(page_bytes)).any():
        raise ValueError(f"a place does not begin at a multiple of {page_bytes} bytes")
    limit = sizes[places["region"]]
    if ((limit < room) | (places["offset"] > limit - np.minimum(limit, np.uint64(room)))).any():
        raise ValueError(f"a place has no room for {room} bytes inside its region")


def gather(outcomes: Sequence[Outcome]) -> list[tuple[Outcome, I64]]:
    """Parts of a completion from one outcome a row."""
    if outcomes and all(each is outcomes[0] for each in outcomes):
        return [(outcomes[0], np.arange(len(outcomes)))]
    rows: dict[Outcome, list[int]] = {}
    for row, outcome in enumerate(outcomes):
        rows.setdefault(outcome, []).append(row)
    return [(outcome, np.array(found, np.int64)) for outcome, found in rows.items()]
