"""What vLLM's requests say about their KV, for the connector and the tier."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from kvhearth.counters import Warnings

RETAIN, PREFETCH = "kvhearth_retain_s", "kvhearth_prefetch"
"""Names in ``kv_transfer_params`` of the hints of agents."""
HANDOVER = "kvhearth_tokens"
"""Name in ``kv_transfer_params`` of the number of tokens that another engine has prefilled."""
_OURS = "kvhearth"
_KNOWN = (RETAIN, PREFETCH, HANDOVER)
_SECONDS_MAX = 1e9
_HELP = (
    "a hint is ignored: kvhearth_retain_s is a number of seconds, kvhearth_prefetch true or false; "
    "an orchestrator's actions are retain and pin (with ttl_s) and prefetch"
)


@dataclass(frozen=True)
class Hints:
    """What a request says.

    Attributes:
        prefetch: its blocks are wanted in memory, whatever that costs.
        retain_s: seconds for which its blocks are wanted after its end.
        bad_hints: number of hints that nobody understands.
    """

    prefetch: bool = False
    retain_s: float = 0.0
    bad_hints: int = 0


class HintReader:
    """Reads hints, and warns of those that cannot be met."""

    def __init__(self) -> None:
        self._warnings = Warnings()

    def read(self, params: Mapping[str, Any] | None, kv_hints: Any) -> Hints:
        """Return a request's hints.

        Args:
            params: its ``kv_transfer_params``.
            kv_hints: vLLM's envelope with an orchestrator's actions, or None.
        """
        prefetch, retain_s, bad = False, 0.0, 0
        for kind, value in _asked(params or {}, kv_hints):
            if kind == "prefetch" and type(value) is bool:
                prefetch = value
            elif kind == "retain" and type(value) in (int, float) and 0 < value < _SECONDS_MAX:
                retain_s = float(value)
            else:
                bad += 1
                self._warn(kind)
        for name in map(str, params or ()):
            if name.lower().startswith(_OURS) and name not in _KNOWN:
                bad += 1
                self._warn(name)
        return Hints(prefetch, retain_s, bad)

    def _warn(self, name: str) -> None:
        kind = name if name in ("retain", "prefetch") else "unknown"
        meant = get_close_matches(name.lower()[:80], _KNOWN, 1)
        text = f"{_HELP}; did you mean {meant[0]}?" if meant else _HELP
        self._warnings.warn("request.bad_hint", text, kind=kind, hint=name[:80])


def _asked(params: Mapping[str, Any], kv_hints: Any) -> Iterator[tuple[str, Any]]:
    """Yield what is asked for: by a request's own parameters, then by an orchestrator."""
    if RETAIN in params:
        yield "retain", params[RETAIN]
    if PREFETCH in params:
        yield "prefetch", params[PREFETCH]
    for action in kv_hints.actions if kv_hints else ():
        payload = action.payload
        given = payload.get("ttl_s") if isinstance(payload, Mapping) else None
        kind = "retain" if action.action_type in ("retain", "pin") else str(action.action_type)
        yield kind, True if kind == "prefetch" else given
