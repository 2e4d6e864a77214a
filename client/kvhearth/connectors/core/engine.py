"""The engine as the scheduler's half sees it: its facts, pages, requests and steps, its contract's
groups, the costs of loads, the counters.
"""

from __future__ import annotations

import enum
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from kvhearth.client import KVClient
from kvhearth.connectors.core.settings import Settings
from kvhearth.connectors.core.step_metadata import Geometry
from kvhearth.contract import Contract, GroupKind
from kvhearth.keys import fold_key
from kvhearth.model import I64, Bools, Tier
from kvhearth.results import LookupResult, usable_tokens
from kvhearth.wire.handshake import NAMELESS, Run

COUNTERS = {
    "lookups": "Requests for which KVHearth was asked.",
    "lookup_late": "Requests that went without because the answer took too long.",
    "lookup_failed": "Requests for which there was no answer.",
    "lookup_short": "Requests of which less was leased than found: the daemon's bounds on leases.",
    "hit_tokens": "Prompt tokens that KVHearth had beyond the engine's own.",
    "declined_tokens": "Of these, tokens recomputed since that was estimated to be faster.",
    "hit_engine_tokens": "Prompt tokens of admitted requests that the engine had itself.",
    "hit_dram_tokens": "Tokens loaded that were in the daemon's memory when it was asked.",
    "hit_ssd_tokens": "Tokens loaded that were promoted from SSD or a remote for their request.",
    "climb_waits": "Requests that waited for blocks to climb from SSD or a remote.",
    "climb_late": "Of these, requests that went on before all had climbed.",
    "climb_seconds": "Time until blocks had climbed for requests that waited, added up.",
    "load_requests": "Loads that began.",
    "load_tokens": "Tokens whose KV was loaded.",
    "load_bytes": "Bytes copied into the engine's pages, over all ranks.",
    "load_failed": "Loads that failed; their requests were recomputed.",
    "load_seconds": "Time from the begin of loads to their end, added up.",
    "store_blocks": "Blocks copied out and handed to the daemon.",
    "store_bytes": "Bytes copied out of the engine's pages, over all ranks.",
    "store_failed": "Blocks whose copy or commit failed.",
    "store_duplicates": "Blocks that the daemon had already.",
    "store_skipped": "Full blocks that were never stored: no empty slot, or too many blocks held.",
    "retained_blocks": "Blocks kept for a while after their request's end, as it asked.",
    "retain_refused": "Blocks not kept although asked for: not stored, or refused by the daemon.",
    "retain_resumed": "Sessions that went on while their blocks were kept.",
    "hints_refused": "Hints of requests that are ignored: unknown, or not valid.",
    "troubles": "Calls of the connector that failed and did without the cache.",
}
GAUGES = {
    "held_blocks": "KV blocks of the engine that stores keep from reuse.",
    "attached": "1 while the scheduler is attached to a daemon.",
}


class Counters:
    """Counts since the last ``take``. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, float] = {}

    def add(self, name: str, amount: float = 1) -> None:
        """Add to a counter of ``COUNTERS``."""
        with self._lock:
            self._counts[name] = self._counts.get(name, 0) + amount

    def add_all(self, amounts: Mapping[str, float]) -> None:
        """Add to several counters."""
        with self._lock:
            for name, amount in amounts.items():
                self._counts[name] = self._counts.get(name, 0) + amount

    def take(self) -> dict[str, float]:
        """Return all counts since the last call, without zeros."""
        if not self._counts:
            return {}
        with self._lock:
            taken, self._counts = self._counts, {}
        return {name: value for name, value in taken.items() if value}


def merged(left: Mapping[str, Any], right: Mapping[str, Any]) -> dict[str, float]:
    """Add up counters; keep the larger value of each gauge."""
    total = {name: float(value) for name, value in left.items()}
    for name, value in right.items():
        if name in GAUGES:
            total[name] = max(total.get(name, 0.0), float(value))
        else:
            total[name] = total.get(name, 0.0) + float(value)
    return total


def summary(data: Mapping[str, Any]) -> dict[str, float]:
    """Return the values for the engine's log line about an interval."""
    shown = ("load_tokens", "load_failed", "store_blocks", "store_failed", "lookup_late")
    line = {name: data[name] for name in shown if data.get(name)}
    if data.get("load_seconds") and data.get("load_bytes"):
        line["load_GB_per_s"] = round(data["load_bytes"] / data["load_seconds"] / 1e9, 2)
    return line


UNBOUNDED_TOKENS = 1 << 62
"""A bound in tokens where nobody gave one. 0 is a bound like any other: it means none at all."""
NULL_PAGE = 0
"""Page in a block table whose block the engine does not keep, such as one behind a window."""

_NOTHING: Mapping[str, Any] = {}

BlockTable = Sequence[Sequence[int]]
"""Pages of a request's blocks in order, by the engine's group."""


class PagePool(Protocol):
    """The engine's KV pages and their references. Used by the scheduler's thread only."""

    @property
    def page_count(self) -> int:
        """Number of pages."""

    def hold(self, pages: Sequence[int]) -> None:
        """Add a reference to each page, which keeps it from reuse."""

    def release(self, pages: Sequence[int]) -> None:
        """Drop a reference of each page. Pages without one may be reused, the first one first."""

    def has_one_reference(self, page: int) -> bool:
        """Whether the page becomes free when one reference is dropped."""


class Request(Protocol):
    """A live request. Its numbers and its list of hashes are read in place and grow as it runs.

    vLLM's requests fit as they are, so that no step pays for a translation.
    """

    @property
    def request_id(self) -> str:
        """Name, unique among live requests."""

    @property
    def num_tokens(self) -> int:
        """Number of known tokens: the prompt's and those generated."""

    @property
    def num_prompt_tokens(self) -> int:
        """Number of the prompt's tokens."""

    @property
    def num_computed_tokens(self) -> int:
        """Number of tokens whose KV the engine counts as computed, or as being loaded."""

    @property
    def block_hashes(self) -> Sequence[bytes]:
        """Chained hashes, one for each ``EngineFacts.hash_tokens`` known tokens."""


@dataclass(frozen=True)
class RequestOptions:
    """A request's own demands.

    Attributes:
        skips: nothing is looked up or loaded.
        handover_tokens: tokens that another engine has prefilled for it.
        load_tokens_max: most tokens that are loaded at a time; with 0 none are.
        store_tokens_max: tokens after which nothing is stored; with 0 nothing is.
        find_key_salt: finds the digest of what its hashes do not cover, such as an adapter's
            weights; None if they cover all. Runs on a thread of its own and may read files. It
            returns None if there is no digest: then nothing is loaded or stored.
        token_ids: its tokens, which grow as it runs, if they are all that its hashes cover.
        prefetch: its blocks are wanted in memory, whatever that costs.
        retain_s: seconds for which its blocks are wanted after its end.
        session_id: name of the dialogue that it belongs to; "" if it has none.
        bad_hints: number of hints that nobody understands.
    """

    skips: bool = False
    handover_tokens: int = 0
    load_tokens_max: int = UNBOUNDED_TOKENS
    store_tokens_max: int = UNBOUNDED_TOKENS
    find_key_salt: Callable[[], bytes | None] | None = None
    token_ids: Sequence[int] | None = None
    prefetch: bool = False
    retain_s: float = 0.0
    session_id: str = ""
    bad_hints: int = 0


@dataclass(frozen=True)
class EngineFacts:
    """Facts about an engine that no contract has.

    Attributes:
        engine_id: name of the engine, equal in its scheduler and its ranks.
        hash_tokens: tokens that one block hash covers.
        step_tokens_max: most tokens that one step computes.
        options_of: reads a request's demands, once.
        stores, loads: whether it stores its blocks, and whether it loads blocks. If it only
            stores, other engines continue its requests; if it only loads, it loads every hit.
        drops_block: a draft model recomputes the last block of a hit.
        live_weights: its weights may be replaced while it runs.
        stepped: it steps without requests while stores need that. Otherwise no block is held after
            the last request.
        publishes: it tells others which blocks are where.
        run: as for ``kvhearth.client.connect``.
    """

    engine_id: str
    hash_tokens: int
    step_tokens_max: int
    options_of: Callable[[Request], RequestOptions] = lambda _: RequestOptions()
    stores: bool = True
    loads: bool = True
    drops_block: bool = False
    live_weights: bool = False
    stepped: bool = True
    publishes: bool = False
    run: Run = NAMELESS


class Step(NamedTuple):
    """A step that the engine is about to run.

    Attributes:
        tokens: number of tokens that it computes.
        scheduled: of these, the number of each request.
        find_table: returns a request's block table. It may be slow, so it is called only where a
            block is to be stored.
        states: recurrent states at a block's end that the engine hands off, by request: (the
            engine's group, page, tokens).
    """

    tokens: int = 0
    scheduled: Mapping[str, int] = _NOTHING
    find_table: Callable[[str], BlockTable] = lambda _: ()
    states: Mapping[str, Sequence[tuple[int, int, int]]] = _NOTHING


class EngineGroups:
    """Arithmetic over the groups of one contract. Pure.

    Args:
        contract: the engine's contract.
        kv_groups: the engine's number of each of the contract's groups.
        hash_tokens: tokens that one of the engine's block hashes covers.

    Attributes:
        step_tokens: granularity of hits: a hit ends at a multiple of this many tokens.
        whole: True if all groups attend to everything, so that a hit may be cut anywhere and the
            engine may step back a token after it.
    """

    def __init__(self, contract: Contract, kv_groups: Sequence[int], hash_tokens: int) -> None:
        self.hash_tokens = hash_tokens
        self.specs = contract.groups
        self.kv_groups = tuple(kv_groups)
        self.count = len(self.specs)
        self._scales = [spec.block_tokens // hash_tokens for spec in self.specs]
        if any(spec.block_tokens % hash_tokens for spec in self.specs):
            raise ValueError(f"hashes of {hash_tokens} tokens do not divide the groups' blocks")
        self._growing = [
            (group, spec.block_tokens)
            for group, spec in enumerate(self.specs)
            if spec.kind is not GroupKind.MAMBA
        ]
        self._block_tokens = min((size for _, size in self._growing), default=1)
        windows = (one for one in self.specs if one.kind is GroupKind.SLIDING_WINDOW)
        self._window_tokens = min((one.window_tokens for one in windows), default=1 << 62)
        self.step_tokens = math.lcm(*(spec.block_tokens for spec in self.specs))
        self.whole = all(spec.kind is GroupKind.FULL for spec in self.specs)

    def keys(self, hashes: Sequence[bytes], key_salt: bytes = b"") -> dict[int, list[bytes]]:
        """Return the keys of all full blocks of a request, by group.

        Args:
            hashes: the engine's hashes, one for each ``hash_tokens``; each covers all before it.
            key_salt: digest of everything that the hashes do not cover, or empty.
        """
        keys: dict[int, list[bytes]] = {}
        for group, scale in enumerate(self._scales):
            own = list(hashes if scale == 1 else hashes[scale - 1 :: scale])
            keys[group] = [fold_key(bytes(key), key_salt) for key in own] if key_salt else own
        return keys

    def key(self, group: int, hashes: Sequence[bytes], block: int, key_salt: bytes = b"") -> bytes:
        """Return the key of one block of one group."""
        own = bytes(hashes[(block + 1) * self._scales[group] - 1])
        return fold_key(own, key_salt) if key_salt else own

    def full_blocks(self, group: int, hashes: Sequence[bytes], tokens: int) -> int:
        """Count the blocks of a group that are full after ``tokens`` computed tokens and have a
        key.
        """
        return min(tokens // self.specs[group].block_tokens, len(hashes) // self._scales[group])

    def due_tokens(self, next_block: Sequence[int]) -> int:
        """Return the token count at which the next block of some group is full. Recurrent states do
        not count: the engine hands them off itself.
        """
        due = 1 << 62
        for group, block_tokens in self._growing:
            due = min(due, (next_block[group] + 1) * block_tokens)
        return due

    def run_tokens(self, wanted_tokens: int) -> int:
        """Return how many tokens after the end of a full block ``wanted_tokens`` of blocks are
        full; 0 if windows are so small that the engine might drop the first of them before.
        """
        return max(min(wanted_tokens, self._window_tokens // 4) - self._block_tokens, 0)

    def reach(self, found: LookupResult, limit_tokens: int) -> int:
        """Return the token count up to which leased blocks let the engine continue,
        ``limit_tokens`` at most.
        """
        limit = min(found.hit_tokens, limit_tokens)
        limit -= limit % self.step_tokens
        if limit <= 0 or found.lease is None:
            return 0
        if limit == found.hit_tokens:
            return limit
        flags = [(self.specs[group], result.leased) for group, result in found.groups.items()]
        return usable_tokens(flags, limit)

    def end(self, tokens: int, *, step_back: bool) -> int:
        """Return the token count up to which a hit of a request of ``tokens`` may reach.

        Where all groups attend to everything, the engine steps back a token itself after a hit of
        the whole prompt. A window or a state cannot step back, nor does the engine where
        ``step_back`` is set.
        """
        return tokens if self.whole and not step_back else tokens - 1

    def ceiling(self, found: LookupResult, limit_tokens: int) -> int:
        """Return the token count that would be reached if all blocks on slower tiers were
        promoted, ``limit_tokens`` at most; those that a remote is asked about count as present.
        """
        flags = [
            (self.specs[group], result.ready | (result.tiers >= Tier.SSD))
            for group, result in found.groups.items()
        ]
        return usable_tokens(flags, limit_tokens)

    def needed(self, group: int, start_tokens: int, end_tokens: int) -> range:
        """Return the blocks of a group to load for a hit of ``end_tokens`` when the engine already
        has the first ``start_tokens``.
        """
        spec = self.specs[group]
        end = end_tokens // spec.block_tokens
        first = start_tokens // spec.block_tokens
        if spec.kind is GroupKind.MAMBA:
            return range(max(end - 1, 0), end)
        if spec.kind is GroupKind.SLIDING_WINDOW:
            back = -(-(spec.window_tokens - 1) // spec.block_tokens)
            return range(max(end - back, first, 0), end)
        return range(first, end)


def rows(leased: Bools, blocks: range) -> I64 | slice | None:
    """Return the positions of ``blocks`` among the leased blocks, which is the order of their
    extents; None if one of them is not leased.
    """
    if blocks.stop > len(leased) or blocks.start >= blocks.stop:
        return None if len(blocks) else slice(0, 0)
    if leased[: blocks.stop].all():  # nearly always; a view of their extents costs no copy
        return slice(blocks.start, blocks.stop)
    if not leased[blocks.start : blocks.stop].all():
        return None
    before: I64 = np.cumsum(leased)[blocks.start : blocks.stop] - 1
    return before


_DECAY = 0.97
_COUNT_MIN = 4
_TRY_EVERY = 64


class CostLine:
    """Seconds as a line over tokens, fitted to recent measurements; old ones fade.

    Pure. Both coefficients stay at 0 or above, so that the line can be extrapolated beyond the
    measurements.
    """

    def __init__(self, decay: float = _DECAY) -> None:
        self._decay = decay
        self._weight = self._x = self._y = self._xx = self._xy = 0.0
        self.count = 0

    def observe(self, tokens: int, seconds: float) -> None:
        """Record that ``tokens`` took ``seconds``."""
        keep, x = self._decay, float(tokens)
        self._weight = self._weight * keep + 1.0
        self._x = self._x * keep + x
        self._y = self._y * keep + seconds
        self._xx = self._xx * keep + x * x
        self._xy = self._xy * keep + x * seconds
        self.count += 1

    def seconds(self, tokens: int) -> float:
        """Estimate the seconds for ``tokens``; 0 before any measurement."""
        fixed, slope = self._line()
        return fixed + slope * tokens

    def _line(self) -> tuple[float, float]:
        if not self._x:
            return 0.0, 0.0
        mean_x, mean_y = self._x / self._weight, self._y / self._weight
        spread = self._xx / self._weight - mean_x * mean_x
        # Measurements of one size cannot separate a fixed part: attribute everything to the slope.
        slope = mean_y / mean_x
        if spread > 1e-3 * mean_x * mean_x:
            slope = (self._xy / self._weight - mean_x * mean_y) / spread
        slope = min(max(slope, 0.0), mean_y / mean_x)
        return mean_y - slope * mean_x, slope


class Verdict(enum.StrEnum):
    """Decision about a hit."""

    LOAD = "load"
    TOO_SHORT = "too_short"
    RECOMPUTE = "recompute"


@dataclass(frozen=True)
class Bounds:
    """A user's bounds of one load in tokens; ``always`` switches the estimate off."""

    min_load_tokens: int = 0
    max_load_tokens: int = UNBOUNDED_TOKENS
    always: bool = False


class LoadPolicy:
    """Decides about each hit. Learns from loads, promotions from SSD and prefill steps.

    Until the rates are known, every hit is loaded, after a wait for promotion where it needs one.
    One in 64 hits that look slower than computing is loaded all the same, so that a rate that was
    once bad is measured again. Pure.

    Args:
        bounds: the user's bounds.
    """

    def __init__(self, bounds: Bounds) -> None:
        self.load = CostLine()
        self.promotion = CostLine()
        self.prefill = CostLine()
        self._bounds = bounds
        self._refused_count = 0

    def most(self, asked: int = UNBOUNDED_TOKENS) -> int:
        """Return the most tokens that one load may bring; ``asked`` is a request's own bound."""
        return min(self._bounds.max_load_tokens, asked)

    def judge(self, tokens: int) -> Verdict:
        """Decide about a hit of ``tokens`` beyond those that the engine has."""
        if tokens < self._bounds.min_load_tokens:
            return Verdict.TOO_SHORT
        if self._bounds.always or not _known(self.load, self.prefill):
            return Verdict.LOAD
        if self.load.seconds(tokens) <= self.prefill.seconds(tokens):
            return Verdict.LOAD
        return Verdict.LOAD if self._retries() else Verdict.RECOMPUTE

    def prefetches(self, tokens: int) -> bool:
        """Whether to promote blocks from SSD for a request of ``tokens`` before the number of hits
        is known. True if a hit of all tokens would still be worth it.
        """
        if tokens < self._bounds.min_load_tokens:
            return False
        if self._bounds.always or not _known(self.load, self.promotion, self.prefill):
            return True
        up_s = self.promotion.seconds(tokens) + self.load.seconds(tokens)
        return up_s <= self.prefill.seconds(tokens) or self._retries()

    def awaits(self, ready: int, most: int, eta_s: float) -> bool:
        """Whether a request waits until ``most`` tokens beyond those that the engine has can be
        loaded, when ``ready`` of them can be loaded at once.

        Args:
            eta_s: the daemon's estimate for the others. This engine's own measurement counts where
                it is longer.
        """
        if most <= ready or most < self._bounds.min_load_tokens:
            return False
        if self._bounds.always or not _known(self.load, self.prefill):
            return True
        if _known(self.promotion):
            eta_s = max(eta_s, self.promotion.seconds(most - ready))
        now_s = self.prefill.seconds(most)
        if ready:
            now_s = min(now_s, self.load.seconds(ready) + self.prefill.seconds(most - ready))
        return eta_s + self.load.seconds(most) <= now_s or self._retries()

    def _retries(self) -> bool:
        """Whether to try a choice that looks too slow once more."""
        self._refused_count += 1
        return self._refused_count % _TRY_EVERY == 0


def _known(*lines: CostLine) -> bool:
    return min(line.count for line in lines) >= _COUNT_MIN


@dataclass(frozen=True)
class Context:
    """Objects shared by the parts of the scheduler's half.

    Attributes:
        settings: the user's options.
        facts: facts about the engine.
        client: the scheduler's client.
        groups: groups of the engine's contract.
        geometry: layout of blocks over the ranks.
        policy: decides which hits are worth a load.
        counters: the counters.
    """

    settings: Settings
    facts: EngineFacts
    client: KVClient
    groups: EngineGroups
    geometry: Geometry
    policy: LoadPolicy
    counters: Counters
