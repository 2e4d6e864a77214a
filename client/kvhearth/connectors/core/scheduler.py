"""The scheduler's half: decides about lookups, loads and stores, on one thread of the engine.

None of its exceptions reaches the engine's loop (``guarded``).
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Collection, Sequence
from functools import partial
from logging import DEBUG, ERROR, WARNING
from typing import Any, TypeVar, cast

from kvhearth.client import connect
from kvhearth.clock import REAL_TIME, Clock
from kvhearth.connectors.core.block_feed import BlockFeed
from kvhearth.connectors.core.engine import (
    BlockTable,
    Bounds,
    Context,
    Counters,
    EngineFacts,
    EngineGroups,
    LoadPolicy,
    PagePool,
    Request,
    Step,
)
from kvhearth.connectors.core.load_tracker import Loads, RequestState
from kvhearth.connectors.core.requests import DECODE_RUN_TOKENS, Requests
from kvhearth.connectors.core.retainer import Keys, Retainer
from kvhearth.connectors.core.settings import Settings
from kvhearth.connectors.core.step_metadata import (
    STEP_TOKENS_MIN,
    Geometry,
    Handshake,
    StepMeta,
    WorkerReport,
)
from kvhearth.connectors.core.store_tracker import BlockRefs, Stores
from kvhearth.connectors.core.worker import WorkerConnector
from kvhearth.contract import Contract
from kvhearth.counters import Warnings, log_event

MethodT = TypeVar("MethodT", bound=Callable[..., Any])

_warnings = Warnings()


def guarded(otherwise: Callable[[], Any]) -> Callable[[MethodT], MethodT]:
    """Make a method return ``otherwise()`` where it would raise.

    The method's object must have a method ``record_failure(name)``, which counts it and raises
    nothing.
    """

    def wrap(method: MethodT) -> MethodT:
        name = method.__name__

        @functools.wraps(method)
        def call(self: Any, /, *args: Any, **kwargs: Any) -> Any:
            try:
                return method(self, *args, **kwargs)
            except Exception as error:  # noqa: BLE001 - fail-open boundary: the engine's own loop
                _warnings.warn(
                    "connector.call_failed",
                    "the engine goes on without the cache",
                    kind=name,
                    call=name,
                    error=repr(error),
                )
                log_event(DEBUG, "connector.call_failed", "in full", trace=True, call=name)
                self.record_failure(name)
                return otherwise()

        return cast(MethodT, call)

    return wrap


def nothing() -> None:
    """Fallback of methods that return nothing."""


STEPS_MAX = 64
BLOCK_FREES_S = 1.0
"""Age of a store, in seconds, beyond which the scheduler preempts instead of waiting for it."""
STORE_S = 60.0
"""Age of a store, in seconds, beyond which it does not keep an idle engine stepping: its copies
hang.
"""
CLOSE_S = 5.0


def agreed(handshakes: Sequence[Handshake], problem: str = "") -> Handshake | None:
    """Return the handshake on which all ranks agree; None, with an error in the log, if this engine
    cannot be served.

    Args:
        handshakes: handshakes of all ranks.
        problem: the adapter's own reason not to serve the engine, or empty.
    """
    problem = next((one.problem for one in handshakes if one.problem), problem)
    if not problem and len({one.contract for one in handshakes}) > 1:
        problem = "the ranks' pages differ, such as pipeline stages of unequal layers"
    if problem or not handshakes:
        log_event(
            ERROR,
            "connector.off",
            "this engine runs without KVHearth",
            error=problem or "no worker answered",
        )
        return None
    if Contract.from_json(handshakes[0].contract).private:
        log_event(
            WARNING,
            "connector.private",
            "KVHearth keeps this engine's blocks for this engine alone: its weights or its block "
            "hashes have no identity that another one could have (docs/engines.md)",
        )
    return handshakes[0]


class SchedulerConnector:
    """Cache decisions of one engine.

    Args:
        settings: the user's options.
        facts: facts about the engine.
        offer: the handshake on which the ranks agree.
        pool: the engine's pages.
        worker: the only rank of an engine that is not stepped while idle, if it is in this process:
            through it stores end when the last request does. Ranks in other processes end them
            within each step.
        clock: times all waits but those for sockets and copies.
    """

    def __init__(
        self,
        settings: Settings,
        facts: EngineFacts,
        offer: Handshake,
        pool: PagePool,
        worker: WorkerConnector | None = None,
        *,
        clock: Clock = REAL_TIME,
    ) -> None:
        self._clock = clock
        contract = Contract.from_json(offer.contract)
        self.counters = Counters()
        self._settings = settings
        self._facts = facts
        self._step = 0
        self._steps: deque[tuple[int, int, float]] = deque(maxlen=STEPS_MAX)
        self._stepped_at = 0.0
        self._closed = False
        self._block_refs = BlockRefs(pool, settings.held_percent)
        self._policy = LoadPolicy(
            Bounds(
                settings.min_load_tokens,
                settings.max_load_tokens,
                # An engine that stores nothing is configured to leave prefills to others.
                always=settings.policy == "always" or not facts.stores,
            )
        )
        self.groups = EngineGroups(contract, offer.kv_groups, facts.hash_tokens)
        self._client = connect(
            settings.url,
            contract,
            engine_id=facts.engine_id,
            scheduler=True,
            rank=-1,
            map_arena=False,
            run=facts.run,
            clock=clock,
        )
        geometry = Geometry.of(contract, offer.replicas)
        context = Context(
            settings, facts, self._client, self.groups, geometry, self._policy, self.counters
        )
        self._loads = Loads(context)
        self._worker = None if facts.stepped else worker
        self._steps_finish = not facts.stepped and worker is None
        # A step that may be the last one stores what it fills: no step may follow a request's end.
        run_tokens = 0 if self._steps_finish else DECODE_RUN_TOKENS
        self._requests = Requests(context, self._loads, run_tokens)
        self.feed = BlockFeed(self._client, tokens=True) if facts.publishes else None
        """Where the daemon has blocks, to be published; None if nobody asks."""
        self._stores = Stores(context, self._block_refs)
        self._retainer: Retainer | None = None

    # -- requests ----------------------------------------------------------------------------------

    def new_request(self, request: Request) -> None:
        """Handle the arrival of a request."""
        self._requests.new(request)
        state = self._requests.find(request.request_id)
        if self._retainer is not None and state is not None and state.options.session_id:
            self._retainer.resume(state.options.session_id, partial(self._keys_of, state))

    def matched(self, request: Request, computed_tokens: int) -> int | None:
        return self._requests.matched(request, computed_tokens)

    def allocated(self, request: Request, table: BlockTable, external_tokens: int) -> None:
        self._requests.allocated(request, table, external_tokens)

    def sources(self, request_id: str, tokens: int) -> tuple[int, int]:
        """Split the ``tokens`` of a request's last load into (from DRAM, from SSD)."""
        state = self._requests.find(request_id)
        ssd = 0 if state is None else min(state.sources[1], tokens)
        return tokens - ssd, ssd

    def lose(self, request_id: str) -> None:
        """Report as failed a promised load that cannot begin."""
        state = self._requests.find(request_id)
        if state is not None:
            state.loading = True
        self._loads.lose(request_id)

    def finished(self, request: Request, table: BlockTable) -> int | None:
        """Handle the end of a request whose pages are about to be freed: stores hold those that
        they copy. Returns the number of tokens that another engine will find; None if it has
        stored nothing.
        """
        tokens = self._finished(request, table)
        if self._worker is not None and not self._requests.count:
            self._finish_stores(self._worker)
        return tokens

    def _finish_stores(self, worker: WorkerConnector) -> None:
        """End all stores: the engine may need all of its pages before its next step."""
        meta = StepMeta(self._step, stores=self._stores.take_due())
        ended, report = worker.finish_stores(meta)
        self.step_done(report, set(), set())
        if ended:
            # The copies of stores that are still open have ended, too; a step's output that was
            # not processed yet reports them.
            self._block_refs.release_all()
        else:
            log_event(
                WARNING,
                "stores.unfinished",
                "stores did not end in time: some of the engine's blocks stay held",
            )

    def _finished(self, request: Request, table: BlockTable) -> int | None:
        state = self._requests.finished(request.request_id)
        if state is None or state.loading or not self._facts.stores:
            return None
        tokens = min(int(request.num_computed_tokens), int(request.num_tokens))
        tokens = tokens if state.dispatched else 0
        state.progress.hashes = request.block_hashes
        if not self._steps_finish or self._requests.count:
            self._stores.begin()
            try:
                self._stores.plan(state.progress, lambda: table, tokens)
            finally:
                self._stores.hold_chosen()
        if skipped := self._stores.left_blocks(state.progress, tokens):
            self.counters.add("store_skipped", skipped)
            _warnings.warn(
                "store.skipped",
                "blocks of a request are not stored: no slots for them, or too many pages held",
                tokens=tokens,
                blocks=skipped,
                held_pages=self._block_refs.held_count,
                held_percent=self._settings.held_percent,
                slots=self._stores.short_reasons,
            )
        if state.options.retain_s:
            self._retain(state, tokens)
        return min(tokens, state.progress.tokens_max)

    def _retain(self, state: RequestState, tokens: int) -> None:
        """Keep the blocks of a request that has ended, as it asked."""
        if self._retainer is None:
            self._retainer = Retainer(self._client, self.counters, self._stores.storing)
        options, hashes, full = state.options, state.progress.hashes, self.groups.full_blocks
        keys, prompt = self._keys_of(state), state.request.num_prompt_tokens
        if keys:
            kept = {group: named[: full(group, hashes, tokens)] for group, named in keys.items()}
            asked = {group: full(group, hashes, prompt) for group in keys}
            name = options.session_id or state.request.request_id
            self._retainer.retain(name, kept, options.retain_s, asked)

    def _keys_of(self, state: RequestState) -> Keys:
        """The keys of a request's blocks by KV group; none if nobody may find them."""
        progress = state.progress
        if progress.key_salt is None:
            return {}
        return self.groups.keys(progress.hashes, progress.key_salt)

    # -- steps -------------------------------------------------------------------------------------

    def plan_step(self, step: Step) -> StepMeta:
        """Return the workers' jobs of this step."""
        self._step += 1
        meta = StepMeta(self._step, step.tokens)
        self._requests.begin_step()
        # First, and apart from the stores: the engine waits for promised loads.
        meta.loads, meta.lost = self._loads.take_due()
        if self._facts.stores:
            self._plan_stores(step)
        meta.stores, meta.finish = self._stores.take_due(), self._steps_finish
        if meta.tokens >= STEP_TOKENS_MIN:
            self._steps.append((self._step, meta.tokens, self._clock.now()))
        return meta

    @guarded(nothing)
    def _plan_stores(self, step: Step) -> None:
        begun = False
        for state in self._requests.due(step, self._stores.begin):
            request, progress = state.request, state.progress
            name = request.request_id
            tokens = min(request.num_computed_tokens + step.scheduled[name], request.num_tokens)
            offered = step.states.get(name, ())
            if min(tokens, progress.tokens_max) >= progress.due_tokens or offered:
                if not begun:
                    self._stores.begin()
                    begun = True
                progress.hashes = request.block_hashes
                self._stores.plan(progress, partial(step.find_table, name), tokens, offered)
            self._requests.examined(state, tokens)

    def step_done(
        self,
        report: WorkerReport | None,
        loaded: set[str],
        failed: set[str],
        invalid: Collection[int] = (),
    ) -> None:
        """Process the workers' results.

        Args:
            report: results of our copies.
            loaded, failed: requests whose loads ended, and those of them that failed, ours and
                those of other caches.
            invalid: pages that another cache failed to load.
        """
        if invalid:
            self._stores.void()
        if report is not None:
            for request_id, outcomes in report.loads.items():
                self._loads.reported(request_id, outcomes)
        for request_id in loaded:
            self._loads.finish(request_id, failed=request_id in failed)
            state = self._requests.find(request_id)
            if state is not None and state.loading:
                state.loading = False
                state.given_up |= request_id in failed
        if report is not None:
            self._stores.reported(report)
            self._time_steps(report.steps)

    def _time_steps(self, numbers: list[int]) -> None:
        """Learn from steps that had one prefill or more. Steps may overlap: each is timed from the
        end of the one before.
        """
        now = self._clock.now()
        while self._steps and numbers and self._steps[0][0] <= numbers[-1]:
            number, tokens, begun_at = self._steps.popleft()
            if number in numbers:
                self._policy.prefill.observe(tokens, now - max(begun_at, self._stepped_at))
                self._stepped_at = now

    def record_failure(self, name: str) -> None:
        """Count a call that proceeded without the cache; see ``guarded``."""
        self.counters.add("troubles")

    # -- the rest ----------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether steps are needed although no request runs: stores report through steps."""
        return self._stores.open_count > 0 and self._stores.oldest_s < STORE_S

    @property
    def frees_soon(self) -> bool:
        """Whether waiting for stores frees blocks without a preemption."""
        if not self._stores.open_count:
            return False
        return self._stores.oldest_s < BLOCK_FREES_S and self._block_refs.would_free

    def take_counts(self) -> dict[str, float]:
        """Return counters since the last call and gauges, empty if nothing happened."""
        counts = self.counters.take()
        if counts:
            for name, value in counts.items():
                self._client.count(name, int(value))
            counts["held_blocks"] = self._block_refs.held_count
            counts["attached"] = float(bool(self._client.session_id))
        return counts

    def reset(self) -> bool:
        """Drop the namespace's blocks if it is this engine's alone, or if the settings demand it.

        False if blocks that should have been dropped were not: loads are under way, or the daemon
        does not answer.
        """
        if self._settings.on_reset != "keep" and self._loads.count:
            log_event(WARNING, "reset.refused", "loads are under way", loads=self._loads.count)
            return False
        self._requests.forget()
        on_reset = self._settings.on_reset
        if on_reset == "drop" or (on_reset == "auto" and self._facts.live_weights):
            if self._client.bump_epoch() < 0:
                return False
            self._requests.outdate()
            return True
        if on_reset == "auto" and self._client.drop_if_alone():
            self._requests.outdate()
            return True
        log_event(
            WARNING,
            "reset.kept_blocks",
            "blocks in the KVHearth daemon are kept, since other engines share them or it was told "
            "so; set on_reset=drop if new weights were loaded",
            set_in=self._settings.PLACE,
        )
        return True

    def shutdown(self) -> None:
        """Commit finished stores and release all resources."""
        if self._closed:
            return
        self._closed = True
        for thread in (self.feed, self._retainer):
            if thread is not None:
                thread.close(CLOSE_S)
        self._stores.close(CLOSE_S)
        self._requests.close(CLOSE_S)
        self._loads.close()
        self._client.close(CLOSE_S)
