"""Description of an engine for the core: its facts, pages, requests, steps and counters."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from kvhearth.client import KVClient
from kvhearth.connectors.core.groups import EngineGroups
from kvhearth.connectors.core.load_policy import UNBOUNDED_TOKENS, LoadPolicy
from kvhearth.connectors.core.settings import Settings
from kvhearth.connectors.core.step_metadata import Geometry
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
    """

    skips: bool = False
    handover_tokens: int = 0
    load_tokens_max: int = UNBOUNDED_TOKENS
    store_tokens_max: int = UNBOUNDED_TOKENS
    find_key_salt: Callable[[], bytes | None] | None = None


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
