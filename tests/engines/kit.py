"""Helpers of the engine tests: prompts, answers of an engine without a cache, and comparison."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from engines.harness import Engine, arguments
from support.daemon import Daemon, free_port, until

BLOCK_TOKENS = 128
LOGPROB_SPREAD = 2e-4
"""Allowed difference in log-probabilities. fp32, but matrix products of other shapes: without any
cache the engine differs from its own prefix cache's answers by up to 1e-5; a wrong block moves
log-probabilities by more than 0.01.
"""
TOKENS = 12

Answer = dict[str, Any]


def prompt(seed: int | str, length: int = 1000) -> list[int]:
    """Token ids derived from ``seed``."""
    source = random.Random(f"prompt {seed}")
    return [source.randrange(256) for _ in range(length)]


def whole_blocks(length: int) -> int:
    """Tokens in the whole blocks of a prompt that a cache may serve; the last token is computed."""
    return (length - 1) // BLOCK_TOKENS * BLOCK_TOKENS


class Reference:
    """An engine without a connector, and its answers; each prompt runs once, with nothing in the
    engine's own prefix cache.
    """

    def __init__(self, folder: Path, name: str = "tiny", **over: Any) -> None:
        self.engine = Engine(folder, **arguments(name, enable_prefix_caching=False, **over))
        self._answers: dict[tuple[int, ...], Answer] = {}

    def answers(self, prompts: Sequence[Sequence[int]], tokens: int = TOKENS) -> list[Answer]:
        """Return the answers to all prompts."""
        keys = [(tokens, *each) for each in prompts]
        missing = {key for key in keys if key not in self._answers}
        for key in missing:
            self._answers[key] = self.engine.one(key[1:], tokens=tokens)
        return [self._answers[key] for key in keys]

    def answer(self, text: Sequence[int], tokens: int = TOKENS) -> Answer:
        """Return the answer to one prompt."""
        return self.answers([text], tokens)[0]


def _difference(found: Answer, expected: Answer) -> str:
    pairs = zip(found["tokens"], expected["tokens"], strict=False)
    at = next((at for at, (one, other) in enumerate(pairs) if one != other), None)
    if at is None:
        return f"{len(found['tokens'])} tokens instead of {len(expected['tokens'])}"
    return (
        f"token {at} is {found['tokens'][at]} ({found['logprobs'][at]:.5f}) instead of "
        f"{expected['tokens'][at]} ({expected['logprobs'][at]:.5f}), cached {found['cached']}"
    )


def same(
    found: Answer, expected: Answer, where: str = "", spread_max: float = LOGPROB_SPREAD
) -> None:
    """Fail unless both have the same tokens, log-probabilities and finish reason."""
    assert found["tokens"] == expected["tokens"], f"{where}: {_difference(found, expected)}"
    pairs = zip(found["logprobs"], expected["logprobs"], strict=True)
    spread = max((abs(one - other) for one, other in pairs), default=0.0)
    assert spread <= spread_max, f"{where}: log-probabilities differ by {spread}"
    assert found["finish"] == expected["finish"], where


def all_same(
    found: Sequence[Answer],
    expected: Sequence[Answer],
    where: str = "",
    spread_max: float = LOGPROB_SPREAD,
) -> None:
    """Apply ``same`` to each pair."""
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        same(one, other, f"{where} request {number}", spread_max)


def servable(daemon: Daemon) -> int:
    """Number of blocks that a lookup would find: stored or adopted, with checksums."""
    stats = daemon.stats(check_books=False)
    unsummed = stats.counters.get("stored_blocks", 0) - stats.counters.get("summed_blocks", 0)
    return int(stats.blocks) - max(0, unsummed)


def reserved_bytes(daemon: Daemon) -> int:
    """Bytes of slots that clients have reserved and not committed."""
    return sum(part.reserved_bytes for part in daemon.stats(check_books=False).segments)


def wait_stored(daemon: Daemon, blocks: int) -> None:
    """Wait until the daemon has at least ``blocks`` servable blocks."""
    until(lambda: servable(daemon) >= blocks, f"{blocks} blocks stored")


def wait_attached(daemon: Daemon, engines: int = 1) -> None:
    """Wait until ``engines`` engines are attached, with their schedulers and their first ranks.
    Right after a restart of the daemon their old groups are still listed, as gone.
    """

    def here() -> bool:
        members = daemon.members()
        ends = ("/-1:attached", "/0:attached")
        return all(sum(each.endswith(end) for each in members) >= engines for end in ends)

    until(here, "the engine attaches")


def wait_settled(daemon: Daemon) -> None:
    """Wait until nothing is leased and no block waits for its checksum."""
    until(
        lambda: (
            daemon.stats(check_books=False).leases == 0
            and servable(daemon) == daemon.stats(check_books=False).blocks
        ),
        "leases come back and checksums are taken",
    )


def wait_slots(daemon: Daemon) -> None:
    """Wait until engines hold all the reserved slots that they want, in all their groups: an engine
    that has just attached has none, and never waits for them.
    """
    seen: deque[int] = deque(maxlen=20)

    def steady() -> bool:
        seen.append(reserved_bytes(daemon))
        return len(seen) == seen.maxlen and 0 < seen[0] == seen[-1]

    until(steady, "the engine has slots in hand")


def cold(
    engine: Engine, daemon: Daemon, text: Sequence[int], tokens: int = TOKENS, blocks: int = 0
) -> Answer:
    """Run a prompt that is in no cache and wait until its blocks are servable: ``blocks`` of them,
    or all of 128 tokens.
    """
    wait_slots(daemon)
    before = servable(daemon)
    found = engine.one(text, tokens=tokens)
    assert found["cached"] == 0, "the prompt was to be new"
    wait_stored(daemon, before + (blocks or len(text) // BLOCK_TOKENS))
    return found


def warm(engine: Engine, text: Sequence[int], tokens: int = TOKENS) -> Answer:
    """Run a prompt with nothing in the engine's own prefix cache."""
    engine.reset()
    return engine.one(text, tokens=tokens)


def evict(daemon: Daemon, tier: str) -> None:
    """Evict all blocks of the only namespace from a tier."""
    (space,) = daemon.operator().namespaces().namespaces
    daemon.operator().evict(space.namespace, 0, tier)


BOTH_WAYS = pytest.mark.parametrize("reach", ["unix", "remote"], scope="module", indirect=True)
"""Runs a module's tests with engines on the daemon's host, and with those of another one."""


def elsewhere(reach: dict[str, object]) -> dict[str, object]:
    """Return the settings of a further daemon that is reached in the same way."""
    return {name: f"127.0.0.1:{free_port()}" for name in reach}
