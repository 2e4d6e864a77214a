"""Replays a trace against a live daemon, by real engine clients that copy real bytes."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvhearth import Cache, connect
from kvhearth.contract import Contract, GroupKind, GroupSpec
from kvhearth.errors import KVHearthError, Reason
from kvhearth.keys import split_keys
from kvhearth.model import U8
from kvhearth_server.traces.format import HASH_BYTES, Trace, TraceSpace, key_blob

KEY_BYTES = 32
PAGES_BYTES_MAX = 256 << 20
"""Most bytes of pages of one client; lookups of more blocks are made in portions."""
READY_S = 20.0
DONE_S = 120.0
SLEEP_MAX_S = 0.5


@dataclass
class Replayed:
    """Result of a replay.

    Attributes:
        hit_keys: blocks that were loaded.
        stored_keys: blocks that were stored, because a lookup missed them or the trace has them.
        wrong_blocks: loaded blocks with other bytes than were stored; must be 0.
        late_s: the longest time by which a paced use came late.
        reasons: why blocks were neither loaded nor stored, counted.
    """

    lookups: int = 0
    asked_keys: int = 0
    hit_keys: int = 0
    stored_keys: int = 0
    bytes: int = 0
    wrong_blocks: int = 0
    seconds: float = 0.0
    late_s: float = 0.0
    reasons: dict[str, int] = field(default_factory=dict)

    @property
    def hit_ratio(self) -> float:
        """Part of the keys looked up that was loaded."""
        return self.hit_keys / self.asked_keys if self.asked_keys else 0.0

    def note(self, reason: str) -> None:
        """Count a reason, if it is one."""
        if reason:
            self.reasons[reason] = self.reasons.get(reason, 0) + 1


Note = Callable[[float, Replayed], None]
"""Is told which part is done, 0 to 1, and the result so far."""


class _Engine:
    """A client of one space of a trace, and its pages."""

    def __init__(self, url: str, space: TraceSpace, number: int, page_bytes: int) -> None:
        model = f"{space.contract.get('model', 'trace')}"[:64]
        group = GroupSpec(GroupKind.FULL, 16, page_bytes)
        # A namespace of its own: nothing that real engines stored is read or replaced.
        contract = Contract(model, f"replay {secrets.token_hex(8)}", "uint8", (group,))
        self.cache = Cache(connect(url, contract, engine_id=f"replay-{number}"))
        if not self.cache.client.wait_ready(READY_S):
            self.cache.close()
            refusal = self.cache.client.refusal
            message = f"no daemon serves {url}" + (f": {refusal}" if refusal else "")
            raise KVHearthError(Reason.DAEMON_AWAY, message)
        self.page_bytes = page_bytes
        self.portion = max(1, PAGES_BYTES_MAX // page_bytes)
        self._pages: U8 = np.zeros((0, page_bytes), np.uint8)

    def pages(self, count: int) -> U8:
        """Return ``count`` pages; later calls return the same memory."""
        if count > len(self._pages):
            self._pages = np.zeros((count, self.page_bytes), np.uint8)
        return self._pages[:count]

    def look_up(self, names: Sequence[bytes], found: Replayed) -> None:
        """Load a chain's blocks, and store those that were not there."""
        pages = self.pages(len(names))
        marks = _marks(names)
        pages[:, :HASH_BYTES] = 0
        done = self.cache.load(names, pages).result(DONE_S)
        found.note(done.reason)
        loaded = done.loaded
        count = int(np.count_nonzero(loaded))
        found.wrong_blocks += int((pages[loaded, :HASH_BYTES] != marks[loaded]).any(axis=1).sum())
        found.hit_keys += count
        found.bytes += done.bytes
        if count < len(names):
            self.store(names[count:], found, names[count - 1] if count else None)

    def store(self, names: Sequence[bytes], found: Replayed, parent: bytes | None = None) -> None:
        """Store blocks of a chain."""
        unique = list(dict.fromkeys(names))
        pages = self.pages(len(unique))
        pages[:, :HASH_BYTES] = _marks(unique)
        done = self.cache.store(unique, pages, parent=parent).result(DONE_S)
        found.note(done.reason)
        found.stored_keys += done.stored
        found.bytes += done.bytes


def _marks(names: Sequence[bytes]) -> U8:
    """Return the first bytes of each block, shape (n, HASH_BYTES): its key's."""
    rows = np.frombuffer(b"".join(names), np.uint8).reshape(-1, KEY_BYTES)
    return rows[:, :HASH_BYTES]


def replay(
    trace: Trace,
    url: str,
    *,
    speed: float = 0.0,
    page_bytes: int = 0,
    note: Note = lambda done, found: None,
) -> Replayed:
    """Make the uses of a trace, one after the other, by one engine for each of its spaces.

    Args:
        url: of the daemon.
        speed: pace in terms of the recorded one; 0 is as fast as possible.
        page_bytes: size of a block; 0: the recorded one.
        note: is called now and then.

    Raises:
        KVHearthError: ``daemon_away``, or the reason why the daemon refuses an engine.
    """
    found, engines = Replayed(), dict[int, _Engine]()
    keys = split_keys(key_blob(trace.hashes, KEY_BYTES), KEY_BYTES)
    with contextlib.ExitStack() as ends:
        for number, space in trace.spaces.items():
            engine = _Engine(url, space, number, page_bytes or space.block_bytes)
            ends.callback(engine.cache.close)
            engines[number] = engine
        began = time.monotonic()
        for at in range(len(trace)):
            if speed:
                _wait(began + float(trace.at_us[at]) / 1e6 / speed, found)
            runs = range(int(trace.first_runs[at]), int(trace.first_runs[at + 1]))
            names = [
                name
                for run in runs
                for name in keys[trace.starts[run] : trace.starts[run] + trace.lengths[run]]
            ]
            _use(engines[int(trace.use_spaces[at])], names, found, store=bool(trace.stores[at]))
            found.seconds = time.monotonic() - began
            note((at + 1) / len(trace), found)
    return found


def _wait(until: float, found: Replayed) -> None:
    while (left := until - time.monotonic()) > 0:
        time.sleep(min(left, SLEEP_MAX_S))
    found.late_s = max(found.late_s, -left)


def _use(engine: _Engine, names: list[bytes], found: Replayed, *, store: bool) -> None:
    for begin in range(0, len(names), engine.portion):
        some = names[begin : begin + engine.portion]
        if store:
            engine.store(some, found, names[begin - 1] if begin else None)
        else:
            engine.look_up(some, found)
    if not store:
        found.lookups += 1
        found.asked_keys += len(names)
