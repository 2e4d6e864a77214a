"""An engine that can verify every byte: blocks' contents follow from key, shard and epoch.

All its ranks live in this process. It stores and loads through the public client and copier, and
distinguishes wrong bytes from misses.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from kvhearth import Contract, GroupKind, GroupSpec, connect
from kvhearth.client import KVClient
from kvhearth.copiers.base import Ticket
from kvhearth.copiers.host import HostCopier
from kvhearth.errors import KVHearthError, Reason
from kvhearth.model import U8, Bools, Records
from kvhearth.page_layout import PagedKV
from kvhearth.results import CommitGroup, Pin, Reservation
from kvhearth.session.arena import ArenaMapping

KEY_BYTES = 32
PAGES = 64
"""Most blocks of one store or load."""
COPY_S = 30.0
CLOSE_S = 10.0


def contract_of(page_bytes: int, *, shards: int = 1, model: str = "m") -> Contract:
    """One full-attention group of blocks of ``shards`` x ``page_bytes``."""
    group = GroupSpec(GroupKind.FULL, 16, page_bytes, shards=shards)
    return Contract(model, "r", "uint8", (group,), tensor_parallel=shards)


def content(key: bytes, shard: int, epoch: int, size: int) -> U8:
    """The bytes of one shard of the block ``key``, shape (size,)."""
    seed = int.from_bytes(key[:16], "little") ^ (shard << 96) ^ (epoch << 104)
    return np.frombuffer(np.random.Generator(np.random.SFC64(seed)).bytes(size), np.uint8)


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


@dataclass
class Copied:
    """Result of copying n shards: ``ok`` shards; for a load, the ``wrong`` ones among them; for a
    store, their checksums. ``alive``: the daemon was still alive after the copy.
    """

    ok: Bools
    wrong: Bools
    checksums: U8
    reasons: dict[str, int]
    alive: bool


class Rank:
    """One rank in this process: client, pages, and a copier of the current boot."""

    def __init__(self, client: KVClient, number: int, page_bytes: int) -> None:
        self.client = client
        self.number = number
        self.pages: U8 = np.zeros((PAGES, page_bytes), np.uint8)
        self._kv = PagedKV([self.pages])
        self._arena: ArenaMapping | None = None
        self._copier: HostCopier | None = None
        client.add_quiesce_hook(self._drain)

    @property
    def boot_id(self) -> str:
        """See ``RankLike``."""
        return self.client.boot_id

    def fill(self, keys: Sequence[bytes], epoch: int) -> None:
        """Compute the pages of ``keys``."""
        for page, key in enumerate(keys):
            self.pages[page] = content(key, self.number, epoch, self.pages.shape[1])

    def wrong(self, keys: Sequence[bytes], epoch: int) -> Bools:
        """Return which pages do not have the bytes of ``keys``."""
        size = self.pages.shape[1]
        pairs = zip(keys, self.pages, strict=False)
        return np.array(
            [not np.array_equal(page, content(k, self.number, epoch, size)) for k, page in pairs]
        )

    def store(
        self, boot_id: str, keys: Sequence[bytes], epoch: int, extents: Records
    ) -> Copied | None:
        """See ``RankLike``."""
        self.fill(keys, epoch)
        copier = self.copier()
        if copier is None:
            return None
        return self._wait(copier, copier.store(boot_id, np.arange(len(keys)), extents))

    def load(
        self, boot_id: str, keys: Sequence[bytes], epoch: int, extents: Records
    ) -> Copied | None:
        """See ``RankLike``."""
        self.pages[:] = 0
        copier = self.copier()
        if copier is None:
            return None
        copied = self._wait(copier, copier.load(boot_id, extents, np.arange(len(keys))))
        copied.wrong = self.wrong(keys, epoch) & copied.ok
        return copied

    def close(self) -> None:
        """Release everything; fails if copies do not drain."""
        closed = self.client.close(CLOSE_S)
        if self._copier is not None:
            self._copier.check_books()
            self._copier.close()
            # These are the last references to the mapping: dropping them unmaps it, and the daemon
            # sees that.
            self._copier = self._arena = None
        assert closed, "copies did not drain"

    def copier(self) -> HostCopier | None:
        """Return a copier for the current boot; None while no arena is mapped."""
        arena = self.client.arena
        if arena is not None and arena is not self._arena:
            if self._copier is not None:
                self._copier.close()
            self._copier = self._arena = None
            try:
                self._copier, self._arena = HostCopier(self._kv, arena), arena
            except KVHearthError as error:
                # Its daemon has died meanwhile, and it was unmapped.
                if error.reason is not Reason.CLOSED:
                    raise
        return self._copier

    def _wait(self, copier: HostCopier, ticket: Ticket | None) -> Copied:
        assert ticket is not None, "the copier's queue is full"
        done = copier.wait(ticket, COPY_S)
        assert done is not None, "a copy hangs"
        nothing = np.zeros(len(done.ok), np.bool_)
        sums = np.zeros((len(done.ok), 16), np.uint8)
        return Copied(
            done.ok,
            nothing,
            sums if done.checksums is None else done.checksums,
            done.reasons,
            self._arena is not None and self._arena.alive(),
        )

    def _drain(self, deadline_s: float) -> bool:
        return self._copier is None or self._copier.drain(deadline_s)


@dataclass
class Seen:
    """Results of checking some keys.

    ``bad`` holds a sentence for each thing that must never happen: a byte that is not the key's, or
    one that only a checksum kept from being served.
    """

    right: list[bytes] = field(default_factory=list)
    absent: list[bytes] = field(default_factory=list)
    unready: list[bytes] = field(default_factory=list)
    failed: Counter[str] = field(default_factory=Counter)
    bad: list[str] = field(default_factory=list)
    reason: str = ""


@dataclass
class Stored:
    """Result of a store. ``bound``: keys that the daemon acknowledged, new or not; ``slots``: slots
    that were written.
    """

    bound: list[bytes]
    reason: str = ""
    slots: set[int] = field(default_factory=set)


class Engine:
    """One engine of the contract's world size.

    Args:
        others: ranks 1 and up; by default they are in this process, too.
    """

    def __init__(
        self, url: str, contract: Contract, engine_id: str, others: Sequence[RankLike] | None = None
    ) -> None:
        self.contract = contract
        self.engine_id = engine_id
        self.scheduler = rank_of(url, contract, engine_id, 0)
        self.client = self.scheduler.client
        if others is None:
            numbers = range(1, contract.world_size)
            others = [rank_of(url, contract, engine_id, number) for number in numbers]
        self.ranks: list[RankLike] = [self.scheduler, *others]

    @property
    def ready(self) -> bool:
        """Whether all ranks are attached to the same boot."""
        boots = {rank.boot_id for rank in self.ranks}
        return len(boots) == 1 and "" not in boots and self.client.wait_ready(0)

    def wait_ready(
        self, timeout_s: float = 20.0, give_up: Callable[[], bool] | None = None
    ) -> bool:
        """Wait until it is ready; False if ``give_up()`` returns true. Fails after the timeout."""
        end = time.monotonic() + timeout_s
        while not self.ready:
            if give_up is not None and give_up():
                return False
            assert time.monotonic() < end, (
                f"{self.engine_id} does not attach: {self.client.refusal}, "
                f"{[rank.boot_id for rank in self.ranks]}, {self.client.counters()}"
            )
            self.client.wait_ready(0.02)
            time.sleep(0.005)
        return True

    def reserve(self, count: int) -> Reservation:
        """Reserve slots for ``count`` blocks."""
        return self.client.reserve({0: count})

    def store(self, keys: Sequence[bytes], *, sums: bool = True, parent: bytes = b"") -> Stored:
        """Write and commit at most ``PAGES`` blocks; fewer if fewer slots are granted."""
        taken = self.reserve(len(keys))
        epoch = self.client.epoch
        extents = taken.groups[0]
        keys = keys[: len(extents)]
        if not keys:
            return Stored([], taken.reason or taken.short_reason)
        checksums = np.zeros((*extents.shape, 16), np.uint8)
        for rank in self.ranks:
            done = rank.store(taken.boot_id, keys, epoch, extents[:, rank.number])
            if done is None or not done.ok.all():
                self.client.abort({0: extents}, boot_id=taken.boot_id)
                return Stored([], "copy")
            checksums[:, rank.number] = done.checksums
        group = CommitGroup(keys, extents, checksums if sums else None, parent)
        result = self.client.commit({0: group}, boot_id=taken.boot_id)
        slots = set(extents["slot"].reshape(-1).tolist())
        return Stored([] if result.reason else list(keys), result.reason, slots)

    def check(self, keys: Sequence[bytes], seen: Seen | None = None) -> Seen:
        """Look ``keys`` up and compare every byte that is served, in portions, until one gets no
        answer.
        """
        seen = Seen() if seen is None else seen
        for portion in _portions(keys):
            self._check_portion(portion, seen)
            if seen.reason:
                break
        return seen

    def _check_portion(self, keys: list[bytes], seen: Seen) -> None:
        found = self.client.lookup({0: keys}, lease=False)
        epoch = self.client.epoch
        if found.reason:
            seen.reason = found.reason
            return
        there, ready = found.groups[0].present, found.groups[0].ready
        seen.absent += [key for key, flag in zip(keys, there, strict=True) if not flag]
        seen.unready += [k for k, t, r in zip(keys, there, ready, strict=True) if t and not r]
        wanted = [key for key, flag in zip(keys, ready, strict=True) if flag]
        if wanted:
            self._load(wanted, epoch, seen)

    def _load(self, keys: list[bytes], epoch: int, seen: Seen) -> None:
        found = self.client.lookup({0: keys})
        seen.reason = found.reason
        leased = found.groups[0].leased
        keys = [key for key, flag in zip(keys, leased, strict=True) if flag]
        if not keys:
            return
        extents = found.groups[0].extents.reshape(len(keys), self.contract.groups[0].shards)
        good = np.ones(len(keys), np.bool_)
        failed = np.zeros(len(keys), np.bool_)
        for rank in self.ranks:
            done = rank.load(found.boot_id, keys, epoch, extents[:, rank.number])
            if done is None:
                good[:] = False
                continue
            seen.failed.update(done.reasons)
            # The successor of a daemon that died meanwhile may reuse slots, which is no late write.
            if done.reasons.get("checksum_mismatch") and done.alive:
                seen.bad.append(f"{self.engine_id}: only a checksum saved {done.reasons}")
            for position in np.flatnonzero(done.wrong).tolist():
                seen.bad.append(
                    f"{self.engine_id}: served a wrong byte of {keys[position].hex()[:16]} shard "
                    f"{rank.number} epoch {epoch} boot {found.boot_id} {extents[position]}"
                )
            good &= done.ok & ~done.wrong
            failed |= ~done.ok
        bad = extents[failed]
        self.client.release(found.lease, bad if len(bad) else None)
        seen.right += [key for key, flag in zip(keys, good, strict=True) if flag]

    def pin(self, keys: Sequence[bytes], ttl_s: float) -> Pin:
        """Pin blocks."""
        return self.client.pin({0: list(keys)}, ttl_s)

    def close(self) -> None:
        """End all ranks' sessions."""
        for rank in reversed(self.ranks):
            rank.close()


def rank_of(url: str, contract: Contract, engine_id: str, number: int) -> Rank:
    """A rank in this process; number 0 is the scheduler, too."""
    client = connect(url, contract, engine_id=engine_id, scheduler=number == 0, rank=number)
    return Rank(client, number, contract.groups[0].page_bytes)


def _portions(keys: Sequence[bytes]) -> Iterator[list[bytes]]:
    for start in range(0, len(keys), PAGES):
        yield list(keys[start : start + PAGES])


@contextlib.contextmanager
def engine_of(url: str, contract: Contract, engine_id: str = "e") -> Iterator[Engine]:
    """Yield an attached engine, and close it at the end."""
    engine = Engine(url, contract, engine_id)
    try:
        engine.wait_ready()
        yield engine
    finally:
        engine.close()
