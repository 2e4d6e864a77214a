"""Protocol of a tier: stores blocks from arena slots, loads them into arena slots, verifies every
byte.

One loop drives a tier. ``submit_store`` and ``submit_load`` take batches and never wait.
``event_fd`` becomes readable when ``poll`` has something to report; ``poll`` never waits either.
The result for a block is an outcome, not an exception: an exception means that the caller broke a
rule of this module.
"""

from __future__ import annotations

import enum
import math
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from kvhearth.clock import REAL_TIME, Clock
from kvhearth.model import CHECKSUM_BYTES, I64, U8, Bools, Records
from kvhearth_server.tiers.figures import RemoteFigures, TierFigures

NAMESPACE_BYTES = 32
KEY_BYTES_MAX = 64
SHARDS_MAX = 0xFFFF

U64 = npt.NDArray[np.uint64]

ADDRESS_DTYPE = np.dtype([("region", "<u4"), ("reserved", "<u4"), ("offset", "<u8")])
"""Place of a shard in the arena: number of the region (an arena segment), byte offset inside it."""


# -- outcomes --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Done:
    """Stored: the block survives a crash of this process. Loaded: it is verified and in place."""


class Refusal(enum.StrEnum):
    """Reasons why a tier refuses blocks; for ``TOO_LARGE`` as it is configured.

    ``OPEN``: its breaker is open, or it is off for these blocks. ``RATE`` and ``QUOTA``: a bound
    on requests or bytes, of a moment or of a day.
    """

    QUEUE = "queue"
    ADMISSION = "admission"
    BUDGET = "budget"
    RECOVERING = "recovering"
    DEGRADED = "degraded"
    FULL = "full"
    DRAINING = "draining"
    TOO_LARGE = "too_large"
    OPEN = "open"
    RATE = "rate"
    QUOTA = "quota"


@dataclass(frozen=True)
class Throttled:
    """Refused for now."""

    reason: Refusal
    retry_after_s: float = 0.0


@dataclass(frozen=True)
class Missing:
    """The tier does not have this block, or has it no longer."""


@dataclass(frozen=True)
class Corrupt:
    """The bytes do not match their checksum. ``where``: ``source`` (a store's slot), ``tier``, or
    ``remote`` (a shared tier).

    A tier forgets blocks that it finds corrupt on its own media. After a failed load the slot's
    bytes are undefined.
    """

    where: str


class Failure(enum.StrEnum):
    """Reasons why a device, a remote service or a caller's ``cancel`` ended a batch.

    ``TIMEOUT``: no answer by the deadline, or none to be expected before the caller's.
    ``UNREACHABLE``: nobody answers. ``DENIED``: the service refuses this daemon.
    """

    IO = "io"
    SHORT = "short"
    NO_SPACE = "no_space"
    READ_ONLY = "read_only"
    CANCELLED = "cancelled"
    STUCK = "stuck"
    TIMEOUT = "timeout"
    UNREACHABLE = "unreachable"
    DENIED = "denied"


@dataclass(frozen=True)
class Failed:
    """Ended by the device, or by the caller's ``cancel``."""

    reason: Failure


Outcome = Done | Throttled | Missing | Corrupt | Failed


# -- batches ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BlockSpec:
    """Properties common to all blocks of a batch.

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
    """Blocks to load into slots.

    Attributes:
        family: properties of every block.
        keys: n keys of 1 to 64 bytes.
        places: ``ADDRESS_DTYPE`` (n, shards): whole pages of 4 KiB that hold a shard each. They
            belong to the tier until the batch's last completion.
        is_use: whether the load shows that the blocks are in demand and worth keeping.
        wait_s: seconds for which somebody waits for the blocks; a shared tier begins no load that
            would take longer.
    """

    family: BlockSpec
    keys: list[bytes]
    places: Records
    is_use: bool = field(default=True, kw_only=True)
    wait_s: float = field(default=math.inf, kw_only=True)

    def __post_init__(self) -> None:
        shape = (len(self.keys), self.family.shards)
        if not self.keys or self.places.shape != shape or self.places.dtype != ADDRESS_DTYPE:
            raise ValueError(f"places must be {shape} of PLACE_DTYPE, not {self.places.shape}")
        if not all(0 < len(key) <= KEY_BYTES_MAX for key in self.keys):
            raise ValueError(f"a key has 1 to {KEY_BYTES_MAX} bytes")


@dataclass(frozen=True)
class StoreBatch(LoadBatch):
    """Blocks to copy from slots, which must not change until the batch's last completion.

    Attributes:
        checksums: xxh3_128 of each shard, ``V16`` (n, shards).
        sequences: the core's commit sequence of each block, u64 (n,).
        parents: sequence of the block that each one continues, 0 for none, u64 (n,).
        parent_keys: keys of these, empty for none; for shared tiers, other stores leave them out.
        renew: write blocks that a shared tier has, too, so that their life there begins again.
    """

    checksums: Records
    sequences: U64
    parents: U64
    parent_keys: list[bytes] = field(default_factory=list, kw_only=True)
    renew: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        sums = np.dtype(f"V{CHECKSUM_BYTES}")
        if self.checksums.shape != self.places.shape or self.checksums.dtype != sums:
            raise ValueError(f"checksums must be V{CHECKSUM_BYTES} of shape {self.places.shape}")
        if self.sequences.shape != (len(self.keys),) or self.parents.shape != (len(self.keys),):
            raise ValueError("sequences and parents must have one number a block")
        if self.parent_keys and len(self.parent_keys) != len(self.keys):
            raise ValueError("parent_keys must be empty or have one key a block")


# -- results ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Facts:
    """Lookup result for n blocks of one family; rows of absent blocks are zero.

    Attributes:
        present: blocks found with the right epoch, length and shard count, shape (n,); of a shared
            tier, those that it may have.
        checksums: ``V16`` (n, shards).
        sequences, parents: u64 (n,), as they were stored.
    """

    present: Bools
    checksums: Records
    sequences: U64
    parents: U64

    @classmethod
    def none(cls, family: BlockSpec, count: int) -> Facts:
        """Facts of ``count`` absent blocks."""
        sums = np.zeros((count, family.shards), f"V{CHECKSUM_BYTES}")
        numbers = np.zeros((2, count), np.uint64)
        return cls(np.zeros(count, np.bool_), sums, numbers[0], numbers[1])


class Known(NamedTuple):
    """What a tier knows of n blocks.

    Attributes:
        present: shape (n,).
        asking: blocks of which it is finding out whether it has them, (n,); None for none.
    """

    present: Bools
    asking: Bools | None


@dataclass(frozen=True)
class Completion:
    """Outcomes of a batch's blocks.

    Attributes:
        ticket: return value of ``submit_store`` or ``submit_load``.
        parts: pairs of an outcome and its rows of the batch, i64; the final completion has every
            row in exactly one part.
        final: the slots belong to the caller again. A completion that is not final means that the
            device holds on to its rows (``Failed("stuck")``): callers should stop waiting for
            them, but must not use their slots before the final completion.
        facts: of a load from a tier whose ``look_up`` does not know them, as they were read: rows
            that were not loaded are zero; None where ``look_up`` tells.
        parent_keys: then also the keys of the blocks that these continue, empty for none.
    """

    ticket: int
    parts: list[tuple[Outcome, I64]]
    final: bool = True
    facts: Facts | None = None
    parent_keys: list[bytes] = field(default_factory=list)

    def rows(self, kind: type[Outcome]) -> I64:
        """Return the rows whose outcome has type ``kind``, in order."""
        found = [rows for outcome, rows in self.parts if isinstance(outcome, kind)]
        return np.sort(np.concatenate(found)) if found else np.zeros(0, np.int64)


@dataclass(frozen=True)
class Evicted:
    """Blocks that a tier dropped by itself.

    ``cause``: ``space`` (to make room), ``checksum`` (the bytes were wrong), ``asked`` (by an
    operator), or the reason of a ``Failed`` (they could not be read). Blocks whose loss a batch's
    outcome already reports are not listed here.
    """

    namespace: bytes
    group: int
    keys: list[bytes]
    cause: str = "space"


@dataclass
class Counts:
    """Counters of a tier, by name; they only rise."""

    values: dict[str, int] = field(default_factory=dict)

    def add(self, name: str, amount: int = 1) -> None:
        """Increase the counter ``name`` by ``amount``."""
        if amount:
            self.values[name] = self.values.get(name, 0) + amount

    def refused(self, what: str, refusal: Throttled, blocks: int) -> Throttled:
        """Count refused blocks by the reason; return the refusal. ``what``: stores or loads."""
        self.add(f"{what}_refused_{refusal.reason}", blocks)
        return refusal

    def __getitem__(self, name: str) -> int:
        return self.values.get(name, 0)


REMOTE = "remote"
"""``Kind.about`` of a shared tier's problems; their ``directory`` is the remote's name."""


class Kind(NamedTuple):
    """Identity of a problem, which stays the same while the problem lasts, whatever its numbers
    are.

    Attributes:
        directory: its path; empty for what all directories share.
        word: one word for the problem.
        about: affected activity: writes, reads, ...
    """

    directory: str
    word: str
    about: str = ""


@dataclass(frozen=True)
class Offer:
    """Used blocks that a tier drops at its next ``poll``; loads that begin before are served."""

    family: BlockSpec
    keys: list[bytes]


OwnerOf = Callable[[bytes, int], str]
"""Names the tenant whose lookups can find blocks of a namespace and weights epoch; empty if none
can any more.
"""


class Identity(NamedTuple):
    """What names a namespace's blocks at a shared tier.

    Attributes:
        contract: the contract's canonical JSON.
        label: name of the weights; empty for those of the contract.
    """

    tenant: str
    contract: str
    label: str


Identify = Callable[[BlockSpec], Identity | None]
"""Returns the identity of a family's blocks; None if a shared tier must not have them."""


class Tier(Protocol):
    """A place for blocks. All calls come from one thread.

    Members with a body suit a tier of plain memory; a tier inherits or overrides them.
    """

    name: str
    event_fd: int
    counts: Counts

    @property
    def batch_blocks_max(self) -> int:
        """Most blocks of a batch; larger ones are a ValueError."""

    @property
    def shared(self) -> bool:
        """Whether other daemons use the tier, too.

        A shared tier is behind the daemon's own. Blocks are published to it: a store may be
        refused at any time. Its contents are not listed, ``look_up`` may be wrong, a load ends at
        its first miss, and completions bring the facts.
        """
        return False

    @property
    def life_s(self) -> float:
        """Seconds after which a shared tier may drop a block; 0 for no such time."""
        return 0.0

    @property
    def buffer_bytes(self) -> int:
        """Size of the region behind the arena's segments from which a shared tier can store, too;
        0 for none.
        """
        return 0

    @property
    def serving(self) -> bool:
        """Whether requests are served now; a shared tier's remote may be away for a while."""
        return True

    @property
    def due_at(self) -> float:
        """Monotonic time at which ``poll`` must be called, if nothing happens before."""
        return math.inf

    @property
    def queue_reads(self) -> int:
        """Records to read (one a shard) that may wait or run before ``Throttled("queue")``."""
        return 1024

    @property
    def queue_writes(self) -> int:
        """Requests to write that may wait or run before ``Throttled("queue")``."""
        return 1024

    # -- batches -----------------------------------------------------------------------------------

    def submit_store(self, batch: StoreBatch) -> int | Throttled:
        """Begin to store a batch. Return its ticket, or ``Throttled`` if the whole batch is
        refused.

        A block that the tier already has is ``Done`` without being written again.

        Raises:
            ValueError: the batch breaks a rule (places outside the arena, not whole pages, too many
                blocks).
        """

    def submit_load(self, batch: LoadBatch) -> int | Throttled:
        """Begin to load a batch. Return its ticket, or ``Throttled`` if the whole batch is refused.
        Every shard is verified.

        Raises:
            ValueError: as ``submit_store``.
        """

    def cancel(self, ticket: int) -> None:
        """Give up a batch: what has not begun ends as ``Failed("cancelled")``, and it completes."""

    def poll(self) -> list[Completion]:
        """Return the completions since the last call, and do the tier's own pending work."""

    # -- lookup, removal ---------------------------------------------------------------------------

    def look_up(self, family: BlockSpec, keys: Sequence[bytes]) -> Facts:
        """Return the facts of blocks without reading them; this does not count as a use."""

    def ask(self, family: BlockSpec, keys: Sequence[bytes], window: int = 0) -> Known:
        """Return what is known of a chain's blocks, root first, for a lookup; never waits. A shared
        tier begins to find out what it does not know.

        Args:
            window: blocks at the end of a hit that it needs; 0 for all from the root on.
        """
        return Known(self.look_up(family, keys).present, None)

    def has(self, family: BlockSpec, keys: Sequence[bytes]) -> Bools:
        """Return which blocks are there for all that is known, (n,); a shared tier may be wrong."""
        return self.look_up(family, keys).present

    def list_keys(
        self, namespace: bytes, group: int, place: int, count: int
    ) -> tuple[list[bytes], int]:
        """List about ``count`` keys of a namespace's KV group, from a place (at first 0) on, and
        return them with the next place, -1 at the end. What is there all the while is listed.
        """
        return [], -1

    def forget(self, namespace: bytes, group: int, keys: Sequence[bytes]) -> int:
        """Stop serving these keys; return how many were present. Running loads go on."""

    def forget_namespace(self, namespace: bytes, count: int) -> Evicted | None:
        """Stop serving and return up to ``count`` blocks of a namespace, all of one KV group."""

    def take_evicted(self) -> list[Evicted]:
        """Return the blocks dropped since the last call."""

    def take_offers(self) -> list[Offer]:
        """Return the offers made since the last call; none by default."""
        return []

    # -- tenants -----------------------------------------------------------------------------------

    def use_owners(self, owner_of: OwnerOf) -> None:
        """Name blocks' tenants by this function from now on, if the tier has quotas."""
        return

    def use_budget(self, bytes_per_day: int) -> None:
        """Write at most this from now on, if the tier wears; 0 for no bound."""
        return

    def quota_bytes(self, tenant: str) -> int:
        """Return the bytes that a tenant may use; 0 for a tier without quotas."""
        return 0

    def use_identities(self, identify: Identify) -> None:
        """Name blocks by this function from now on, if the tier is shared; it has none before."""
        return

    # -- status ------------------------------------------------------------------------------------

    @property
    def recovering(self) -> bool:
        """Whether blocks are still being read back, so that absent ones may yet appear."""
        return False

    @property
    def loads_of_the_dead(self) -> bool:
        """Whether requests of a dead daemon may still write to the arena. While it is true, slots
        that the dead daemon was loading into must stay quarantined.
        """
        return False

    @property
    def progress(self) -> tuple[int, ...]:
        """Counters that change with each step towards room for stores. Loads do not count."""
        return ()

    @property
    def directories(self) -> Sequence[Path]:
        """Directories whose blocks outlive the daemon; the epochs that name them are kept there."""
        return ()

    def estimate_s(self, loads: Sequence[tuple[BlockSpec, int]], waiting: int = 0) -> float:
        """Estimate the seconds that loading these numbers of blocks would take from now, behind
        ``waiting`` records that have not reached the tier yet; the loads themselves may be among
        these.
        """
        return 0.0

    def problems(self) -> Mapping[Kind, str]:
        """Return all current problems: for each kind, a sentence for people that says where."""
        return {}

    def figures(self) -> TierFigures | None:
        """Return the current figures of a tier of files; None for any other. Never waits."""
        return None

    def remote_figures(self) -> RemoteFigures | None:
        """Return the current figures of a remote; None for any other tier. Never waits."""
        return None

    # -- the end -----------------------------------------------------------------------------------

    def drain(self, deadline_s: float) -> bool:
        """Stop taking batches and wait until nothing is in flight; false if that takes too long."""

    def close(self) -> None:
        """Release all resources. Slots of requests in flight must never be used again."""


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
    """Group the outcomes, one for each row, into the parts of a completion."""
    if outcomes and all(each is outcomes[0] for each in outcomes):
        return [(outcomes[0], np.arange(len(outcomes)))]
    rows: dict[Outcome, list[int]] = {}
    for row, outcome in enumerate(outcomes):
        rows.setdefault(outcome, []).append(row)
    return [(outcome, np.array(found, np.int64)) for outcome, found in rows.items()]


class Bucket:
    """Bounds a rate: allows ``rate`` units a second and ``size`` at once; a rate of 0, everything.

    It begins full. More than it holds can be spent: that leaves a debt that others wait for.
    """

    def __init__(self, rate: float, size: float, now: float) -> None:
        self._rate, self._size = rate, size
        self._level, self._at = size, now

    @property
    def unbounded(self) -> bool:
        """Whether everything is allowed."""
        return self._rate == 0

    def left(self, now: float) -> float:
        """Return the units available now; negative for debt."""
        passed, self._at = max(0.0, now - self._at), max(self._at, now)
        self._level = min(self._size, self._level + passed * self._rate)
        return self._level

    def wait_s(self, now: float) -> float:
        """Return the seconds until something can be spent."""
        if self.unbounded or (left := self.left(now)) > 0:
            return 0.0
        return -left / self._rate + 0.001

    def spend(self, amount: float, now: float) -> None:
        """Spend units, even beyond the level."""
        self._level = self.left(now) - amount


NAMESPACES_NAME = "namespaces"
TOKENS_NAME = "tokens"
FOREIGN_NAMES = {NAMESPACES_NAME, "namespaces.new", TOKENS_NAME, "tokens-wal", "tokens-journal"}
"""Files in the tier's directories that are not its own. They have room beside its capacity."""


class DirectoryError(Exception):
    """The directory cannot be used at all; the text gives the reason and a remedy."""


T = TypeVar("T")


def ask_each(
    paths: Iterable[Path],
    ask: Callable[[Path], T],
    patience_s: float,
    undo: Callable[[T], None] = lambda _: None,
    clock: Clock = REAL_TIME,
) -> dict[Path, T | DirectoryError]:
    """Return the answer of each path, or the error that ``ask`` raised.

    Each is asked on a thread of its own, which is abandoned after ``patience_s``: a drive may hang.

    Args:
        undo: called with an answer that came too late.
    """

    def run(path: Path, told: Future[T | DirectoryError]) -> None:
        try:
            answer: T | DirectoryError = ask(path)
        except DirectoryError as error:
            answer = error
        if told.set_running_or_notify_cancel():
            told.set_result(answer)
        elif not isinstance(answer, DirectoryError):
            undo(answer)

    end = clock.now() + patience_s
    asked = {path: Future[T | DirectoryError]() for path in paths}
    threads = [
        threading.Thread(target=run, args=each, name="kvhearth-open", daemon=True)
        for each in asked.items()
    ]
    for thread in threads:
        clock.start(thread)
    found = dict[Path, T | DirectoryError]()
    for (path, told), thread in zip(asked.items(), threads, strict=True):
        clock.join(thread, max(0.0, end - clock.now()))
        if told.cancel():
            hangs = f"did not answer in {patience_s:g} s; see dmesg: its drive may hang"
            failed = "could not be opened, by a bug: see the log"
            found[path] = DirectoryError(f"{path} {hangs if thread.is_alive() else failed}")
        else:
            found[path] = told.result()
    return found
