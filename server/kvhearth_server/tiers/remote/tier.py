"""The remote tier: blocks that all daemons of a fleet share, behind memory and SSD.

It answers lookups from its existence cache, asks the remote in the background about what it does
not know, publishes blocks and loads them, all through a mover. Nothing here waits.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import select
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial

import numpy as np
import numpy.typing as npt

from kvhearth.failpoints import hit
from kvhearth.model import I64, U8, Bools
from kvhearth_server.tiers.base import (
    REMOTE,
    BlockSpec,
    Completion,
    Corrupt,
    Counts,
    Done,
    Evicted,
    Facts,
    Failed,
    Failure,
    Identify,
    Kind,
    Known,
    LoadBatch,
    Missing,
    Outcome,
    Refusal,
    StoreBatch,
    Throttled,
    Tier,
    check_places,
    gather,
)
from kvhearth_server.tiers.figures import RemoteFigures
from kvhearth_server.tiers.remote.existence import (
    NO,
    UNKNOWN,
    YES,
    ExistenceCache,
    Searches,
    failures,
    unknown,
    unknown_of_window,
)
from kvhearth_server.tiers.remote.limits import Bounds, Breaker, Limits
from kvhearth_server.tiers.remote.mover import Answer, Delete, Exists, Get, Put
from kvhearth_server.tiers.remote.names import space_name
from kvhearth_server.tiers.remote.process import Mover
from kvhearth_server.tiers.remote.record import Suspect

READ_S, WRITE_S, EXISTS_S = 2.0, 10.0, 1.0
"""Deadlines of requests to the mover, which ends a helper that misses one. A store has two: it asks
before it sends.
"""
BATCH_BLOCKS_MAX = 512
START_S = 2.0
"""Time that a helper process may take to start before that is a problem."""
SUSPECT_S = 3600.0
"""Time for which records that were not believed are a problem."""
_PAGE_BYTES = 4096
_RTT_S = 0.02
"""Time of a request before the first one was measured."""
_BYTES_PER_S = 100e6
"""Speed of reading before it was measured."""
_WEIGHT = 0.2
_SPACES_MAX = 4096


@dataclass(eq=False)
class _Batch:
    """A batch of the caller's.

    Attributes:
        names: of its blocks in the existence cache.
        rows: those that the mover is asked for.
        outcomes: one for each row of the batch.
        ticket: the mover's, or one of the tier's own if the mover was not asked.
    """

    batch: LoadBatch
    names: list[bytes]
    rows: I64
    outcomes: list[Outcome]
    began: float
    ticket: int = 0

    @property
    def keys(self) -> list[bytes]:
        """Keys of the rows that the mover is asked for."""
        return [self.batch.keys[row] for row in self.rows.tolist()]

    def note(self, outcomes: Sequence[Outcome]) -> None:
        """Take the outcomes of these rows."""
        for row, outcome in zip(self.rows.tolist(), outcomes, strict=True):
            self.outcomes[row] = outcome

    def names_of(self, rows: I64) -> list[bytes]:
        """Return the names of some rows of the batch."""
        return [self.names[row] for row in rows.tolist()]


class RemoteTier(Tier):
    """A remote behind a mover.

    Args:
        mover: moves bytes; the tier closes it.
        regions: the bytes of each arena segment.
        label: the remote's URL without secrets, for people.
        fleet_key: secret that names are made with; the same on all hosts of a fleet.
        limits: bounds of what is published.
        clock: monotonic seconds.

    Attributes:
        life_s, buffer_bytes: see ``Tier``; set by whoever opens it. The buffer is the last region.
    """

    name = "remote"
    shared = True
    life_s = 0.0
    buffer_bytes = 0

    def __init__(
        self,
        mover: Mover,
        regions: Sequence[U8],
        label: str,
        fleet_key: bytes,
        limits: Limits | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.mover, self.label = mover, label
        self.counts = Counts()
        self.breaker = Breaker()
        self._regions, self._clock = list(regions), clock
        self._identify: Identify = lambda family: None
        self._space_name = lru_cache(_SPACES_MAX)(partial(space_name, fleet_key))
        self._cache = ExistenceCache()
        self.use_limits(limits or Limits())
        self._ended: dict[int, tuple[str, float, Callable[[Answer], None]]] = {}
        """Kind, begin and handler of each request to the mover, by its ticket."""
        self._searches = Searches(self._cache, self.counts, self._submit_exists, clock)
        self._completions: list[Completion] = []
        self._own_tickets = itertools.count(-1, -1)
        self._round_trip_s, self._bytes_per_s = _RTT_S, _BYTES_PER_S
        self._seconds: dict[str, float] = {}
        self._trouble, self._good_probes = "", 0
        self._suspected, self._suspected_at = 0, 0.0
        self._up_at = clock()
        """Time at which the mover ran, or should have started."""
        self._draining = self._closed = False
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._events = select.epoll()
        for descriptor in (self._wake, mover.event_fd):
            self._events.register(descriptor, select.EPOLLIN)
        self.event_fd = self._events.fileno()

    @property
    def due_at(self) -> float:
        return self.mover.due_at

    def use_identities(self, identify: Identify) -> None:
        self._identify = identify

    def _space_of(self, family: BlockSpec) -> str:
        """Return the name of a family at the remote; empty if it has none there."""
        identity = self._identify(family)
        return "" if identity is None else self._space_name(*identity, family.group)

    def reopen(self) -> None:
        """Have the remote's secrets read again."""
        self.mover.reopen()

    def use_limits(self, limits: Limits) -> None:
        """Publish within these bounds from now on."""
        self._bounds = Bounds(limits, self._clock())

    @property
    def batch_blocks_max(self) -> int:
        return BATCH_BLOCKS_MAX

    @property
    def serving(self) -> bool:
        """Whether requests are sent to the remote."""
        return self.mover.up and not (self.breaker.is_open or self._draining)

    # -- batches -----------------------------------------------------------------------------------

    def submit_store(self, batch: StoreBatch) -> int | Throttled:
        """Begin to publish a batch; see ``Tier.submit_store``. Blocks that the remote has, as it is
        known or asked first, are ``Done`` without being sent.
        """
        refusal, space = self._check(batch), self._space_of(batch.family)
        if refusal is None and not space:
            refusal = Throttled(Refusal.OPEN, 1.0)
        if refusal is None and not self.mover.takes(batch.family):
            refusal = Throttled(Refusal.TOO_LARGE)
        if refusal is not None:
            return self.counts.refused("stores", refusal, len(batch.keys))
        now, renew = self._clock(), batch.renew and self.life_s > 0
        names = _names(space, batch.family, batch.keys)
        there = (self._cache.look(names, now) == YES) & (not renew)
        rows = np.flatnonzero(~there)
        store = _Batch(batch, names, rows, [Done()] * len(batch.keys), now)
        if not len(rows):
            self.counts.add("stores_present", len(batch.keys))
            return self._finish(store)
        if (held := self._bounds.held_back(now)) is not None:
            return self.counts.refused("stores", held, len(batch.keys))
        if renew:
            ticket = self._put(store, space)
        else:
            ask = Exists(space, batch.family, store.keys)
            ticket = self._submit("ask", ask, WRITE_S, partial(self._asked, store, space))
        if isinstance(ticket, Throttled):
            return self.counts.refused("stores", ticket, len(batch.keys))
        self.counts.add("stores_present", len(batch.keys) - len(rows))
        store.ticket = ticket
        return ticket

    def _asked(self, store: _Batch, space: str, answer: Answer) -> None:
        """Send the blocks of a store that the remote does not have, or with another length."""
        if not answer.final:
            return
        there, failed = _are(answer.outcomes, Done), _are(answer.outcomes, Failed)
        self._cache.note(store.names_of(store.rows[there]), True, self._clock())
        self.counts.add("stores_present", int(there.sum()))
        store.note(answer.outcomes)
        store.rows = store.rows[~(there | failed)]
        if count := len(store.rows):
            sent = self._put(store, space)
            if not isinstance(sent, Throttled):
                return
            store.note([self.counts.refused("stores", sent, count)] * count)
        self._complete(store)

    def _put(self, store: _Batch, space: str) -> int | Throttled:
        """Send the asked rows of a store."""
        batch, rows, family = store.batch, store.rows, store.batch.family
        assert isinstance(batch, StoreBatch)
        parents = batch.parent_keys or [b""] * len(batch.keys)
        put = Put(
            space,
            family,
            store.keys,
            batch.places[rows],
            np.ascontiguousarray(batch.checksums[rows]),
            [parents[row] for row in rows.tolist()],
        )
        ticket = self._submit("put", put, WRITE_S, partial(self._stored, store))
        if not isinstance(ticket, Throttled):
            hit("remote.put_submitted")
            size = family.length * family.shards
            self._bounds.take(size * len(rows), len(rows), self._clock())
        return ticket

    def submit_load(self, batch: LoadBatch) -> int | Throttled:
        """Begin to load a batch, root first; see ``Tier.submit_load``. It ends at its first miss.

        A load that would not end within ``batch.wait_s`` is not begun: ``Failed("timeout")``.
        """
        refusal, space = self._check(batch), self._space_of(batch.family)
        if refusal is not None:
            return self.counts.refused("loads", refusal, len(batch.keys))
        family, count = batch.family, len(batch.keys)
        names, now = _names(space, family, batch.keys), self._clock()
        absent = np.flatnonzero(self._cache.look(names, now) == NO)
        end = 0 if not space else int(absent[0]) if len(absent) else count
        missing: list[Outcome] = [Missing()] * count
        load = _Batch(batch, names, np.arange(end), missing, now)
        if not end:
            return self._finish(load)
        if self.estimate_s([(family, end)]) > batch.wait_s:
            self.counts.add("loads_too_late", end)
            load.outcomes[:end] = [Failed(Failure.TIMEOUT)] * end
            return self._finish(load)
        get = Get(space, family, batch.keys[:end], batch.places[:end])
        ticket = self._submit("get", get, READ_S, partial(self._loaded, load))
        if isinstance(ticket, Throttled):
            return self.counts.refused("loads", ticket, count)
        hit("remote.get_submitted")
        load.ticket = ticket
        return ticket

    def cancel(self, ticket: int) -> None:
        self.mover.cancel(ticket)

    def poll(self) -> list[Completion]:
        if self._closed:
            return []
        if select.select([self._wake], [], [], 0)[0]:
            os.eventfd_read(self._wake)
        for answer in self.mover.poll():
            self._answered(answer)
        self._look_after_breaker()
        completions, self._completions = self._completions, []
        return completions

    def _check(self, batch: LoadBatch) -> Throttled | None:
        """Return why no batch is taken now; None if one is."""
        if len(batch.keys) > BATCH_BLOCKS_MAX:
            raise ValueError(f"{len(batch.keys)} blocks, at most {BATCH_BLOCKS_MAX}")
        check_places(batch.places, batch.family.length, self._regions, _PAGE_BYTES)
        if self._draining:
            return Throttled(Refusal.DRAINING)
        return None if self.serving else Throttled(Refusal.OPEN, 1.0)

    def _finish(self, batch: _Batch) -> int:
        """Complete a batch that needs no request; return its ticket."""
        batch.ticket = next(self._own_tickets)
        self._completions.append(Completion(batch.ticket, gather(batch.outcomes)))
        os.eventfd_write(self._wake, 1)
        return batch.ticket

    # -- requests to the mover ---------------------------------------------------------------------

    def _submit(
        self, kind: str, request: Exists, deadline_s: float, ended: Callable[[Answer], None]
    ) -> int | Throttled:
        ticket = self.mover.submit(request, deadline_s)
        if not isinstance(ticket, Throttled):
            self._ended[ticket] = (kind, self._clock(), ended)
            self.counts.add(f"{kind}_calls")
            self.counts.add(f"{kind}_keys", len(request.keys))
        return ticket

    def _answered(self, answer: Answer) -> None:
        found = self._ended.get(answer.ticket)
        if found is None:
            return
        kind, began, ended = found
        if answer.final:
            del self._ended[answer.ticket]
            seconds = self._clock() - began
            self._seconds[kind] = self._seconds.get(kind, 0.0) + seconds
            if kind == "exists" and not failures(answer):
                self._round_trip_s += _WEIGHT * (seconds - self._round_trip_s)
            if kind != "probe":
                self._judge(answer)
        ended(answer)

    def _judge(self, answer: Answer) -> None:
        """Tell the breaker how a request ended; misses say nothing."""
        found, now = failures(answer), self._clock()
        if found:
            for failure in found:
                self.counts.add(f"failed_{failure}", 1)
            self._trouble = str(found[0])
            self.breaker.failed(now)
        elif any(isinstance(each, Done) for each in answer.outcomes):
            self.breaker.succeeded(now)

    def _look_after_breaker(self) -> None:
        """Close the breaker after a good probe of the helper's; send one when it is due."""
        now, good = self._clock(), self.mover.good_probes
        if good > self._good_probes and self.breaker.is_open:
            self.breaker.probed(good=True, now=now)
        self._good_probes = good
        if not self.breaker.probe_due(now) or self._draining or not self.mover.up:
            return
        key = hashlib.sha256(b"probe").digest()
        request = Exists("0" * 32, BlockSpec(bytes(32), 0, 0, 1), [key])
        ticket = self.mover.submit(request, EXISTS_S)
        if isinstance(ticket, Throttled):
            return
        self.breaker.probe_began()
        self.counts.add("breaker_probes")
        self._ended[ticket] = ("probe", now, self._probed)

    def _probed(self, answer: Answer) -> None:
        if answer.final:
            self.breaker.probed(not failures(answer), self._clock())

    # -- the ends of batches -----------------------------------------------------------------------

    def _stored(self, store: _Batch, answer: Answer) -> None:
        if not self._is_final(store, answer):
            return
        hit("remote.put_done")
        done = _are(answer.outcomes, Done)
        family, now = store.batch.family, self._clock()
        self._cache.note(store.names_of(store.rows[done]), True, now)
        self.counts.add("stored_blocks", int(done.sum()))
        self.counts.add("stored_bytes", int(done.sum()) * family.length * family.shards)
        store.note(answer.outcomes)
        self._complete(store)

    def _loaded(self, load: _Batch, answer: Answer) -> None:
        if not self._is_final(load, answer):
            return
        hit("remote.get_done")
        family, count, now = load.batch.family, len(load.batch.keys), self._clock()
        done = _are(answer.outcomes, Done)
        wrong = _are(answer.outcomes, Corrupt)
        cancelled = Failed(Failure.CANCELLED)
        gone = ~done & [each != cancelled for each in answer.outcomes]
        first = int(gone.argmax()) if gone.any() else len(gone)
        # Rows after the first miss were not asked for: only what failed is certainly away.
        failed = np.flatnonzero(gone[: first + 1])
        self._cache.note(load.names_of(load.rows[failed]), False, now)
        self._cache.note(load.names_of(load.rows[done]), True, now)
        size = int(done.sum()) * family.length * family.shards
        if size:
            speed = size / max(1e-6, now - load.began - self._round_trip_s / 2)
            self._bytes_per_s += _WEIGHT * (speed - self._bytes_per_s)
        self.counts.add("loaded_blocks", int(done.sum()))
        self.counts.add("loaded_bytes", size)
        self._cache.note(load.names_of(load.rows[wrong]), False, now)
        if wrong.any() and (space := self._space_of(family)):
            keys = [load.batch.keys[row] for row in load.rows[wrong].tolist()]
            self._remove(Delete(space, family, keys))
        facts, parents, rows = Facts.none(family, count), [b""] * count, np.flatnonzero(done)
        facts.present[rows] = True
        if answer.checksums is not None:
            facts.checksums[rows] = answer.checksums[rows]
            parents[: len(answer.parents)] = answer.parents
        load.note(answer.outcomes)
        self._complete(load, facts, parents)

    def _is_final(self, batch: _Batch, answer: Answer) -> bool:
        if not answer.final:
            parts = [(outcome, batch.rows[rows]) for outcome, rows in gather(answer.outcomes)]
            self._completions.append(Completion(batch.ticket, parts, final=False))
        return answer.final

    def _complete(
        self, batch: _Batch, facts: Facts | None = None, parents: list[bytes] | None = None
    ) -> None:
        parts = gather(batch.outcomes)
        self._completions.append(
            Completion(batch.ticket, parts, facts=facts, parent_keys=parents or [])
        )

    def _remove(self, wrong: Delete) -> None:
        """Remove blocks with wrong bytes, so that nobody reads them again."""
        self._submit("delete", wrong, WRITE_S, lambda answer: None)

    # -- lookup, removal ---------------------------------------------------------------------------

    def look_up(self, family: BlockSpec, keys: Sequence[bytes]) -> Facts:
        """Return as present what the existence cache does not know to be absent."""
        facts = Facts.none(family, len(keys))
        space = self._space_of(family) if len(keys) and self.serving else ""
        if not space:
            return facts
        states = self._cache.look(_names(space, family, keys), self._clock())
        return replace(facts, present=states != NO)

    def has(self, family: BlockSpec, keys: Sequence[bytes]) -> Bools:
        """Return what the existence cache knows to be present."""
        space = self._space_of(family) if len(keys) else ""
        if not space:
            return np.zeros(len(keys), np.bool_)
        there: Bools = self._cache.look(_names(space, family, keys), self._clock()) == YES
        return there

    def ask(self, family: BlockSpec, keys: Sequence[bytes], window: int = 0) -> Known:
        """Answer a lookup from the existence cache; ask the remote about the first run of unknown
        keys, merged with the lookups that ask already.

        A chain is there up to some key: blocks before a known one count as present, those after
        an absent one as absent. A hole shows when it is read. Of a window the last present block
        counts, whichever before it are absent.
        """
        space = self._space_of(family) if len(keys) and self.serving else ""
        if not space:
            return Known(np.zeros(len(keys), np.bool_), None)
        now = self._clock()
        if not window and self._cache.state(_names(space, family, keys[:1])[0], now) == NO:
            self.counts.add("cache_hits", len(keys))
            return Known(np.zeros(len(keys), np.bool_), None)
        names = _names(space, family, keys)
        states = self._cache.look(names, now)
        low, high = unknown_of_window(states) if window else unknown(states)
        present = states == YES
        if window:
            present[:low] |= states[:low] == UNKNOWN
        else:
            # Also those whose read failed a while ago: nothing else would ask about them again.
            present[:low] = True
        self.counts.add("cache_hits", len(keys) - (high - low))
        if low >= high:
            return Known(present, None)
        self.counts.add("cache_misses", high - low)
        chain = Exists(space, family, list(keys[low:high]))
        if not self._searches.begin(chain, names[low:high], window):
            return Known(present, None)
        asking = np.zeros(len(keys), np.bool_)
        asking[low:high] = True
        return Known(present, asking)

    def _submit_exists(self, request: Exists, ended: Callable[[Answer], None]) -> bool:
        def looked(answer: Answer) -> None:
            pairs = zip(request.keys, answer.outcomes, strict=True)
            if wrong := [key for key, outcome in pairs if isinstance(outcome, Corrupt)]:
                self._remove(Delete(request.space, request.family, wrong))
            ended(answer)

        return not isinstance(self._submit("exists", request, EXISTS_S, looked), Throttled)

    def forget(self, namespace: bytes, group: int, keys: Sequence[bytes]) -> int:
        """Do nothing: other daemons use the blocks, too."""
        return 0

    def forget_namespace(self, namespace: bytes, count: int) -> Evicted | None:
        """Do nothing, as ``forget``."""
        return None

    def take_evicted(self) -> list[Evicted]:
        return []

    # -- status ------------------------------------------------------------------------------------

    @property
    def loads_of_the_dead(self) -> bool:
        return not self.mover.alone

    def estimate_s(self, loads: Sequence[tuple[BlockSpec, int]], waiting: int = 0) -> float:
        size = sum(spec.length * spec.shards * blocks for spec, blocks in loads)
        return self._round_trip_s + size / self._bytes_per_s

    def problems(self) -> Mapping[Kind, str]:
        """Return the remote's problem, one at most."""
        mover = self.mover
        if mover.up:
            self._up_at = self._clock()
        elif self._clock() - self._up_at > START_S:
            reason = mover.problem or "its helper process does not run; see the log"
            return {Kind(self.label, "down", REMOTE): f"remote {self.label}: {reason}"}
        if self.breaker.is_open:
            text = (
                f"remote {self.label}: requests fail ({self._trouble}); it is tried again by itself"
            )
            return {Kind(self.label, "open", REMOTE): text}
        if mover.up and mover.problem:
            text = f"remote {self.label}: {mover.problem}"
            return {Kind(self.label, "misconfigured", REMOTE): text}
        return self._suspects()

    def _suspects(self) -> Mapping[Kind, str]:
        """Return a problem if records were not believed within the last ``SUSPECT_S``."""
        counts = self.mover.counts
        found, now = sum(counts[each] for each in Suspect), self._clock()
        if found > self._suspected:
            self._suspected, self._suspected_at = found, now
        if not found or now - self._suspected_at >= SUSPECT_S:
            return {}
        how = ", ".join(f"{counts[each]} {each}" for each in Suspect if counts[each])
        text = (
            f"remote {self.label}: records are not as this fleet wrote them ({how}); they count as "
            "misses; see who else can write there"
        )
        return {Kind(self.label, "suspect", REMOTE): text}

    def remote_figures(self) -> RemoteFigures:
        mover, kinds = self.mover, [kind for kind, _, _ in self._ended.values()]
        return RemoteFigures(
            name=self.label,
            problem=next(iter(self.problems().values()), ""),
            breaker_open=self.breaker.is_open,
            mover_up=mover.up,
            mover_restarts=mover.restarts,
            staging_bytes=mover.staging.size,
            staging_free_bytes=mover.staging.free_bytes,
            cache_entries=self._cache.entries,
            asking=len(self._searches),
            reading=kinds.count("get"),
            writing=kinds.count("put"),
            counters={
                **self.counts.values,
                "breaker_openings": self.breaker.openings,
                **{f"mover_{name}": count for name, count in mover.counts.values.items()},
            },
            seconds=dict(self._seconds),
        )

    # -- the end -----------------------------------------------------------------------------------

    def drain(self, deadline_s: float) -> bool:
        self._draining = True
        drained = self.mover.drain(deadline_s)
        for answer in self.mover.poll():
            self._answered(answer)
        return drained

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self.mover.close()
            self._events.close()
            os.close(self._wake)


def _names(space: str, family: BlockSpec, keys: Sequence[bytes]) -> list[bytes]:
    """Return the names of blocks in the existence cache."""
    place = f"{space}/{family.length}/{family.shards}".encode()
    prefix = hashlib.sha256(place).digest()[:8]
    return [prefix + key for key in keys]


def _are(outcomes: Sequence[Outcome], kind: type[Outcome]) -> npt.NDArray[np.bool_]:
    return np.array([isinstance(each, kind) for each in outcomes], np.bool_)
