"""Which requests wait for blocks that climb from SSD."""

from __future__ import annotations

import time

from kvhearth.connectors.vllm.context import Context
from kvhearth.connectors.vllm.loads import RequestState
from kvhearth.connectors.vllm.lookups import Lookup, LookupDesk
from kvhearth.results import LookupResult


class Climbs:
    """Judges each answer once, and learns how long climbs take. On the scheduler's thread.

    Args:
        context: of the engine.
        desk: asks again while blocks climb.
        eagle_tokens: at the end of a hit that a draft model must see anew, else 0.
    """

    def __init__(self, context: Context, desk: LookupDesk, eagle_tokens: int) -> None:
        self._groups = context.groups
        self._policy = context.policy
        self._tally = context.tally
        self._desk = desk
        self._eagle_tokens = eagle_tokens

    def waits(
        self, state: RequestState, lookup: Lookup, limit_tokens: int, computed_tokens: int
    ) -> bool:
        """Whether the request waits for a later answer than the one that is there.

        Args:
            limit_tokens: up to which a hit may reach.
            computed_tokens: that the engine has.
        """
        result = lookup.result
        if result is None or not result.eta_us or (lookup.prefetch and not lookup.climbing):
            return False
        if state.judged is not result:
            state.judged = result
            state.worth = self._worth(result, limit_tokens, computed_tokens)
        if not state.worth or not (lookup.prefetch or self._desk.climb(lookup)):
            return False
        if not state.waited:
            state.waited = True
            self._tally.add("climb_waits")
        return True

    def _worth(self, result: LookupResult, limit_tokens: int, computed_tokens: int) -> bool:
        eagle, step = self._eagle_tokens, self._groups.step_tokens
        most = min(self._groups.ceiling(result, limit_tokens + eagle) - eagle, limit_tokens)
        ready = min(result.hit_tokens - eagle, limit_tokens)
        return self._policy.awaits(
            max(ready - ready % step - computed_tokens, 0),
            most - most % step - computed_tokens,
            result.eta_us / 1e6,
        )

    def ended(self, state: RequestState, lookup: Lookup, result: LookupResult) -> None:
        """The answer is used as it is: learn from what climbed until it came."""
        state.judged = None
        if lookup.climb_at and result.hit_tokens > lookup.first_tokens:
            seconds = lookup.climbed_s or lookup.answered_at - lookup.climb_at
            self._policy.climb.observe(result.hit_tokens - lookup.first_tokens, seconds)
        if not state.waited:
            return
        state.waited = False
        seconds = lookup.climbed_s or time.monotonic() - lookup.climb_at
        self._tally.add("climb_seconds", seconds)
        if result.eta_us:
            self._tally.add("climb_late")
            if result.hit_tokens <= lookup.first_tokens:
                # Nothing came: it takes longer than that.
                self._policy.climb.observe(self._groups.step_tokens, seconds)
