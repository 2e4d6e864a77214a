"""Per-request state of the scheduler: starts a lookup on arrival and answers the engine from its
result.
"""

from __future__ import annotations

from collections.abc import Callable, Container

from kvhearth.connectors.core.engine import BlockTable, Context, Request, Step, Verdict
from kvhearth.connectors.core.load_tracker import Loads, RequestState
from kvhearth.connectors.core.lookup_queue import Lookup, LookupQueue
from kvhearth.connectors.core.store_tracker import Progress
from kvhearth.counters import Warnings
from kvhearth.model import Tier
from kvhearth.results import LookupResult

# An array takes eight times as long to compare with a member of an enumeration.
_DRAM, _REMOTE = int(Tier.DRAM), int(Tier.REMOTE)


class PromotionTracker:
    """Judges each answer once, and learns how long promotions take. Runs on the scheduler's thread.

    Args:
        context: the engine's shared objects.
        lookups: queue that repeats lookups while blocks are promoted.
        dropped_tokens: tokens at the end of a hit that a draft model must recompute, else 0.
    """

    def __init__(self, context: Context, lookups: LookupQueue, dropped_tokens: int) -> None:
        self._clock = context.client.clock
        self._groups = context.groups
        self._policy = context.policy
        self._counters = context.counters
        self._lookups = lookups
        self._dropped_tokens = dropped_tokens

    def waits(
        self, state: RequestState, lookup: Lookup, limit_tokens: int, computed_tokens: int
    ) -> bool:
        """Whether the request waits for a later answer than the present one.

        Args:
            limit_tokens: token count up to which a hit may reach.
            computed_tokens: tokens that the engine has.
        """
        result = lookup.result
        if result is None or not result.eta_us or (lookup.prefetch and not lookup.promotions):
            return False
        if state.judged is not result:
            state.judged = result
            worth = self._worth(result, limit_tokens, computed_tokens)
            state.worth = worth or state.options.prefetch
        if not state.worth or not (lookup.prefetch or self._lookups.promotion(lookup)):
            return False
        if not state.waited:
            state.waited = True
            self._counters.add("climb_waits")
        return True

    def _worth(self, result: LookupResult, limit_tokens: int, computed_tokens: int) -> bool:
        dropped, step = self._dropped_tokens, self._groups.step_tokens
        most = min(self._groups.ceiling(result, limit_tokens + dropped) - dropped, limit_tokens)
        ready = min(result.hit_tokens - dropped, limit_tokens)
        return self._policy.awaits(
            max(ready - ready % step - computed_tokens, 0),
            most - most % step - computed_tokens,
            result.eta_us / 1e6,
        )

    def ended(self, state: RequestState, lookup: Lookup, result: LookupResult) -> None:
        """Learn from the promotions up to an answer that is used as it is."""
        state.judged = None
        if lookup.promotion_at and result.hit_tokens > lookup.first_tokens:
            seconds = lookup.promotion_s or lookup.answered_at - lookup.promotion_at
            self._policy.promotion.observe(result.hit_tokens - lookup.first_tokens, seconds)
        if not state.waited:
            return
        state.waited = False
        seconds = lookup.promotion_s or self._clock.now() - lookup.promotion_at
        self._counters.add("climb_seconds", seconds)
        if result.eta_us:
            self._counters.add("climb_late")
            if result.hit_tokens <= lookup.first_tokens:
                # Nothing was promoted in time, so a promotion takes at least this long.
                self._policy.promotion.observe(self._groups.step_tokens, seconds)


DECODE_RUN_TOKENS = 64
"""Full blocks of generated tokens wait until they have so many tokens, or their request ends: to
examine a request and to follow a chain costs the scheduler as much for one block as for four.
"""
DECODE_STEPS = 8
"""Decode steps that share a store: a store costs the scheduler the same whatever is in it."""


class DueRequests:
    """Finds the requests of a step that may fill a block, without a walk over all that run.

    Nearly all steps compute one token for each of their requests. A request that lacks n tokens is
    then due n steps later at the earliest and waits in the bucket of that step, or of one soon
    after it, so that many share a bucket. Apart from buckets, a step examines the requests of which
    it computes more tokens, and those that were admitted or left out by a step before.

    Args:
        every_steps: distance of the buckets in steps.
    """

    def __init__(self, every_steps: int = DECODE_STEPS) -> None:
        self._every_steps = every_steps
        self._step = 0
        self._buckets: dict[int, list[RequestState]] = {}
        self._awaited: dict[str, RequestState] = {}

    def watch(self, state: RequestState) -> None:
        """Examine a request in the next step that computes tokens of it."""
        state.due_step = 0
        self._awaited[state.request.request_id] = state

    def forget(self, state: RequestState) -> None:
        """Examine a request no more."""
        state.due_step = 0
        self._awaited.pop(state.request.request_id, None)

    def take(
        self,
        step: Step,
        find: Callable[[str], RequestState | None],
        has_room: Callable[[], bool],
    ) -> list[RequestState]:
        """Begin a step, and return the requests to examine; each is examined again in the next one
        unless ``put`` says otherwise. Without room for any block, those in buckets wait.
        """
        self._step += 1
        scheduled = step.scheduled
        found: dict[str, RequestState] = {}
        due = self._buckets.pop(self._step, [])
        bucket = self._buckets.setdefault(self._step + 1, [])
        if due and not has_room():
            bucket += due
            due = []
        for state in due:
            if 0 < state.due_step <= self._step:
                self._sort(state, scheduled, found)
        for state in list(self._awaited.values()):
            self._sort(state, scheduled, found)
        names = [name for name in step.states if name in scheduled]
        if step.tokens != len(scheduled):
            names += [name for name, tokens in scheduled.items() if tokens != 1]
        for name in names:
            if name not in found and (named := find(name)) is not None:
                self._sort(named, scheduled, found)
        for state in found.values():
            state.due_step = self._step + 1
            bucket.append(state)
        return list(found.values())

    def _sort(
        self, state: RequestState, scheduled: Container[str], found: dict[str, RequestState]
    ) -> None:
        name = state.request.request_id
        if name in scheduled and not state.loading:
            self._awaited.pop(name, None)
            found[name] = state
        else:
            self.watch(state)

    def put(self, state: RequestState, lacking_tokens: int | None) -> None:
        """Examine a request when it has as many more tokens; None: when a step computes several at
        once.
        """
        if lacking_tokens is None:
            state.due_step = 0
        elif lacking_tokens > 0:
            due_step = self._step + lacking_tokens
            state.due_step = due_step + -due_step % self._every_steps
            self._buckets.setdefault(state.due_step, []).append(state)


SPIN_S = 0.0002
"""How long a step may wait, in all, for answers that are about to come."""
IDLE_SPIN_S = 0.003
"""The same bound while no request is admitted. A step that schedules nothing takes as long, and
would share the processor with the lookup threads.
"""
EARLY_MAX = 256
"""Upper bound on waiting requests with a lookup: each may hold a lease."""
ASKS_MAX = 8
"""Upper bound on lookups for one admission: sessions that end one after the other must not hold a
request up.
"""
_HANDOVER_PAUSE_S = 0.005
_AGES_S = 1.0
"""Interval at which answers are searched for leases that have grown old."""


class Requests:
    """State of each live request, and the tokens offered for it.

    Args:
        context: the engine's shared objects.
        loads: receives admitted hits. In an engine that does not load, lookups only find blocks
            that need not be stored.
        run_tokens: tokens of generated blocks that wait for each other; 0 examines a request in
            the very step that fills a block.
    """

    def __init__(self, context: Context, loads: Loads, run_tokens: int = DECODE_RUN_TOKENS) -> None:
        self._run_tokens = context.groups.run_tokens(run_tokens) if run_tokens else 0
        self._loads_any = context.facts.loads
        self._options_of = context.facts.options_of
        self._settings = context.settings
        self._client = context.client
        self._clock = context.client.clock
        self._groups = context.groups
        self._policy = context.policy
        self._counters = context.counters
        self._warnings = Warnings()
        self._hash_tokens = context.groups.hash_tokens
        self._loads = loads
        self._steps_back = context.facts.drops_block
        self._dropped_tokens = context.groups.step_tokens if self._steps_back else 0
        promotion_s = context.settings.promotion_wait_ms / 1000
        self._lookups = LookupQueue(context.client, context.groups, promotion_s=promotion_s)
        self._promotions = PromotionTracker(context, self._lookups, self._dropped_tokens)
        self._states: dict[str, RequestState] = {}
        self._due = DueRequests(DECODE_STEPS if run_tokens else 1)
        self._asking: set[str] = set()
        self._aged_at = 0.0
        self._spun_s = 0.0
        self._admitted_count = 0

    def begin_step(self) -> None:
        """Renew the wait budget (``SPIN_S``) and drop aged leases: a scheduling step has ended."""
        self._spun_s = 0.0
        now = self._clock.now()
        if now - self._aged_at >= _AGES_S:
            self._aged_at = now
            self._drop_aged(now)

    def _drop_aged(self, now: float) -> None:
        """Release leases that a long queue has made old; the requests look up again at their
        turn.
        """
        for request_id in list(self._asking):
            state = self._states[request_id]
            lookup = state.lookup
            result = None if lookup is None else lookup.result
            if lookup is None or result is None:
                continue
            if _aged(lookup, now, self._settings.lease_s):
                if not state.seen:
                    self._note(state, lookup, result)
                self._drop(state)
                state.offer = (0, 0)
                state.asked_count = max(state.asked_count - 1, 0)

    def due(self, step: Step, has_room: Callable[[], bool]) -> list[RequestState]:
        """Begin a step, and return its requests that may fill a block, with their answers applied
        to their stores if they have come. ``examined`` must be called for each.

        Args:
            step: the step.
            has_room: tells whether any block can be stored.
        """
        found = self._due.take(step, self._states.get, has_room)
        for state in found:
            state.dispatched = True
            lookup = state.lookup
            result = None if lookup is None or state.seen else lookup.result
            if lookup is not None and result is not None:
                self._note(state, lookup, result)
                if not self._consumes(state):
                    self._drop(state)
        return found

    def examined(self, state: RequestState, tokens: int) -> None:
        """Register that the full blocks among the first ``tokens`` of a request were examined."""
        due_tokens = state.progress.due_tokens
        if due_tokens > state.progress.tokens_max:
            self._due.put(state, None)
            return
        generated = tokens < due_tokens and due_tokens > state.request.num_prompt_tokens
        run_tokens = self._run_tokens if generated else 0
        self._due.put(state, due_tokens + run_tokens - tokens)

    @property
    def count(self) -> int:
        """Number of live requests."""
        return len(self._states)

    def find(self, request_id: str) -> RequestState | None:
        """Return a live request, or None."""
        return self._states.get(request_id)

    def new(self, request: Request) -> None:
        """Start the lookup of a new request at once, so that the answer is there when its turn
        comes.
        """
        state = self._state_of(request)
        if not state.options.skips and len(self._asking) < EARLY_MAX:
            self._ask(state)

    def _state_of(self, request: Request) -> RequestState:
        state = self._states.get(request.request_id)
        if state is not None:
            return state
        options = self._options_of(request)
        self._counters.add("hints_refused", options.bad_hints)
        progress = Progress(request.block_hashes, [0] * self._groups.count)
        if options.find_key_salt is not None:
            progress.key_salt = None
        progress.token_ids = options.token_ids
        progress.tokens_max = options.store_tokens_max
        if self._settings.offload_prompt_only:
            progress.tokens_max = min(progress.tokens_max, request.num_prompt_tokens)
        handover_until = self._clock.now() + self._settings.handover_wait_ms / 1000
        state = RequestState(request, options, progress, handover_until)
        self._states[request.request_id] = state
        return state

    def _ask(self, state: RequestState, tokens_max: int = 0) -> None:
        """Start a lookup for a request, or for its first ``tokens_max`` tokens only."""
        state.seen = state.declined = False
        state.offer = (0, 0)
        tokens = len(state.request.block_hashes) * self._hash_tokens
        end = self._groups.end(int(state.request.num_tokens), step_back=self._steps_back)
        tokens = min(tokens, tokens_max or end)
        tokens -= tokens % self._groups.step_tokens
        state.asked_count += 1
        state.asked_tokens = tokens
        if not tokens or state.asked_count > ASKS_MAX:
            state.declined = True
            return
        hashes = list(state.request.block_hashes[: tokens // self._hash_tokens])
        options = state.options
        wanted = options.prefetch or self._policy.prefetches(tokens)
        prefetch = self._consumes(state) and wanted
        state.lookup = self._lookups.ask(hashes, options.find_key_salt, prefetch=prefetch)
        state.declined = state.lookup is None
        if state.lookup is not None:
            self._asking.add(state.request.request_id)
        self._counters.add("lookups")

    def _drop(self, state: RequestState, *, gone: bool = False) -> None:
        """Cancel the request's lookup or release its lease. With ``gone``, also cancel its
        promotions.
        """
        if state.lookup is not None:
            self._lookups.drop(state.lookup, gone=gone)
            state.lookup = None
        state.waited = False
        self._asking.discard(state.request.request_id)

    def _consumes(self, state: RequestState) -> bool:
        """Whether blocks may be loaded for the request."""
        return self._loads_any and self._policy.most(state.options.load_tokens_max) > 0

    def _limit(self, state: RequestState, computed_tokens: int) -> int:
        """Return the token count up to which a load may reach."""
        limit = self._groups.end(int(state.request.num_tokens), step_back=self._steps_back)
        return min(limit, computed_tokens + self._policy.most(state.options.load_tokens_max))

    def matched(self, request: Request, computed_tokens: int) -> int | None:
        """Return the number of tokens beyond ``computed_tokens`` that can be loaded; None before
        the answer has come. Idempotent, as an engine may ask in each step until it admits the
        request.
        """
        state = self._state_of(request)
        if state.options.skips:
            return 0
        state.computed_tokens = computed_tokens
        if not self._consumes(state):
            return 0
        if state.given_up or state.loading or state.declined:
            return 0
        if state.lookup is None:
            self._ask(state)
        if state.lookup is not None and not self._answered(state, computed_tokens):
            # Without a lookup the request has given up; with one, the answer is worth waiting for.
            return None if state.lookup is not None else 0
        if state.lookup is None:
            return 0
        if not state.offer[1] or state.offer[0] != computed_tokens:
            tokens = self._offered(state, computed_tokens)
            if tokens is None:
                return None
            state.offer = (computed_tokens, tokens)
        return state.offer[1]

    def _answered(self, state: RequestState, computed_tokens: int) -> bool:
        """True once the lookup has a usable answer. If False and no lookup is pending, the request
        proceeds without the cache.
        """
        lookup, now = state.lookup, self._clock.now()
        assert lookup is not None
        result = lookup.result
        spin_s = (SPIN_S if self._admitted_count else IDLE_SPIN_S) - self._spun_s
        if result is None and spin_s > 0:
            result = lookup.wait(spin_s)
            self._spun_s += self._clock.now() - now
        if result is None:
            if now - lookup.asked_at >= self._settings.lookup_wait_ms / 1000:
                self._counters.add("lookup_late")
                self._drop(state)
                state.given_up = True
            return False
        looked_at = state.seen
        if not looked_at:
            self._note(state, lookup, result)
        wanted = min(state.options.handover_tokens, state.asked_tokens)
        wanted -= wanted % self._groups.step_tokens
        if result.hit_tokens < wanted and not result.reason and now < state.handover_until:
            if now - lookup.answered_at > _HANDOVER_PAUSE_S and not lookup.promotions:
                self._drop(state)
                state.asked_count = 0
                self._ask(state)
            return False
        sure = result.lease is None or result.lease.sure or self._client.holds(result)
        void = lookup.session_id != self._client.session_id or not sure
        if void or _aged(lookup, now, self._settings.lease_s):
            self._drop(state)
            # A wait for room does not count as a lookup. An answer that was old when first seen
            # does: with steps longer than a lease the request would wait for ever.
            if looked_at and not void:
                state.asked_count -= 1
            self._ask(state)
            return False
        if not lookup.taken:
            limit = self._limit(state, computed_tokens)
            if self._promotions.waits(state, lookup, limit, computed_tokens):
                return False
            self._promotions.ended(state, lookup, self._lookups.take(lookup) or result)
        return True

    def _note(self, state: RequestState, lookup: Lookup, result: LookupResult) -> None:
        """Apply an answer, once, to the choice of blocks that need not be stored."""
        state.seen = True
        if result.reason:
            self._counters.add("lookup_failed")
        if result.lease_short:
            self._counters.add("lookup_short")
            self._warnings.warn(
                "lookup.short",
                "a hit ends where the daemon leases no more blocks",
                reason=result.lease_short,
                hit_tokens=result.hit_tokens,
                found_tokens=self._groups.ceiling(result, state.asked_tokens),
            )
        state.progress.key_salt = lookup.key_salt
        # Blocks left on SSD count as absent, so that the engine that recomputes them stores them in
        # DRAM for the next request. A remote's do in any case: they may come too late to be loaded.
        state.progress.present = {
            group: found.present & (found.tiers != _REMOTE)
            if lookup.prefetch
            else found.tiers == _DRAM
            for group, found in result.groups.items()
        }

    def _offered(self, state: RequestState, computed_tokens: int) -> int | None:
        """Return the tokens to load; None if the daemon must be asked once more, for fewer."""
        assert state.lookup is not None
        result = state.lookup.result
        assert result is not None
        limit = self._limit(state, computed_tokens)
        if self._dropped_tokens:
            limit = min(limit, result.hit_tokens - self._dropped_tokens)
        limit -= limit % self._groups.step_tokens
        reach = self._groups.reach(result, limit)
        if reach < limit < result.hit_tokens:
            # The lease covers the longest hit: a shorter one needs other windows and states.
            self._drop(state)
            self._ask(state, limit)
            return None
        tokens = reach - computed_tokens
        if tokens <= 0:
            self._decline(state)
            return 0
        if not state.offer[1]:
            self._counters.add("hit_tokens", tokens)
        if self._policy.judge(tokens) is Verdict.LOAD:
            return tokens
        self._counters.add("declined_tokens", tokens)
        self._decline(state)
        return 0

    def _decline(self, state: RequestState) -> None:
        self._drop(state)
        state.declined = True

    def allocated(self, request: Request, table: BlockTable, external_tokens: int) -> None:
        """Handle the engine's admission of the request; ``external_tokens`` are to be loaded.

        Raises:
            ValueError: for tokens that were never offered.
        """
        state = self._states.get(request.request_id)
        if state is None:
            if external_tokens:
                raise ValueError(f"{external_tokens} tokens of a request that was never seen")
            return
        # Another cache's load has written nothing yet, although it may be counted as computed.
        state.dispatched = False
        self._due.watch(state)
        if state.loading:
            return  # a second call, for the blocks after the loaded ones
        if not state.admitted:
            self._counters.add("hit_engine_tokens", state.computed_tokens)
            self._admitted_count += 1
        state.admitted = True
        if external_tokens:
            self._asking.discard(request.request_id)
            self._loads.begin(state, table, external_tokens)
        elif self._consumes(state):
            self._drop(state)
        # Only a preempted request is looked up again, from a clean state.
        state.declined, state.asked_count, state.offer = False, 0, (0, 0)

    def finished(self, request_id: str) -> RequestState | None:
        """Handle the end of a request and return its state."""
        state = self._states.pop(request_id, None)
        if state is not None:
            self._due.forget(state)
            self._drop(state, gone=True)
            self._admitted_count -= state.admitted
        return state

    def forget(self) -> None:
        """Release the leases that no load has taken; waiting requests look up again."""
        for state in self._states.values():
            self._drop(state)
            state.offer = (0, 0)

    def outdate(self) -> None:
        """Stop loads and stores of requests that may hold stale KV: the weights changed or the
        cached blocks were dropped.
        """
        for state in self._states.values():
            state.progress.present = {}
            if state.admitted:
                state.progress.tokens_max = 0
                state.given_up = True

    def close(self, deadline_s: float) -> None:
        """Stop the threads and release the leases."""
        self._lookups.close(deadline_s)
        self.forget()


def _aged(lookup: Lookup, now: float, lease_s: float) -> bool:
    """Whether to release a lease. While blocks are promoted, the repeated lookup replaces the
    lease.
    """
    return now - lookup.answered_at > lease_s and not lookup.promotions
