"""A mover over an arena of its own, driven step by step, with blocks of known content."""

from __future__ import annotations

import contextlib
import select
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import xxhash

from kvhearth.model import U8, Records
from kvhearth_lab.harness import HUNG_S
from kvhearth_server.memory.mapping import HugepagePolicy
from kvhearth_server.memory.segments import create_segment
from kvhearth_server.tiers.base import ADDRESS_DTYPE, BlockSpec, Throttled
from kvhearth_server.tiers.remote.mover import Answer, Delete, Exists, Get, Put
from kvhearth_server.tiers.remote.names import space_name
from kvhearth_server.tiers.remote.process import Mover
from kvhearth_server.tiers.remote.url import parse_remote
from support.tiers import content_of, family, keys_of

FLEET_KEY = b"fleet key of the tests"
SPACE = space_name(FLEET_KEY, "tests", "{}", "weights", 0)
ARENA_BYTES = 64 << 20
STAGING_BYTES = 16 << 20
PAGE = 4096


class MoverDesk:
    """A mover, its arena and the answers that it gave. The arena's first half is put from, its
    second half got to.
    """

    def __init__(self, url: str, *, fleet_key: bytes = FLEET_KEY, **changes: Any) -> None:
        self.segment = create_segment(ARENA_BYTES, HugepagePolicy.OFF)
        self.mover = Mover(
            parse_remote(url),
            fleet_key,
            [self.segment],
            changes.pop("staging_bytes", STAGING_BYTES),
            log_level=changes.pop("log_level", "error"),
            **changes,
        )
        self.answers: list[Answer] = []

    def step(self, seconds: float = 0.5) -> None:
        """Wait until there is something to do, at most ``seconds``, and do it."""
        due_s = max(0.0, self.mover.due_at - time.monotonic())
        select.select([self.mover.event_fd], [], [], min(seconds, due_s))
        self.answers += self.mover.poll()

    def until(self, found: Any, deadline_s: float = HUNG_S) -> Any:
        """Step until ``found`` returns something true, and return it."""
        end = time.monotonic() + deadline_s
        while not (result := found()):
            assert time.monotonic() < end, (self.mover.up, self.mover.problem)
            self.step()
        return result

    def up(self) -> MoverDesk:
        """Wait until the mover works and its remote was found good."""
        self.until(lambda: self.mover.up and not self.mover.problem)
        return self

    def final(self, ticket: int | Throttled) -> Answer:
        """Wait for a request's final answer."""
        assert isinstance(ticket, int), ticket
        found: list[Answer] = self.until(
            lambda: [each for each in self.answers if each.ticket == ticket and each.final]
        )
        assert len(found) == 1
        return found[0]

    # -- requests ----------------------------------------------------------------------------------

    def places(self, count: int, of: BlockSpec, start: int = 0) -> Records:
        """Return places for ``count`` blocks from byte ``start`` of the arena."""
        room = -(-of.length // PAGE) * PAGE
        rows = np.zeros((count, of.shards), ADDRESS_DTYPE)
        rows["offset"] = start + room * np.arange(count * of.shards).reshape(count, of.shards)
        assert int(rows["offset"].max()) + room <= start + ARENA_BYTES // 2
        return rows

    def put_request(self, numbers: range | list[int], of: BlockSpec | None = None) -> Put:
        """Fill slots with known bytes and return them as a request."""
        of = of or family()
        places = self.places(len(numbers), of)
        sums = np.zeros(places.shape, "V16")
        for row, number in enumerate(numbers):
            for shard in range(of.shards):
                content = content_of(number, shard, of.length)
                self.slot(places[row, shard], of.length)[:] = content
                sums[row, shard] = xxhash.xxh3_128_digest(content)
        keys = keys_of(numbers)
        return Put(SPACE, of, keys, places, sums, [b"", *keys[:-1]])

    def get_request(self, numbers: range | list[int], of: BlockSpec | None = None) -> Get:
        """Return a request for blocks into slots of other content."""
        of = of or family()
        places = self.places(len(numbers), of, ARENA_BYTES // 2)
        for place in places.reshape(-1):
            self.slot(place, of.length)[:] = 0xEE
        return Get(SPACE, of, keys_of(numbers), places)

    def slot(self, place: Any, length: int) -> U8:
        """Return the bytes of a slot."""
        return self.segment.view[int(place["offset"]) :][:length]

    def put(self, numbers: range | list[int], of: BlockSpec | None = None) -> Answer:
        """Publish blocks."""
        return self.final(self.mover.submit(self.put_request(numbers, of), HUNG_S))

    def get(self, numbers: range | list[int], of: BlockSpec | None = None) -> Answer:
        """Load blocks; every one that is done has the right bytes."""
        request = self.get_request(numbers, of)
        answer = self.final(self.mover.submit(request, HUNG_S))
        self.check(answer, request, numbers)
        return answer

    def check(self, answer: Answer, request: Get, numbers: range | list[int]) -> None:
        """Assert that done rows have the right bytes and checksums."""
        of = request.family
        for row, number in enumerate(numbers):
            if str(answer.outcomes[row]) != "Done()":
                continue
            assert answer.checksums is not None
            for shard in range(of.shards):
                content = content_of(number, shard, of.length)
                assert (self.slot(request.places[row, shard], of.length) == content).all()
                digest = xxhash.xxh3_128_digest(content)
                assert answer.checksums[row, shard].tobytes() == digest

    def exists(self, numbers: range | list[int], of: BlockSpec | None = None) -> Answer:
        """Look for blocks."""
        request = Exists(SPACE, of or family(), keys_of(numbers))
        return self.final(self.mover.submit(request, HUNG_S))

    def delete(self, numbers: range | list[int]) -> Answer:
        """Remove blocks."""
        request = Delete(SPACE, family(), keys_of(numbers))
        return self.final(self.mover.submit(request, HUNG_S))


def kinds(answer: Answer) -> list[str]:
    """Return the outcomes' types, and the reasons of those that have some."""
    found = []
    for outcome in answer.outcomes:
        why = getattr(outcome, "reason", None) or getattr(outcome, "where", None)
        found.append(f"{type(outcome).__name__}{f' {why}' if why else ''}")
    return found


@contextlib.contextmanager
def mover_desk(url: str, **changes: Any) -> Iterator[MoverDesk]:
    """Run a mover for the length of a block; it ends with nothing lent and nobody in the arena."""
    desk = MoverDesk(url, **changes)
    try:
        yield desk
        assert desk.mover.drain(HUNG_S)
        assert desk.mover.staging.free_bytes == desk.mover.staging.size
    finally:
        desk.mover.close()
        assert desk.segment.held_bytes() == []
        desk.segment.close()
