"""The simple API: store and load KV blocks by key, with futures.

``open`` returns a ``Cache`` for one process that both decides and moves bytes. Its threads reserve,
copy, commit, look up and verify; the caller's thread never waits for them. Engines of several ranks
or KV groups use ``kvhearth.connect`` and the parts in ``kvhearth.transfer``.
"""

from __future__ import annotations

import hashlib
import math
import operator
import os
import secrets
import threading
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvhearth.client import KVClient, connect
from kvhearth.codec import LOSSLESS
from kvhearth.contract import DTYPE_BYTES, Contract, GroupKind, GroupSpec
from kvhearth.copiers.base import BlockFailure, Copier, CopyKind, Done
from kvhearth.copiers.host import HostCopier
from kvhearth.errors import ClientReason, KVHearthError, NoReason, Reason
from kvhearth.model import I64, Bools, Records
from kvhearth.results import CommitGroup, LookupResult, PromotionWait, usable_tokens
from kvhearth.transfer.copier_pool import CopierFactory, CopierPool, check_single_rank
from kvhearth.transfer.lanes import Failure, Job, Lane, ResultT, Steps, Transfer
from kvhearth.transfer.memory import Source, dtype_name, source_of
from kvhearth.transfer.slot_pool import RESERVE_BLOCKS_MAX

LOADS_WAITING_MAX = 64
"""Most loads that wait for promotions from SSD: each holds a lease."""

_GROUP = 0
_SLICE_S = 0.1
_CHECKED_US = 2000
"""Estimate for blocks in memory that the daemon checksums before it serves them."""
_PAUSE_S = 0.005
_PAUSE_MAX_S = 0.25
_PARTS = 3
"""A load looks again after a third of the daemon's estimate, and copies what has come."""
_GIVE_UP_S = 1.0

Key = bytes | str | int
"""Bytes of the contract's ``hash_bytes`` are a key as they are; anything else is hashed."""


@dataclass(frozen=True)
class StoreResult:
    """Outcome of a store; its pages are the caller's again.

    Attributes:
        stored: number of blocks that were bound to their keys.
        duplicate: number of blocks whose keys were bound already.
        failed: number of the others.
        reason: why the first of these failed, or empty.
        bytes: bytes at rest of the stored blocks.
        copy_s: seconds that the copies took, checksums included.
    """

    stored: int
    duplicate: int
    failed: int
    reason: Failure = ""
    bytes: int = 0
    copy_s: float = 0.0


@dataclass(frozen=True, eq=False)
class LoadResult:
    """Outcome of a load; its pages are the caller's again.

    Attributes:
        usable_blocks: length of the longest run of blocks from the first one that can be computed
            on: the prefix that needs no prefill.
        hit_blocks: length of the run that the daemon had; more than ``usable_blocks`` only where a
            block failed.
        loaded: (n,): True for the pages that hold their keys' bytes, each verified. The contents of
            the other pages are undefined.
        reason: why the daemon was not asked, or a block failed, or empty. Empty with 0
            blocks is a miss.
        failures: number of blocks whose copies failed, by ``BlockFailure``.
        bytes: bytes copied into pages that hold their keys' bytes.
        copy_s: seconds that the copies took, checksums included.
    """

    usable_blocks: int
    hit_blocks: int
    loaded: Bools
    reason: Failure
    failures: dict[BlockFailure, int]
    bytes: int
    copy_s: float


@dataclass(frozen=True, eq=False)
class Presence:
    """Location of n blocks.

    Attributes:
        hit_blocks: length of the run from the first block that is in memory, ready to be loaded.
        present: (n,): True for the blocks that memory or SSD has.
        ready: (n,): True for those in memory.
        eta_s: seconds until the others could be in memory, if they are loaded or promoted.
        reason: why the daemon did not answer, or empty.
    """

    hit_blocks: int
    present: Bools
    ready: Bools
    eta_s: float = 0.0
    reason: Reason | ClientReason | NoReason = ""


def open(
    url: str, contract: Contract, *, name: str = "", wait_s: float = 2.0, **options: Any
) -> Cache:
    """Return a cache at a daemon; the daemon may be away, and everything is a miss then.

    Args:
        url: ``kvhearth+unix:///run/kvhearth``, or ``kvhearth+unix:`` for this user's daemon, else
            the system's.
        contract: see ``contract_for``; one KV group, one rank.
        name: this process's name in the daemon's log, or empty for a random one.
        wait_s: how long to wait for the daemon.
        options: passed to ``Cache``.

    Raises:
        KVHearthError: ``bad_url``, ``bad_contract`` or ``bad_message`` for arguments that cannot be
            right.
    """
    engine_id = name or f"cache-{os.getpid()}-{secrets.token_hex(4)}"
    cache = Cache(connect(url, contract, engine_id=engine_id), **options)
    cache.client.wait_ready(wait_s)
    return cache


def contract_for(
    pages: Any,
    *,
    model: str,
    revision: str,
    block_tokens: int = 16,
    codec: str = LOSSLESS,
    **fields: Any,
) -> Contract:
    """Return the contract of blocks like ``pages[i]``; each holds ``block_tokens`` tokens.

    The dtype and shape of a block are part of it, so that blocks of other shapes are misses.

    Args:
        pages: an array or tensor of shape (n, ...), or a list of n of shape (...).
        model, revision: identity of the weights.
        block_tokens: tokens in one block.
        codec: how blocks are encoded at rest, ``fp8`` or ``int4``: a loss within the bounds of
            docs/protocol.md for a half or a quarter of the bytes. Lossless by default.
        fields: further fields of ``Contract``.

    Raises:
        ValueError: for a dtype that is none of ``kvhearth.contract.DTYPE_BYTES``.
        KVHearthError: ``bad_contract`` for blocks that the codec cannot encode.
    """
    block = pages[0]
    dtype, shape = dtype_name(block), [int(extent) for extent in block.shape]
    if dtype not in DTYPE_BYTES:
        raise ValueError(f"pages of {dtype}: use one of {', '.join(DTYPE_BYTES)}")
    group = GroupSpec(GroupKind.FULL, block_tokens, math.prod(shape) * DTYPE_BYTES[dtype])
    fields = {"layout": "x".join(map(str, shape)), "model_dtype": dtype, **fields}
    return Contract(model, revision, dtype, (group,), **fields).with_codec(codec)


class Cache:
    """KV blocks by key, in one daemon. Thread-safe; made by ``kvhearth.open``.

    Keys name blocks in the order of their tokens: a load brings the longest run from the first key
    on that the daemon has. ``kvhearth.chain_keys`` makes such keys from tokens. A key is bytes, a
    string or an int.

    Pages are a numpy array or torch tensor of shape (n, ...), on the CPU or a GPU, whose rows are
    blocks of the contract's size; or a list of n such blocks, which costs one more copy on a GPU;
    or ``Pages`` of a paged pool. Neither change nor read pages until the future is done.

    No call waits for the daemon except ``lookup``, which does for its deadline (``lookup_ms`` of
    the URL) at most. Results are values with a ``reason`` where the daemon is away, full or slow;
    only mistakes in arguments raise ``ValueError`` or ``TypeError``. Blocks of weights whose epoch
    was bumped meanwhile are neither kept nor loaded. In a forked child every result is ``closed``.

    Args:
        client: decides and is rank 0, with the arena mapped. The cache closes it.
        queue_blocks_max: most blocks in stores that are not done, and in loads.
        batch_bytes: most bytes that are copied and committed at once.
        store_wait_s: how long a store waits without getting any memory: from its call, or from the
            last memory that any store got. After a daemon has been silent for so long, stores end
            at once.
        copiers: makes copiers; None for the one that fits the pages.

    Attributes:
        client: for pins, epochs and counters.

    Raises:
        KVHearthError: ``bad_contract`` for several ranks or KV groups, ``config_invalid`` for a
            bound below 1.
    """

    def __init__(
        self,
        client: KVClient,
        *,
        queue_blocks_max: int = 65536,
        batch_bytes: int = 64 << 20,
        store_wait_s: float = 2.0,
        copiers: CopierFactory | None = None,
    ) -> None:
        check_single_rank(client)
        if min(queue_blocks_max, batch_bytes) < 1:
            raise KVHearthError(Reason.CONFIG_INVALID, "a cache's bounds must be 1 or more")
        if len(client.contract.groups) != 1:
            raise KVHearthError(Reason.BAD_CONTRACT, "a cache serves contracts of one KV group")
        self.client = client
        self._spec = client.contract.groups[_GROUP]
        batch_blocks = max(batch_bytes // self._spec.engine_bytes, 1)
        self._batch_blocks = min(batch_blocks, RESERVE_BLOCKS_MAX)
        self._patience = _Patience(store_wait_s, client.clock.now())
        self._copiers = copiers
        self._pools: dict[str, CopierPool] = {}
        self._pools_lock = threading.Lock()
        self._stores = Lane("store", client, queue_blocks_max, waiting_max=1)
        self._loads = Lane("load", client, queue_blocks_max, waiting_max=LOADS_WAITING_MAX)

    def store(
        self, keys: Iterable[Key], pages: Any, *, parent: Key | None = None
    ) -> Transfer[StoreResult]:
        """Begin to store ``pages[i]`` under ``keys[i]``; stores end in the order of their calls.

        Args:
            keys: n keys, distinct.
            pages: n blocks.
            parent: the key before the first one, for a chain that continues.

        Raises:
            ValueError: pages that are not n blocks of the contract's dtype and size.
            TypeError: keys or pages of another kind.
        """
        names = self._names(keys)
        if len(set(names)) != len(names):
            raise ValueError(f"{len(names) - len(set(names))} keys appear twice: store each once")
        before = b"" if parent is None else self._name(parent)
        source = source_of(pages, len(names), self.client.contract, written=False)
        return self._submit(_Store(self, names, source, self._stores, before))

    def load(self, keys: Iterable[Key], pages: Any, *, wait_s: float = 2.0) -> Transfer[LoadResult]:
        """Begin to load the blocks of ``keys`` into ``pages``, each verified by its checksum.

        Args:
            keys: n keys in chain order.
            pages: n writable blocks.
            wait_s: how long the load may wait for blocks that are on SSD only, or being checked
                after a restart. Those that are not ready then are not loaded; they are promoted all
                the same.

        Raises:
            ValueError: pages that are not n writable blocks of the contract's dtype and size.
            TypeError: keys or pages of another kind.
        """
        names = self._names(keys)
        source = source_of(pages, len(names), self.client.contract, written=True)
        return self._submit(_Load(self, names, source, self._loads, wait_s))

    def lookup(self, keys: Iterable[Key], *, prefetch: bool = False) -> Presence:
        """Return where blocks are; ``prefetch`` starts to promote those that are on SSD only.

        Raises:
            TypeError: keys of another kind.
        """
        names = {_GROUP: self._names(keys)}
        found = self.client.lookup(names, lease=False, prefetch=prefetch)
        group = found.groups[_GROUP]
        hit_blocks = found.hit_tokens // self._spec.block_tokens
        return Presence(hit_blocks, group.present, group.ready, found.eta_us / 1e6, found.reason)

    def touch(self, keys: Iterable[Key]) -> None:
        """Mark blocks as used, in the background.

        Raises:
            TypeError: keys of another kind.
        """
        self.client.touch({_GROUP: self._names(keys)})

    def close(self, deadline_s: float = 30.0) -> bool:
        """Finish the transfers, then leave the daemon. Idempotent.

        Transfers that have not begun after ``deadline_s`` seconds end with ``closed``; no load
        waits for SSD any more.

        Returns:
            False if copies were still under way then: their pages are in use. Call it again.
        """
        lanes = (self._stores, self._loads)
        if self._stores.foreign:
            return True
        until = self.client.clock.now() + deadline_s
        for lane in lanes:
            lane.close()
        if not all(lane.wait_idle(until) for lane in lanes):
            for lane in lanes:
                lane.close(give_up=True)
            until = self.client.clock.now() + _GIVE_UP_S
            if not all(lane.wait_idle(until) for lane in lanes):
                return False
        until = max(until, self.client.clock.now() + _GIVE_UP_S)
        ended = self._stores.stop(until) & self._loads.stop(until)
        for pool in self._pools.values():
            ended &= pool.close(max(until - self.client.clock.now(), 0.0))
        return self.client.close(max(until - self.client.clock.now(), 0.0)) and ended

    def __enter__(self) -> Cache:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _copy(
        self, job: _Copies[Any], kind: CopyKind, boot_id: str, positions: I64, extents: Records
    ) -> Done | None:
        """Copy blocks of a job and wait until the copies have ended; None if no arena is mapped.

        Called on a lane's thread.
        """
        pool, source = job.pool, job.source
        assert pool is not None, "a job without a pool is refused"
        with pool.order.after(job.mark):
            kv, numbers = source.stage(kind, positions)
        try:
            with pool.order.after(job.mark):
                copier = pool.copier_of(kv, boot_id)
                done = None if copier is None else _run(copier, kind, boot_id, numbers, extents)
            if done is None:
                return None
            if kind is CopyKind.LOAD:
                with pool.order.after(job.mark):
                    source.scatter(positions, done.ok)
            return done
        except KVHearthError:  # closed before it began, with the session
            return None
        finally:
            if not source.kept:
                pool.drop(kv)

    def _names(self, keys: Iterable[Key]) -> tuple[bytes, ...]:
        if isinstance(keys, bytes | str):
            raise TypeError("keys are one key: pass a list of keys")
        return tuple(self._name(key) for key in keys)

    def _name(self, key: Key) -> bytes:
        size = self.client.contract.hash_bytes
        if isinstance(key, bytes):
            if len(key) == size:
                return key
            content = b"b" + key
        elif isinstance(key, str):
            content = b"s" + key.encode()
        else:
            try:
                content = b"i%d" % operator.index(key)
            except TypeError:
                kind = type(key).__name__
                raise TypeError(f"a key is bytes, a string or an int, not {kind}") from None
        return hashlib.shake_256(content).digest(size)

    def _submit(self, job: _Copies[ResultT]) -> Transfer[ResultT]:
        lane = job.lane
        if lane.foreign:
            return job.refuse(Reason.CLOSED)
        if not job.future.blocks_total:
            return job.refuse("")
        try:
            job.pool = self._pool(job.source.device)
            job.mark = job.pool.order.mark()
        except RuntimeError:
            return job.refuse(BlockFailure.COPY_FAILED)
        why = lane.put(job)
        if why:
            counter = "throttled" if why is ClientReason.QUEUE_FULL else "refused"
            self.client.count(f"{lane.kind}_{counter}", job.future.blocks_total)
            return job.refuse(why)
        return job.future

    def _pool(self, device: str) -> CopierPool:
        with self._pools_lock:
            if device not in self._pools:
                self._pools[device] = CopierPool(self.client, {}, self._copiers, device=device)
            return self._pools[device]


def _run(copier: Copier, kind: CopyKind, boot_id: str, pages: I64, extents: Records) -> Done | None:
    """Copy a batch and wait until its copies have ended; None if the copier's queue stayed full."""
    if isinstance(copier, HostCopier):
        # On this thread: handing a block to another and back costs as much as copying it.
        if kind is CopyKind.STORE:
            return copier.store_now(boot_id, pages, extents)
        return copier.load_now(boot_id, extents, pages)
    if kind is CopyKind.STORE:
        ticket = copier.store(boot_id, pages, extents, wait_s=_SLICE_S)
    else:
        ticket = copier.load(boot_id, extents, pages, wait_s=_SLICE_S)
    if ticket is None:
        return None
    # Only its end frees the pages: a deadline here would hand them out too early.
    while (done := copier.wait(ticket, _SLICE_S)) is None:
        pass
    return done


class _Patience:
    """Time that stores wait for memory; used by one thread."""

    def __init__(self, wait_s: float, now: float) -> None:
        self._wait_s = wait_s
        self._granted_at = -math.inf
        self._silent_since: float | None = now

    def granted(self, now: float) -> None:
        """Record that a store got memory."""
        self._silent_since = None
        self._granted_at = now

    def is_over(self, submitted_at: float, now: float, *, answered: bool) -> bool:
        """Return whether a store that was not granted any should give up."""
        if answered:
            self._silent_since = None
        elif self._silent_since is None:
            self._silent_since = now
        since = max(submitted_at, self._granted_at)
        if self._silent_since is not None:
            since = min(since, self._silent_since)
        return now - since >= self._wait_s


class _Copies(Job[ResultT]):
    """The common part of stores and loads."""

    def __init__(self, cache: Cache, keys: tuple[bytes, ...], source: Source, lane: Lane) -> None:
        super().__init__(len(keys), cache.client.clock.now())
        self.cache = cache
        self.client = cache.client
        self.clock = cache.client.clock
        self.keys = keys
        self.source = source
        self.lane = lane
        self.epoch = cache.client.epoch
        self.pool: CopierPool | None = None
        self.mark: object = None
        self.bytes = 0
        self.copy_s = 0.0


class _Store(_Copies[StoreResult]):
    def __init__(
        self, cache: Cache, keys: tuple[bytes, ...], source: Source, lane: Lane, parent: bytes
    ) -> None:
        super().__init__(cache, keys, source, lane)
        self._parent = parent
        self._begun = self._stored = self._duplicate = 0

    def run(self) -> Steps:
        pause_s = _PAUSE_S
        while self._begun < len(self.keys) and not self.future.cancelled():
            if self.lane.given_up:
                self.fail(Reason.CLOSED)
                return
            if self.epoch != self.client.epoch:
                self.fail(Reason.STALE_EPOCH)
                return
            session_id = self.client.session_id
            count = min(self.cache._batch_blocks, len(self.keys) - self._begun)
            room = self.client.reserve({_GROUP: count})
            extents = room.groups[_GROUP]
            if len(extents) and self._store(session_id, room.boot_id, extents):
                self.cache._patience.granted(self.clock.now())
                pause_s = _PAUSE_S
                continue
            why = room.reason or room.short_reason or BlockFailure.COPY_FAILED
            now, answered = self.clock.now(), not room.reason
            over = self.cache._patience.is_over(self.submitted_at, now, answered=answered)
            if over or room.reason is Reason.CLOSED:
                self.fail(why)
                return
            yield now + pause_s
            pause_s = min(2 * pause_s, _PAUSE_MAX_S)

    def _store(self, session_id: str, boot_id: str, extents: Records) -> bool:
        """Copy and commit the next blocks; False if no arena is mapped."""
        held = extents
        try:
            if not self.future.begin():
                return True
            positions = np.arange(self._begun, self._begun + len(extents))
            done = self.cache._copy(self, CopyKind.STORE, boot_id, positions, extents[:, 0])
            if done is None:
                return False
            self._begun += len(extents)
            held = extents[~done.ok]
            self._commit(boot_id, positions, extents, done)
            self.future.blocks_done = self._begun
            return True
        finally:
            # Slots of an ended session are the daemon's to take back.
            if len(held) and session_id == self.client.session_id:
                self.client.abort({_GROUP: held}, boot_id=boot_id)

    def _commit(self, boot_id: str, positions: I64, extents: Records, done: Done) -> None:
        good = np.flatnonzero(done.ok)
        if done.reasons:
            self.fail(next(iter(done.reasons)))
        if not len(good):
            return
        # Where a block is missing in between, its successor follows its predecessor: eviction still
        # takes the chain from its end.
        keys = [self.keys[position] for position in positions[good].tolist()]
        first = int(positions[good[0]])
        parent = self.keys[first - 1] if first else self._parent
        sums = None if done.checksums is None else done.checksums[good][:, None]
        group = CommitGroup(keys, extents[good], sums, parent)
        # The epoch of the call: newer weights did not compute these blocks.
        result = self.client.commit(
            {_GROUP: group},
            boot_id=boot_id,
            epoch=self.epoch,
        )
        if result.reason:
            self.fail(result.reason)
            return
        stored = int(np.count_nonzero(result.stored[_GROUP]))
        self._stored += stored
        self._duplicate += len(good) - stored
        self.bytes += done.bytes
        self.copy_s += done.seconds

    def count_up(self) -> None:
        super().count_up()
        count = self.client.count
        count("store_blocks", self._stored)
        count("store_duplicates", self._duplicate)
        count("store_failed", self._begun - self._stored - self._duplicate)
        count("store_dropped", len(self.keys) - self._begun)
        count("store_bytes", self.bytes)
        count("store_copy_us", round(self.copy_s * 1e6))

    def result(self) -> StoreResult:
        failed = len(self.keys) - self._stored - self._duplicate
        return StoreResult(
            self._stored, self._duplicate, failed, self.reason, self.bytes, self.copy_s
        )


class _Load(_Copies[LoadResult]):
    def __init__(
        self, cache: Cache, keys: tuple[bytes, ...], source: Source, lane: Lane, wait_s: float
    ) -> None:
        super().__init__(cache, keys, source, lane)
        self._wait_s = wait_s
        self._hit_tokens = 0
        self._loaded: Bools = np.zeros(len(keys), np.bool_)
        self._copied: Bools = np.zeros(len(keys), np.bool_)
        self._failures: Counter[BlockFailure] = Counter()
        self._bad: list[Records] = []

    def run(self) -> Steps:
        if self.future.cancelled():
            return
        if self.lane.given_up:
            self.fail(Reason.CLOSED)
            return
        found: LookupResult | None = None
        try:
            wait = PromotionWait(self.clock.now() + self._wait_s)
            found = self._look_up(wait)
            while self._waits(wait, found):
                with self.future.copying() as wanted:
                    if wanted:  # while the others are promoted
                        self._copy_leased(found)
                yield wait.due_at
                if self.future.cancelled():
                    return
                again = self._look_up(wait)
                if again.reason:  # continue with the leased blocks
                    break
                # Given up only now: the promotions must not be without a requester in between.
                self._give_up(found)
                found = again
            if self.future.begin():
                self._load(found)
                found = None
        finally:
            if found is not None:
                self._give_up(found)

    def _give_up(self, found: LookupResult) -> None:
        """Release the lease and cancel the promotions; with bad blocks to report, those go on."""
        bad = self._taken_bad()
        if bad is not None:
            self.client.release(found.lease, bad=bad)
        else:
            self.client.cancel(found)

    def _look_up(self, wait: PromotionWait) -> LookupResult:
        wait_s = max(0.001, wait.until - self.clock.now())
        return self.client.lookup(
            {_GROUP: self.keys},
            prefetch=True,
            wait_s=wait_s,
        )

    def _waits(self, wait: PromotionWait, found: LookupResult) -> bool:
        """Return whether to look up again, at ``wait.due_at``."""
        if found.reason or self.lane.closed or self.epoch != self.client.epoch:
            return False
        group, eta_us = found.groups[_GROUP], found.eta_us
        if not eta_us and bool((group.present & ~group.ready).any()):
            eta_us = _CHECKED_US
        return wait.answered(eta_us // _PARTS, self.clock.now())

    def _load(self, found: LookupResult) -> None:
        """Copy the leased blocks, then release the lease and report the bad ones."""
        self.fail(found.reason)
        if not self._copy_leased(found):
            self.fail(BlockFailure.STALE_BOOT)
        self.fail(next(iter(self._failures), "") or found.lease_short)
        self.client.release(found.lease, bad=self._taken_bad())
        if self.epoch == self.client.epoch:
            self._hit_tokens = found.hit_tokens
        else:
            self._loaded[:] = False
            self.reason = Reason.STALE_EPOCH

    def _copy_leased(self, found: LookupResult) -> bool:
        """Copy the leased blocks that were not copied before; False if the daemon has gone."""
        group = found.groups[_GROUP]
        leased = np.flatnonzero(group.leased)
        rows = np.flatnonzero(~self._copied[leased])
        for start in range(0, len(rows), self.cache._batch_blocks):
            part = rows[start : start + self.cache._batch_blocks]
            places, extents = leased[part], group.extents[part]
            done = self.cache._copy(self, CopyKind.LOAD, found.boot_id, places, extents)
            if done is None:
                return False
            self._copied[places] = True
            self._loaded[places] = done.ok
            self._failures.update(done.reasons)
            self.bytes += done.bytes
            self.copy_s += done.seconds
            self.future.blocks_done += len(extents)
            if done.reasons.get(BlockFailure.CHECKSUM_MISMATCH):
                # The daemon checks the sums itself before it believes a report.
                self._bad.append(extents[~done.ok])
        return True

    def _taken_bad(self) -> dict[int, Records] | None:
        bad, self._bad = self._bad, []
        return {_GROUP: np.concatenate(bad)} if bad else None

    def count_up(self) -> None:
        super().count_up()
        self.client.count("load_blocks", int(self._loaded.sum()))
        self.client.count("load_failed", self._failures.total())
        self.client.count("load_bytes", self.bytes)
        self.client.count("load_copy_us", round(self.copy_s * 1e6))

    def result(self) -> LoadResult:
        spec = self.cache._spec
        usable = usable_tokens([(spec, self._loaded)], self._hit_tokens)
        return LoadResult(
            usable // spec.block_tokens,
            self._hit_tokens // spec.block_tokens,
            self._loaded,
            self.reason,
            dict(self._failures),
            self.bytes,
            self.copy_s,
        )
