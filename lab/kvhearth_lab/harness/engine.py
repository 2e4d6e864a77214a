"""An engine whose keys and bytes are functions of block numbers, so that every answer can be
checked.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvhearth import connect
from kvhearth.client import KVClient
from kvhearth.contract import Contract, GroupKind, GroupSpec
from kvhearth.copiers.base import Done, Ticket
from kvhearth.copiers.host import HostCopier
from kvhearth.errors import KVHearthError, Reason
from kvhearth.model import U8, Bools, Records, Tier
from kvhearth.page_layout import PagedKV
from kvhearth.results import CommitGroup
from kvhearth.session.arena import ArenaMapping

BLOCK_TOKENS = 16


def contract_of(model: str, page_bytes: int, shards: int) -> Contract:
    """Return a contract of one full-attention group of blocks of ``shards`` x ``page_bytes``."""
    group = GroupSpec(GroupKind.FULL, BLOCK_TOKENS, page_bytes, shards=shards)
    return Contract(model, "torture", "uint8", (group,), tensor_parallel=shards)


def key_of(model: str, number: int) -> bytes:
    """Return the key of a model's block, 32 bytes."""
    return hashlib.sha256(f"{model} {number}".encode()).digest()


def content(key: bytes, shard: int, epoch: int, size: int) -> U8:
    """Return the bytes of one shard of a block under one weights epoch, shape (size,)."""
    seed = int.from_bytes(key[:16], "little") ^ (shard << 96) ^ (epoch << 104)
    return np.frombuffer(np.random.Generator(np.random.SFC64(seed)).bytes(size), np.uint8)


PAGES = 48
"""Upper bound on the blocks of one store or load."""
COPY_S = 20.0
CLOSE_S = 10.0


def hung(what: str) -> KVHearthError:
    """Return the error of an operation of ours that never ended."""
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
class Seen:
    """Result of a check of blocks, by their numbers.

    Attributes:
        lower_tier: present, and not in DRAM yet.
        wrong: a sentence for each block that was served with wrong bytes.
        caught: a sentence for each case in which a checksum prevented that.
        reason: why the daemon did not answer, or empty.
    """

    right: list[int] = field(default_factory=list)
    absent: list[int] = field(default_factory=list)
    lower_tier: list[int] = field(default_factory=list)
    failed: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    caught: list[str] = field(default_factory=list)
    reason: str = ""


class Rank:
    """One rank: client, pages, and a copier for the boot that it is attached to."""

    def __init__(self, client: KVClient, number: int, page_bytes: int) -> None:
        self.client = client
        self.number = number
        self.pages: U8 = np.zeros((PAGES, page_bytes), np.uint8)
        self._kv = PagedKV([self.pages])
        self._arena: ArenaMapping | None = None
        self._copier: HostCopier | None = None
        client.add_quiesce_hook(self._drain)

    def store(self, boot_id: str, keys: Sequence[bytes], epoch: int, extents: Records) -> U8 | None:
        """Write the shards of ``keys`` into ``extents`` (n,). Returns their checksums (n, 16), None
        if not all could be written.
        """
        for page, key in enumerate(keys):
            self.pages[page] = content(key, self.number, epoch, self.pages.shape[1])
        copier = self._usable()
        if copier is None:
            return None
        done = self._wait(copier, copier.store(boot_id, np.arange(len(keys)), extents))
        return done.checksums if done.ok.all() else None

    def load(self, boot_id: str, extents: Records) -> Done | None:
        """Load ``extents`` (n,) into the first pages; None while no arena is mapped."""
        self.pages[:] = 0
        copier = self._usable()
        if copier is None:
            return None
        return self._wait(copier, copier.load(boot_id, extents, np.arange(len(extents))))

    def wrong(self, keys: Sequence[bytes], epoch: int) -> Bools:
        """Return which of the first pages differ from those of ``keys``."""
        size = self.pages.shape[1]
        pairs = zip(keys, self.pages, strict=False)
        return np.array(
            [not np.array_equal(page, content(k, self.number, epoch, size)) for k, page in pairs]
        )

    def alive(self) -> bool:
        """Whether the daemon of the last copy is still alive."""
        return self._arena is not None and self._arena.alive()

    def close(self) -> bool:
        """Close the session; False if copies do not drain."""
        closed = self.client.close(CLOSE_S)
        if self._copier is not None:
            self._copier.close()
            # The last arrays of the mapping: dropping them unmaps it, which the daemon notices.
            self._copier = self._arena = None
        return closed

    def _usable(self) -> HostCopier | None:
        arena = self.client.arena
        if arena is not None and arena is not self._arena:
            if self._copier is not None:
                self._copier.close()
            self._copier = self._arena = None
            try:
                self._copier, self._arena = HostCopier(self._kv, arena), arena
            except KVHearthError as error:
                # The daemon has died meanwhile, and the arena was unmapped.
                if error.reason is not Reason.CLOSED:
                    raise
        return self._copier

    def _wait(self, copier: HostCopier, ticket: Ticket | None) -> Done:
        if ticket is None:
            raise hung("the copier's queue is full")
        done = copier.wait(ticket, COPY_S)
        if done is None:
            raise hung("a copy")
        return done

    def _drain(self, deadline_s: float) -> bool:
        return self._copier is None or self._copier.drain(deadline_s)


class Engine:
    """One engine of the contract's world size.

    Args:
        model: name of the model, part of the keys.
        clock: times each call.
    """

    def __init__(
        self, url: str, contract: Contract, engine_id: str, model: str, clock: Clock
    ) -> None:
        self.contract = contract
        self.model = model
        self.clock = clock
        self.ranks = [
            Rank(
                connect(url, contract, engine_id=engine_id, scheduler=not number, rank=number),
                number,
                contract.groups[0].page_bytes,
            )
            for number in range(contract.world_size)
        ]
        self.client = self.ranks[0].client

    @property
    def epoch(self) -> int:
        """Epoch of its weights; -1 while unknown."""
        return self.client.epoch

    @property
    def ready(self) -> bool:
        """Whether all ranks are attached to one boot."""
        boots = {rank.client.boot_id for rank in self.ranks}
        return len(boots) == 1 and "" not in boots and self.client.wait_ready(0)

    def wait_ready(self, timeout_s: float) -> bool:
        """Wait until the engine is ready."""
        end = time.monotonic() + timeout_s
        while not self.ready:
            if time.monotonic() > end:
                return False
            self.client.wait_ready(0.02)
            time.sleep(0.005)
        return True

    def keys(self, numbers: Sequence[int]) -> list[bytes]:
        """Return the keys of blocks."""
        return [key_of(self.model, number) for number in numbers]

    def store(self, numbers: Sequence[int], *, sums: bool, parent: int) -> tuple[list[int], str]:
        """Store at most ``PAGES`` blocks. Returns those that the daemon acknowledged, and why not
        all.

        ``parent``: the number of the block before the first, or -1.
        """
        with self.clock.timed("reserve"):
            taken = self.client.reserve({0: len(numbers)})
        epoch = self.epoch
        extents = taken.groups[0]
        numbers = numbers[: len(extents)]
        if not len(numbers):
            return [], taken.reason or taken.short_reason
        keys = self.keys(numbers)
        checksums = np.zeros((*extents.shape, 16), np.uint8)
        with self.clock.timed("copy"):
            for rank in self.ranks:
                made = rank.store(taken.boot_id, keys, epoch, extents[:, rank.number])
                if made is None:
                    self.client.abort({0: extents}, boot_id=taken.boot_id)
                    return [], "copy"
                checksums[:, rank.number] = made
        before = b"" if parent < 0 else key_of(self.model, parent)
        group = CommitGroup(keys, extents, checksums if sums else None, before)
        with self.clock.timed("commit"):
            result = self.client.commit({0: group}, boot_id=taken.boot_id)
        return ([] if result.reason else list(numbers)), result.reason

    def check(self, numbers: Sequence[int], *, prefetch: bool) -> Seen:
        """Look blocks up and compare every byte that is served; stops at the first failure to
        answer.
        """
        seen = Seen()
        for start in range(0, len(numbers), PAGES):
            portion = list(numbers[start : start + PAGES])
            with self.clock.timed("lookup"):
                found = self.client.lookup({0: self.keys(portion)}, lease=False, prefetch=prefetch)
            if found.reason:
                seen.reason = found.reason
                break
            group = found.groups[0]
            flags = zip(
                portion,
                group.present.tolist(),
                group.ready.tolist(),
                group.tiers.tolist(),
                strict=True,
            )
            ready = []
            for number, present, is_ready, tier in flags:
                if not present:
                    seen.absent.append(number)
                elif is_ready and tier == Tier.DRAM:
                    ready.append(number)
                else:
                    seen.lower_tier.append(number)
            if ready:
                self._load(ready, seen)
        return seen

    def _load(self, numbers: list[int], seen: Seen) -> None:
        with self.clock.timed("lookup"):
            found = self.client.lookup({0: self.keys(numbers)})
        epoch = self.epoch
        if found.reason:
            seen.reason = found.reason
            return
        leased = found.groups[0].leased
        numbers = [n for n, flag in zip(numbers, leased.tolist(), strict=True) if flag]
        if not numbers:
            return
        extents = found.groups[0].extents.reshape(len(numbers), len(self.ranks))
        good = np.ones(len(numbers), np.bool_)
        failed = np.zeros(len(numbers), np.bool_)
        with self.clock.timed("copy"):
            for rank in self.ranks:
                done = rank.load(found.boot_id, extents[:, rank.number])
                if done is None:
                    good[:] = False
                    continue
                good &= self._compare(rank, done, numbers, epoch, seen)
                failed |= ~done.ok
        bad = extents[failed]
        with self.clock.timed("release"):
            self.client.release(found.lease, bad if len(bad) else None)
        seen.right += [n for n, flag in zip(numbers, good.tolist(), strict=True) if flag]

    def _compare(self, rank: Rank, done: Done, numbers: list[int], epoch: int, seen: Seen) -> Bools:
        keys = self.keys(numbers)
        seen.failed.update(done.reasons)
        # The successor of a daemon that died meanwhile may reuse slots: no wrong byte was served.
        if done.reasons.get("checksum_mismatch") and rank.alive():
            seen.caught.append(f"{self.model}: a checksum stopped {done.reasons}")
        wrong = rank.wrong(keys, epoch) & done.ok
        for index in np.flatnonzero(wrong).tolist():
            seen.wrong.append(
                f"{self.model} block {numbers[index]} shard {rank.number} epoch {epoch}: served "
                f"other bytes"
            )
        return np.asarray(done.ok & ~wrong)

    def close(self) -> bool:
        """End all ranks' sessions; False if copies do not drain."""
        closed = [rank.close() for rank in reversed(self.ranks)]
        return all(closed)
