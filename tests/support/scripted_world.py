"""An engine's scheduling with a second cache beside ours, and a record of each page's content.

Requests of a few texts share prefixes. A page holds right KV of a block only if every token before
it was right when it was written. All other pages hold garbage, so that a block that is stored too
early is detected when it is loaded.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kvhearth.connectors.core.engine import Step
from kvhearth.connectors.core.step_metadata import StepMeta, WorkerReport
from kvhearth_lab.harness import HUNG_S
from kvhearth_lab.harness.engine import content
from support.daemon import until
from support.scripted_engine import BLOCK_TOKENS, ScriptedEngine, ScriptedRequest, hashes_of

GARBAGE = 0xEE
GENERATED_MAX = 2 * BLOCK_TOKENS
STOCK_BLOCKS = 64
"""Reserved slots that the engine should hold ready: more than all requests fill in a step."""


@dataclass(eq=False)
class Live:
    """A request that the engine has not ended.

    Attributes:
        status: waiting, sibling (its load is in progress), ours, running or ended (blocks wait for
            a load).
        goal_tokens: number of tokens at which the request ends.
        local_tokens: tokens found in the engine's own prefix cache at the last admission.
        in_flight: steps that were dispatched and not processed.
        stale: steps in flight whose output is dropped.
        placeholders: tokens that steps in flight will have sampled.
    """

    request: ScriptedRequest
    text: str
    goal_tokens: int
    status: str = "waiting"
    local_tokens: int = 0
    in_flight: int = 0
    stale: int = 0
    placeholders: int = 0

    @property
    def table(self) -> list[int]:
        """Its pages, in order."""
        return self.request.tables[0] if self.request.tables else []


@dataclass(eq=False)
class Dispatched:
    """A step that the workers have run and whose output was not processed."""

    tokens: dict[Live, int]
    sampled: dict[Live, int]
    rejected: dict[Live, int]
    report: WorkerReport | None
    loaded: set[str]
    failed: set[str]
    invalid: set[int] = field(default_factory=set)


class World:
    """One engine with our halves and a sibling.

    Args:
        engine: an engine of one rank and one group.
        sibling_first: the sibling is asked before us, as in the order of ``MultiConnector``.
        lag: steps that are dispatched before the output of the one before is processed.

    Attributes:
        text: text of tests that need only one.
        live: requests by name.
        sibling_has: tokens of each text that the sibling can load.
        sibling_stored: blocks that the sibling loaded and we stored.
        poisoned: blocks that were stored with wrong bytes.
    """

    def __init__(self, engine: ScriptedEngine, *, sibling_first: bool, lag: int) -> None:
        self.engine = engine
        self.text = ""
        self.live: dict[str, Live] = {}
        self.sibling_has: dict[str, int] = {}
        self.sibling_stored = 0
        self.poisoned: list[tuple[str, int]] = []
        self._sibling_first = sibling_first
        self._lag = lag
        self._right: dict[int, tuple[str, int, int]] = {}
        self._cached: dict[bytes, int] = {}
        self._by_sibling: set[int] = set()
        self._steps: list[Dispatched] = []
        self._sync: Live | None = None
        self._sync_fails = False
        self._ended: set[str] = set()
        self._arrived: set[str] = set()
        self._lost: set[str] = set()

    # -- requests ----------------------------------------------------------------------------------

    def add(self, name: str, text: str, tokens: int, generated: int) -> None:
        """Add a new request."""
        request = self.engine.add(name, text, tokens)
        self.live[name] = Live(request, text, tokens + generated)
        state = self.engine.half._requests.find(name)
        if state is not None and state.lookup is not None:
            assert state.lookup.wait(HUNG_S) is not None, "no answer"

    def admit(self, name: str, chunk: int, *, fails: bool, sync: bool) -> bool:
        """Admit a waiting request: the engine's own prefix cache first, then the other caches.

        Args:
            chunk: tokens of its first step, if nothing is loaded first.
            fails: the sibling's load in the step itself fails.
            sync: the sibling loads in the step itself.
        """
        one = self.live[name]
        if one.status != "waiting" or one.stale:
            return False
        request, half = one.request, self.engine.half
        hashes = hashes_of(one.text, request.num_tokens)

        def answer() -> tuple[int, int] | None:
            self.step({})
            local = 0
            while (
                local < (request.num_tokens - 1) // BLOCK_TOKENS and hashes[local] in self._cached
            ):
                local += 1
            ours = half.matched(request, local * BLOCK_TOKENS)
            return None if ours is None else (local, ours)

        local, ours = until(answer, "an answer, if only a miss", pause_s=0)
        theirs = min(self.sibling_has.get(one.text, 0), request.num_tokens - 1)
        theirs = max(theirs // BLOCK_TOKENS - local, 0) * BLOCK_TOKENS
        if theirs and (self._sibling_first or not ours):
            ours = 0
        else:
            theirs = 0
        found = [self._cached[each] for each in hashes[:local]]
        table = self._allocate(one, found)
        if table is None:
            return False
        request.tables = (table,)
        one.local_tokens = local * BLOCK_TOKENS
        half.allocated(request, request.tables, ours)
        request.num_computed_tokens = one.local_tokens + ours + theirs
        one.status = "running"
        if ours:
            one.status = "ours"
            self.engine.loading.add(name)
        elif theirs and not sync:
            one.status = "sibling"
        elif theirs:
            self._sync, self._sync_fails = one, fails
        if one.status == "running":
            self.step({name: chunk})
        return True

    def sibling_done(self, name: str, failure: str = "", blocks: int = 0) -> None:
        """End the sibling's load.

        Args:
            failure: empty, ``request`` (all of it is recomputed) or ``blocks`` (it is recomputed
                from the first block that is missing).
            blocks: number of blocks that arrived before it failed.
        """
        one = self.live[name]
        if one.status not in ("sibling", "ended-sibling"):
            return
        first, request = one.local_tokens // BLOCK_TOKENS, one.request
        last = -(-request.num_computed_tokens // BLOCK_TOKENS)
        arrived = min(first + blocks, last) if failure else last
        self._by_sibling.update(one.table[first:arrived])
        self._write(one, first * BLOCK_TOKENS, arrived * BLOCK_TOKENS)
        invalid = set(one.table[arrived:last]) if failure == "blocks" else set()
        failed = {name} if failure == "request" else set()
        if one.status == "ended-sibling":
            self.engine.half.step_done(None, {name}, failed, invalid)
            self._forget(one)
            return
        if failure:
            request.num_computed_tokens = arrived * BLOCK_TOKENS if invalid else 0
        self.engine.half.step_done(None, {name}, failed, invalid)
        self._loaded(one)

    def _loaded(self, one: Live) -> None:
        """End a load; the request's token count tells how much of it arrived."""
        request = one.request
        one.status = "waiting"
        if not request.num_computed_tokens:
            self._free(one)
            return
        self._cache(one, request.num_computed_tokens)
        request.num_computed_tokens = min(request.num_computed_tokens, request.num_tokens - 1)
        one.status = "loaded"

    def resume(self, name: str) -> None:
        """Schedule a request whose load has ended."""
        one = self.live[name]
        if one.status == "loaded":
            one.status = "running"
            self.engine.half.allocated(one.request, one.request.tables, 0)
            self.step({name: one.request.num_tokens})

    def preempt(self, name: str) -> None:
        """Take a running request's blocks away."""
        one = self.live[name]
        if one.status == "running":
            one.status, one.request.num_computed_tokens = "waiting", 0
            one.stale, one.placeholders = one.in_flight, 0
            self._free(one)

    def abort(self, name: str) -> None:
        """End a request in any state."""
        self._end(self.live[name])

    def _end(self, one: Live) -> None:
        self.engine.half.finished(one.request, one.request.tables or ([],))
        if one.status in ("sibling", "ours"):
            one.status = f"ended-{one.status}"
        else:
            self._forget(one)

    def _forget(self, one: Live) -> None:
        self._free(one)
        one.status = "gone"
        del self.live[one.request.request_id], self.engine.requests[one.request.request_id]

    # -- steps -------------------------------------------------------------------------------------

    def step(self, scheduled: dict[str, int], drafts: int = 0, accepted: int = 0) -> None:
        """Plan and run a step; process the output of an earlier one.

        Args:
            scheduled: by request, tokens at most.
            drafts: tokens speculated behind the last known one, where nothing is in flight.
            accepted: number of drafts that are accepted.
        """
        chosen: dict[Live, int] = {}
        right: dict[Live, int] = {}
        sampled: dict[Live, int] = {}
        rejected: dict[Live, int] = {}
        for name, most in scheduled.items():
            one = self.live.get(name)
            if one is None or one.status != "running":
                continue
            begin, known = one.request.num_computed_tokens, one.request.num_tokens
            left = known + one.placeholders - begin
            room = len(one.table) * BLOCK_TOKENS - begin
            tokens = min(most, left, room)
            if tokens <= 0 or known + one.placeholders > one.goal_tokens:
                continue
            extra = min(drafts, room - tokens) if tokens == left and not one.in_flight else 0
            chosen[one] = tokens + extra
            right[one] = tokens + min(accepted, extra)
            rejected[one] = extra - min(accepted, extra)
            sampled[one] = 1 + min(accepted, extra) if tokens == left else 0
        self._dispatch(chosen, right, sampled, rejected)
        while len(self._steps) > self._lag or (self._steps and not chosen):
            self._process(self._steps.pop(0))

    def _dispatch(
        self,
        chosen: dict[Live, int],
        right: dict[Live, int],
        sampled: dict[Live, int],
        rejected: dict[Live, int],
    ) -> None:
        engine = self.engine
        tokens = {one.request.request_id: count for one, count in chosen.items()}
        tables = {one.request.request_id: one.request.tables for one in chosen}
        for one, count in chosen.items():
            end = min(one.request.num_computed_tokens + count, one.request.num_tokens)
            self._cache(one, end)
        slot_pool = engine.half._stores._slot_pool
        until(lambda: slot_pool.held(0) >= STOCK_BLOCKS // 2, "empty slots")
        meta = engine.half.plan_step(Step(sum(tokens.values()), tokens, tables.__getitem__))
        invalid = self._load_now() if self._sync in chosen else set()
        for one, count in chosen.items():
            begin = one.request.num_computed_tokens
            self._write(one, begin, begin + right[one])
            one.request.num_computed_tokens += count
            one.in_flight += 1
            one.placeholders += sampled[one]
        for job in meta.stores:
            self.sibling_stored += len(self._by_sibling.intersection(job.moves[0].pages.tolist()))
        report = self._copy(meta)
        loaded, self._arrived = self._arrived, set()
        failed, self._lost = self._lost & loaded, self._lost - loaded
        self._steps.append(Dispatched(chosen, sampled, rejected, report, loaded, failed, invalid))

    def _copy(self, meta: StepMeta) -> WorkerReport | None:
        """Run the step's copies to their end, so that a run can be repeated. The end of a load is
        reported only when the test says so.
        """
        [worker] = self.engine.workers
        worker.start_loads(meta)
        worker.start_stores(meta)

        def ended() -> bool:
            loaded, failed = worker.results()
            self._ended |= loaded
            self._lost |= failed
            return not worker._loads and not worker._stores

        until(ended, "the end of the copies", pause_s=0)
        return worker.report()

    def ours_done(self, name: str) -> None:
        """Report our load of a request as ended in the next step."""
        if name in self._ended:
            self._ended.remove(name)
            self._arrived.add(name)
            self.step({})

    def _load_now(self) -> set[int]:
        """Run the sibling's load within the step. Return the pages that it did not write."""
        one, self._sync = self._sync, None
        assert one is not None
        blocks = range(
            one.local_tokens // BLOCK_TOKENS, one.request.num_computed_tokens // BLOCK_TOKENS
        )
        if not self._sync_fails:
            self._by_sibling.update(one.table[blocks.start : blocks.stop])
            self._write(one, blocks.start * BLOCK_TOKENS, blocks.stop * BLOCK_TOKENS)
            return set()
        return set(one.table[blocks.start : blocks.stop])

    def _process(self, step: Dispatched) -> None:
        if step.invalid:
            self._cut(step.invalid)
        for one in step.tokens:
            one.in_flight -= 1
            if one.stale:
                one.stale -= 1
                continue
            if one.status != "running":
                continue
            request = one.request
            one.placeholders -= step.sampled[one]
            request.num_computed_tokens -= step.rejected[one]
            count = min(step.sampled[one], one.goal_tokens - request.num_tokens)
            if step.sampled[one]:
                self._grow(one, count)
            if step.sampled[one] and request.num_tokens >= one.goal_tokens:
                self._end(one)
        for name in step.loaded:
            one = self.live[name]
            self.engine.loading.discard(name)
            if name in step.failed:
                one.request.num_computed_tokens = 0
        self.engine.half.step_done(step.report, step.loaded, step.failed, step.invalid)
        for name in step.loaded:
            one = self.live[name]
            if one.status == "ended-ours":
                self._forget(one)
            else:
                first = one.local_tokens // BLOCK_TOKENS
                for block in range(first, one.request.num_computed_tokens // BLOCK_TOKENS):
                    self._note_loaded(one, block)
                self._loaded(one)
        assert self.engine.half._stores.drain(HUNG_S)
        self._count()

    def _cut(self, invalid: set[int]) -> None:
        """Set requests back to the first page that was not loaded, and share no page that was
        computed on it: not that of a request either that was preempted or ended meanwhile.
        """
        for one in list(self.live.values()):
            at = next((n for n, page in enumerate(one.table) if page in invalid), None)
            if one.status == "running" and at is not None:
                one.request.num_computed_tokens = at * BLOCK_TOKENS
                one.stale, one.placeholders = one.in_flight, 0
                gone = set(one.table[at:])
                self._cached = {key: p for key, p in self._cached.items() if p not in gone}
        right = {page for page, (_, _, upto) in self._right.items() if upto == BLOCK_TOKENS}
        self._cached = {key: page for key, page in self._cached.items() if page in right}

    def _grow(self, one: Live, count: int) -> None:
        request = one.request
        request.num_tokens += count
        request.block_hashes[:] = hashes_of(one.text, request.num_tokens)

    def _count(self) -> None:
        for name, value in self.engine.half.take_counts().items():
            self.engine.counts[name] = self.engine.counts.get(name, 0) + value

    def reset(self) -> None:
        """Empty the engine's own prefix cache."""
        self._cached = {}

    # -- pages -------------------------------------------------------------------------------------

    def _allocate(self, one: Live, found: list[int]) -> list[int] | None:
        """Allocate pages for the largest size of the request; None if they are not free."""
        pool = self.engine.pool
        wanted = -(-(one.goal_tokens + GENERATED_MAX) // BLOCK_TOKENS) - len(found)
        pool.hold(found)
        if len(pool.free) < wanted:
            pool.release(found)
            return None
        fresh = pool.take(wanted)
        taken = set(fresh)
        self._cached = {key: page for key, page in self._cached.items() if page not in taken}
        self._by_sibling -= taken
        for page in fresh:
            self._spoil(page)
        return found + fresh

    def _free(self, one: Live) -> None:
        self.engine.pool.release(one.table[::-1])
        one.request.tables = ()

    def _cache(self, one: Live, tokens: int) -> None:
        """Publish full blocks in the engine's own prefix cache, when it is scheduled."""
        hashes = hashes_of(one.text, tokens)
        for block, key in enumerate(hashes):
            self._cached.setdefault(key, one.table[block])

    def _write(self, one: Live, begin: int, end: int) -> None:
        """Write the KV of tokens [begin, end): right if everything before it is."""
        for block in range(begin // BLOCK_TOKENS, -(-end // BLOCK_TOKENS)):
            page, start = one.table[block], block * BLOCK_TOKENS
            upto = min(end, start + BLOCK_TOKENS) - start
            since = max(begin - start, 0)
            before = all(
                self._right.get(one.table[at]) == (one.text, at, BLOCK_TOKENS)
                for at in range(block)
            )
            held = self._right.get(page)
            kept = held[2] if held is not None and held[:2] == (one.text, block) else 0
            if before and kept >= since:
                self._right[page] = (one.text, block, upto)
            else:
                self._spoil(page)
            if self._right.get(page) == (one.text, block, BLOCK_TOKENS):
                self._fill(one.text, block, page)

    def _note_loaded(self, one: Live, block: int) -> None:
        """Check that a block that our load brought is right."""
        if not self.engine.holds(one.request, 0, block):
            self.poisoned.append((one.text, block))
        self._right[one.table[block]] = (one.text, block, BLOCK_TOKENS)

    def _fill(self, text: str, block: int, page: int) -> None:
        key = hashes_of(text, (block + 1) * BLOCK_TOKENS)[block]
        own: Any = self.engine.pages[0][0]
        own[page] = content(key, 0, 0, self.engine.contract.groups[0].page_bytes)

    def _spoil(self, page: int) -> None:
        self._right.pop(page, None)
        self.engine.pages[0][0][page] = GARBAGE

    # -- the end -----------------------------------------------------------------------------------

    def close(self, texts: list[str], tokens: int) -> int:
        """End all requests, then load all stored blocks of each text. Return the number of loaded
        blocks.
        """
        for name in list(self.live):
            if not self.live[name].status.startswith("ended"):
                self.abort(name)
        for name in list(self.live):
            self.sibling_done(name, "request")

        def ended() -> bool:
            self.step({})
            for name in list(self._ended):
                self.ours_done(name)
            return not self.live and not self._steps

        until(ended, "the end of all requests", pause_s=0)
        self.engine.settle()
        assert self.engine.pool.held == 0, f"{self.engine.pool.held} references are left"
        loaded = sum(self._read(text, tokens) for text in texts)
        assert not self.poisoned, f"stored before they were written: {self.poisoned}"
        return loaded

    def _read(self, text: str, tokens: int) -> int:
        """Load all stored blocks of a text. Return the number of loaded blocks."""
        engine = self.engine
        request = engine.add(f"reader of {text}", text, tokens)
        blocks = engine.admit(request) // BLOCK_TOKENS
        if engine.wait_loaded(request) or not blocks:
            wrong = [block for block in range(blocks) if not engine.holds(request, 0, block)]
            self.poisoned += [(text, block) for block in wrong]
        engine.finish(request)
        return blocks
