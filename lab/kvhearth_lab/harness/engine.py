"""A scripted engine that verifies every byte: content follows from key, shard and epoch.

It stores and loads through the public client and copier, and distinguishes wrong bytes from misses.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import numpy as np

from kvhearth import connect
from kvhearth.client import KVClient
from kvhearth.contract import Contract, GroupKind, GroupSpec
from kvhearth.copiers.base import BlockFailure, Copier, Ticket
from kvhearth.errors import KVHearthError, Reason
from kvhearth.model import U8, Bools, Records
from kvhearth.page_layout import PagedKV
from kvhearth.results import CommitGroup, Pin, Reservation
from kvhearth.session.link import Arena
from kvhearth.transfer.copier_pool import default_copier
from kvhearth_lab.harness import HUNG_S

BLOCK_TOKENS = 16
PAGES = 64
"""Upper bound on the blocks of one load."""
STORE_MAX = 96
"""Upper bound on the blocks of one store; a daemon binds that many in two portions."""
Block: TypeAlias = Any
"""Name of a block: its key of 32 bytes, or what ``key_of`` makes its key of, such as a number."""


def contract_of(page_bytes: int, *, shards: int = 1, model: str = "m") -> Contract:
    """Return a contract of one full-attention group of blocks of ``shards`` x ``page_bytes``."""
    group = GroupSpec(GroupKind.FULL, BLOCK_TOKENS, page_bytes, shards=shards)
    return Contract(model, "r", "uint8", (group,), tensor_parallel=shards)


def key_of(model: str, number: int) -> bytes:
    """Return the key of a model's block, 32 bytes."""
    return hashlib.sha256(f"{model} {number}".encode()).digest()


def content(key: bytes, shard: int, epoch: int, size: int) -> U8:
    """Return the bytes of one shard of a block under one weights epoch, shape (size,)."""
    seed = int.from_bytes(key[:16], "little") ^ (shard << 96) ^ (epoch << 104)
    return np.frombuffer(np.random.Generator(np.random.SFC64(seed)).bytes(size), np.uint8)


def hung(what: str) -> KVHearthError:
    """Return the error of an operation that never ended."""
    return KVHearthError(Reason.INTERNAL, f"hang: {what}")


@dataclass
class Clock:
    """Durations of operations. ``slow`` holds (name, begin, end) by ``time.monotonic``."""

    slow_s: float = 0.05
    counts: Counter[str] = field(default_factory=Counter)
    slow: list[tuple[str, float, float]] = field(default_factory=list)
    doing: tuple[str, float] = ("", 0.0)

    @contextlib.contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Count and time one operation."""
        begin = time.monotonic()
        self.doing = (name, begin)
        try:
            yield
        finally:
            end = time.monotonic()
            self.doing = ("", 0.0)
            self.counts[name] += 1
            if end - begin > self.slow_s:
                self.slow.append((name, begin, end))


@dataclass
class Copied:
    """Result of copying n shards: ``ok`` shards; for a load, the ``wrong`` ones among them; for a
    store, their checksums. ``alive``: the daemon was still alive after the copy.
    """

    ok: Bools
    wrong: Bools
    checksums: U8
    reasons: dict[BlockFailure, int]
    alive: bool


@dataclass
class Stored:
    """Result of a store. ``bound``: blocks that the daemon acknowledged, new or not; ``slots``:
    slots that were written.
    """

    bound: list[Block]
    reason: str = ""
    slots: set[int] = field(default_factory=set)


@dataclass
class Seen:
    """Result of a check of blocks.

    Attributes:
        lower_tier: present, and not ready in DRAM yet.
        wrong: a sentence for each shard that was served with wrong bytes.
        caught: a sentence for each case in which a checksum prevented that.
        reason: why the daemon did not answer, or empty.
    """

    right: list[Block] = field(default_factory=list)
    absent: list[Block] = field(default_factory=list)
    lower_tier: list[Block] = field(default_factory=list)
    failed: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    caught: list[str] = field(default_factory=list)
    reason: str = ""

    @property
    def bad(self) -> list[str]:
        """Sentences for all that must never happen."""
        return self.wrong + self.caught


class RankLike(Protocol):
    """Interface of a rank, in this process or in another."""

    number: int

    @property
    def boot_id(self) -> str:
        """ID of the boot it is attached to, or empty."""

    def store(
        self, boot_id: str, keys: Sequence[bytes], epoch: int, extents: Records
    ) -> Copied | None:
        """Write the shards of ``keys`` into ``extents`` (n,); None while no arena is mapped."""

    def load(
        self, boot_id: str, keys: Sequence[bytes], epoch: int, extents: Records
    ) -> Copied | None:
        """Load ``extents`` and compare them; None while no arena is mapped."""

    def close(self) -> None:
        """Release everything."""


class Rank:
    """One rank in this process: client, pages, and a copier of the current boot."""

    def __init__(self, client: KVClient, number: int, page_bytes: int) -> None:
        self.client = client
        self.number = number
        self.pages: U8 = np.zeros((STORE_MAX, page_bytes), np.uint8)
        self._kv = PagedKV([self.pages])
        self._arena: Arena | None = None
        self._copier: Copier | None = None
        client.add_quiesce_hook(self._drain)

    @property
    def boot_id(self) -> str:
        return self.client.boot_id

    def fill(self, keys: Sequence[bytes], epoch: int) -> None:
        """Compute the pages of ``keys``."""
        for page, key in enumerate(keys):
            self.pages[page] = content(key, self.number, epoch, self.pages.shape[1])

    def wrong(self, keys: Sequence[bytes], epoch: int) -> Bools:
        """Return which of the first pages differ from those of ``keys``."""
        size = self.pages.shape[1]
        pairs = zip(keys, self.pages, strict=False)
        return np.array(
            [not np.array_equal(page, content(k, self.number, epoch, size)) for k, page in pairs]
        )

    def store(
        self, boot_id: str, keys: Sequence[bytes], epoch: int, extents: Records
    ) -> Copied | None:
        self.fill(keys, epoch)
        copier = self.copier()
        if copier is None:
            return None
        return self._wait(copier, copier.store(boot_id, np.arange(len(keys)), extents))

    def load(
        self, boot_id: str, keys: Sequence[bytes], epoch: int, extents: Records
    ) -> Copied | None:
        self.pages[:] = 0
        copier = self.copier()
        if copier is None:
            return None
        copied = self._wait(copier, copier.load(boot_id, extents, np.arange(len(keys))))
        copied.wrong = self.wrong(keys, epoch) & copied.ok
        return copied

    def close(self) -> None:
        """Release everything.

        Raises:
            KVHearthError: copies do not drain.
        """
        closed = self.client.close(HUNG_S)
        if self._copier is not None:
            self._copier.check_books()
            self._copier.close()
            # These are the last references to the mapping: dropping them unmaps it, and the daemon
            # sees that.
            self._copier = self._arena = None
        if not closed:
            raise hung("copies do not drain")

    def copier(self) -> Copier | None:
        """Return a copier for the current boot; None while no arena is mapped."""
        arena = self.client.arena
        if arena is not None and arena is not self._arena:
            if self._copier is not None:
                self._copier.close()
            self._copier = self._arena = None
            try:
                self._copier, self._arena = default_copier()(self._kv, arena), arena
            except KVHearthError as error:
                # Its daemon has died meanwhile, and it was unmapped.
                if error.reason is not Reason.CLOSED:
                    raise
        return self._copier

    def _wait(self, copier: Copier, ticket: Ticket | None) -> Copied:
        if ticket is None:
            raise hung("the copier's queue is full")
        done = copier.wait(ticket, HUNG_S)
        if done is None:
            raise hung("a copy")
        sums = np.zeros((len(done.ok), 16), np.uint8)
        return Copied(
            done.ok,
            np.zeros(len(done.ok), np.bool_),
            sums if done.checksums is None else done.checksums,
            done.reasons,
            self._arena is not None and self._arena.alive(),
        )

    def _drain(self, deadline_s: float) -> bool:
        return self._copier is None or self._copier.drain(deadline_s)


def rank_of(url: str, contract: Contract, engine_id: str, number: int) -> Rank:
    """Return a rank in this process; number 0 is the scheduler, too."""
    client = connect(url, contract, engine_id=engine_id, scheduler=number == 0, rank=number)
    return Rank(client, number, contract.groups[0].page_bytes)


class Engine:
    """One engine of the contract's world size.

    Args:
        others: ranks 1 and up; by default they are in this process, too.
        key_of: returns the key of a block; by default a block's name is its key.
    """

    def __init__(
        self,
        url: str,
        contract: Contract,
        engine_id: str,
        others: Sequence[RankLike] | None = None,
        key_of: Callable[[Block], bytes] | None = None,
    ) -> None:
        self.contract = contract
        self.engine_id = engine_id
        self.clock = Clock()
        self.scheduler = rank_of(url, contract, engine_id, 0)
        self.client = self.scheduler.client
        if others is None:
            numbers = range(1, contract.world_size)
            others = [rank_of(url, contract, engine_id, number) for number in numbers]
        self.ranks: list[RankLike] = [self.scheduler, *others]
        self._key_of = key_of

    @property
    def model(self) -> str:
        """Name of the model."""
        return self.contract.model

    @property
    def epoch(self) -> int:
        """Epoch of its weights; -1 while unknown."""
        return self.client.epoch

    @property
    def ready(self) -> bool:
        """Whether all ranks are attached to the same boot."""
        boots = {rank.boot_id for rank in self.ranks}
        return len(boots) == 1 and "" not in boots and self.client.wait_ready(0)

    def wait_ready(
        self, timeout_s: float = 20.0, give_up: Callable[[], bool] | None = None
    ) -> bool:
        """Wait until it is ready; False if ``give_up()`` returns true.

        Raises:
            KVHearthError: it is not ready in time.
        """
        end = time.monotonic() + timeout_s
        while not self.ready:
            if give_up is not None and give_up():
                return False
            if time.monotonic() > end:
                boots = [rank.boot_id for rank in self.ranks]
                described = f"{self.client.refusal}, {boots}, {self.client.counters()}"
                raise hung(f"{self.engine_id} does not attach: {described}")
            self.client.wait_ready(0.02)
            time.sleep(0.005)
        return True

    def keys(self, blocks: Sequence[Block]) -> list[bytes]:
        """Return the keys of blocks."""
        return list(blocks) if self._key_of is None else [self._key_of(one) for one in blocks]

    def reserve(self, count: int) -> Reservation:
        """Reserve slots for ``count`` blocks."""
        with self.clock.timed("reserve"):
            return self.client.reserve({0: count})

    def store(
        self, blocks: Sequence[Block], *, sums: bool = True, parent: Block | None = None
    ) -> Stored:
        """Write and commit at most ``STORE_MAX`` blocks; fewer if fewer slots are granted.

        Args:
            sums: commit with the client's checksums.
            parent: the block before the first; None or empty for none.
        """
        taken = self.reserve(len(blocks))
        epoch = self.epoch
        extents = taken.groups[0]
        blocks = blocks[: len(extents)]
        if not blocks:
            return Stored([], taken.reason or taken.short_reason)
        keys = self.keys(blocks)
        checksums = np.zeros((*extents.shape, 16), np.uint8)
        with self.clock.timed("copy"):
            for rank in self.ranks:
                done = rank.store(taken.boot_id, keys, epoch, extents[:, rank.number])
                if done is None or not done.ok.all():
                    self.client.abort({0: extents}, boot_id=taken.boot_id)
                    return Stored([], "copy")
                checksums[:, rank.number] = done.checksums
        before = b"" if parent is None or parent == b"" else self.keys([parent])[0]
        group = CommitGroup(keys, extents, checksums if sums else None, before)
        with self.clock.timed("commit"):
            result = self.client.commit({0: group}, boot_id=taken.boot_id)
        slots = set(extents["slot"].reshape(-1).tolist())
        return Stored([] if result.reason else list(blocks), result.reason, slots)

    def check(
        self, blocks: Sequence[Block], seen: Seen | None = None, *, prefetch: bool = False
    ) -> Seen:
        """Look blocks up and compare every byte that is served, in portions, until one gets no
        answer. ``prefetch``: request promotion of the blocks that are not in DRAM.
        """
        seen = Seen() if seen is None else seen
        for start in range(0, len(blocks), PAGES):
            self._check_portion(list(blocks[start : start + PAGES]), seen, prefetch)
            if seen.reason:
                break
        return seen

    def _check_portion(self, blocks: list[Block], seen: Seen, prefetch: bool) -> None:
        with self.clock.timed("lookup"):
            found = self.client.lookup({0: self.keys(blocks)}, lease=False, prefetch=prefetch)
        if found.reason:
            seen.reason = found.reason
            return
        wanted: list[Block] = []
        flags = zip(found.groups[0].present.tolist(), found.groups[0].ready.tolist(), strict=True)
        for block, (present, ready) in zip(blocks, flags, strict=True):
            (wanted if ready else seen.lower_tier if present else seen.absent).append(block)
        if wanted:
            self._load(wanted, seen)

    def _load(self, blocks: list[Block], seen: Seen) -> None:
        with self.clock.timed("lookup"):
            found = self.client.lookup({0: self.keys(blocks)})
        epoch = self.epoch
        seen.reason = found.reason
        leased = found.groups[0].leased.tolist()
        blocks = [block for block, flag in zip(blocks, leased, strict=True) if flag]
        if not blocks:
            return
        extents = found.groups[0].extents.reshape(len(blocks), self.contract.groups[0].shards)
        good = np.ones(len(blocks), np.bool_)
        failed = np.zeros(len(blocks), np.bool_)
        keys = self.keys(blocks)
        with self.clock.timed("copy"):
            for rank in self.ranks:
                done = rank.load(found.boot_id, keys, epoch, extents[:, rank.number])
                if done is None:
                    good[:] = False
                    continue
                where = f"shard {rank.number} epoch {epoch} boot {found.boot_id}"
                self._judge(done, blocks, where, seen)
                good &= done.ok & ~done.wrong
                failed |= ~done.ok
        bad = extents[failed]
        with self.clock.timed("release"):
            self.client.release(found.lease, bad if len(bad) else None)
        seen.right += [block for block, flag in zip(blocks, good.tolist(), strict=True) if flag]

    def _judge(self, done: Copied, blocks: list[Block], where: str, seen: Seen) -> None:
        seen.failed.update(done.reasons)
        # The successor of a daemon that died meanwhile may reuse slots: no wrong byte was served.
        if done.reasons.get(BlockFailure.CHECKSUM_MISMATCH) and done.alive:
            seen.caught.append(f"{self.engine_id}: only a checksum stopped {done.reasons}")
        for position in np.flatnonzero(done.wrong).tolist():
            block = blocks[position]
            name = block.hex()[:16] if isinstance(block, bytes) else block
            seen.wrong.append(f"{self.model} block {name} {where}: served other bytes")

    def pin(self, blocks: Sequence[Block], ttl_s: float) -> Pin:
        """Pin blocks."""
        return self.client.pin({0: self.keys(blocks)}, ttl_s)

    def close(self) -> None:
        """End all ranks' sessions, the scheduler's last.

        Raises:
            KVHearthError: copies of one do not drain.
        """
        with contextlib.ExitStack() as ends:
            for rank in self.ranks:
                ends.callback(rank.close)


@contextlib.contextmanager
def engine_of(url: str, contract: Contract, engine_id: str = "e") -> Iterator[Engine]:
    """Yield an attached engine, and close it at the end."""
    engine = Engine(url, contract, engine_id)
    try:
        engine.wait_ready()
        yield engine
    finally:
        engine.close()
