"""The engine answers as without a daemon, and soon enough, whatever happens to the daemon."""

from __future__ import annotations

import contextlib
import mmap
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from engines.harness import Engine, arguments, connector, running_engine
from engines.kit import (
    BOTH_WAYS,
    TOKENS,
    Reference,
    all_same,
    cold,
    elsewhere,
    prompt,
    same,
    wait_attached,
    wait_settled,
    wait_stored,
    warm,
    whole_blocks,
)
from support.daemon import Daemon, running_daemon, stopped_daemon, until

from kvhearth_lab.harness import HUNG_S

pytestmark = BOTH_WAYS
LENGTH = 1000
SERVED = whole_blocks(LENGTH)


@pytest.fixture(scope="module")
def daemon(reach: dict[str, object]) -> Iterator[Daemon]:
    """A daemon that is not started: the first test needs it absent."""
    with stopped_daemon(memory="256MiB", **reach) as found:
        yield found


@pytest.fixture(scope="module")
def engine(logs: Path, daemon: Daemon) -> Iterator[Engine]:
    """One engine for all of the daemon's failures; it started before the daemon."""
    with running_engine(
        logs, **arguments(kv_transfer_config=connector(daemon, patient=False))
    ) as found:
        yield found


@pytest.fixture
def served(engine: Engine, daemon: Daemon) -> Iterator[Engine]:
    """The engine, attached to the running daemon; afterwards both are healthy and hold nothing."""
    if daemon.dead:
        daemon.start()
    wait_attached(daemon)
    yield engine
    assert engine.ask("healthy")
    if daemon.dead:
        daemon.start()
        wait_attached(daemon)
    wait_settled(daemon)
    daemon.stats()
    engine.reset()


@contextlib.contextmanager
def stopped(daemon: Daemon) -> Iterator[None]:
    """Sends SIGSTOP, and SIGCONT at the end."""
    assert daemon.process is not None
    daemon.process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        daemon.process.send_signal(signal.SIGCONT)


def timely(engine: Engine, texts: Sequence[Sequence[int]], reference: Reference, what: str) -> None:
    """Runs prompts: the same answers as the reference's, within the delay."""
    expected = reference.answers(texts)
    all_same(engine.generate(*texts, tokens=TOKENS), expected, what)


def back_in_use(engine: Engine, text: Sequence[int], reference: Reference) -> None:
    """Waits until the cache serves a prompt that it has."""

    def hit() -> bool:
        found = warm(engine, text)
        same(found, reference.answer(text), "while it comes back")
        return bool(found["cached"] == whole_blocks(len(text)))

    until(hit, "the cache serves again")


def test_absent_at_start(engine: Engine, daemon: Daemon, reference: Reference) -> None:
    assert daemon.dead
    text = prompt("absent")
    timely(engine, [text], reference, "absent")
    daemon.start()
    wait_attached(daemon)
    other = prompt("came later")
    same(cold(engine, daemon, other), reference.answer(other), "cold")
    back_in_use(engine, other, reference)


@pytest.mark.parametrize("delay_ms", [0, 10, 60])
def test_killed_while_it_serves(
    served: Engine, daemon: Daemon, reference: Reference, delay_ms: int
) -> None:
    texts = [prompt(f"long {number}", 3000) for number in range(4)]
    expected = reference.answers(texts)
    all_same(served.generate(*texts, tokens=TOKENS), expected, "before")
    wait_stored(daemon, 4 * 23)
    wait_settled(daemon)
    served.reset()
    requests = [{"prompt": each, "tokens": TOKENS} for each in texts]
    running = served.begin("generate", requests=requests)
    time.sleep(delay_ms / 1000)
    daemon.kill()
    all_same(running.result(HUNG_S), expected, f"killed after {delay_ms} ms")
    daemon.start()
    wait_attached(daemon)
    back_in_use(served, texts[0], reference)
    served.reset()
    all_same(served.generate(*texts, tokens=TOKENS), expected, "after")


@pytest.mark.parametrize("delay_ms", [300, 1000])
def test_killed_while_it_stores(
    served: Engine, daemon: Daemon, reference: Reference, delay_ms: int
) -> None:
    texts = [prompt(f"store {delay_ms} {number}", 1500) for number in range(4)]
    expected = reference.answers(texts)
    requests = [{"prompt": each, "tokens": TOKENS} for each in texts]
    running = served.begin("generate", requests=requests)
    time.sleep(delay_ms / 1000)
    daemon.restart()
    all_same(running.result(HUNG_S), expected, f"killed after {delay_ms} ms")
    wait_attached(daemon)
    wait_settled(daemon)
    served.reset()
    # The remaining blocks were adopted or stored since; none of them may be half a block.
    all_same(served.generate(*texts, tokens=TOKENS), expected, "from what survived")


def test_stopped(served: Engine, daemon: Daemon, reference: Reference) -> None:
    known, unknown = prompt("stopped, known"), prompt("stopped, unknown")
    same(cold(served, daemon, known), reference.answer(known), "cold")
    wait_settled(daemon)
    served.reset()
    with stopped(daemon):
        timely(served, [known, unknown], reference, "stopped")
        timely(served, [prompt("stopped, third")], reference, "still stopped")
    back_in_use(served, known, reference)


def test_slow(served: Engine, daemon: Daemon, reference: Reference) -> None:
    """A daemon that gets a fifth of the processor's time."""
    known = [prompt(f"slow {number}") for number in range(3)]
    fresh = [prompt(f"slow and new {number}") for number in range(3)]
    for each in known:
        same(cold(served, daemon, each), reference.answer(each), "cold")
    reference.answers(fresh)
    wait_settled(daemon)
    done = threading.Event()

    def slow_down() -> None:
        while not done.is_set():
            with stopped(daemon):
                time.sleep(0.08)
            time.sleep(0.02)

    brake = threading.Thread(target=slow_down)
    brake.start()
    try:
        served.reset()
        timely(served, [*known, *fresh], reference, "slow")
    finally:
        done.set()
        brake.join()
    back_in_use(served, known[0], reference)


def _plant_wrong_bytes(daemon: Daemon, every: int) -> None:
    """Flips bytes of the blocks, wherever they lie, without the daemon's knowledge."""
    assert daemon.arena_dir is not None
    [segment] = daemon.arena_dir.glob("segment-*")
    with segment.open("r+b") as file, mmap.mmap(file.fileno(), 0) as arena:
        for at in range(every // 2, len(arena), every):
            arena[at : at + 64] = bytes(byte ^ 0x5A for byte in arena[at : at + 64])


@pytest.mark.parametrize("every", [16 << 10, 4 << 20], ids=["all blocks", "some blocks"])
def test_wrong_bytes_are_caught(
    reference: Reference, logs: Path, reach: dict[str, object], every: int
) -> None:
    """Uses a poisoned cache, once with the engine that stored it and once with a fresh one."""
    texts = [prompt(f"poisoned {number}") for number in range(4)]
    expected = reference.answers(texts)
    with running_daemon(memory="64MiB", **elsewhere(reach)) as daemon:
        options = arguments(kv_transfer_config=connector(daemon))
        with running_engine(logs, **options) as engine:
            wait_attached(daemon)
            for text in texts:
                cold(engine, daemon, text)
            all_same([warm(engine, each) for each in texts], expected, "not poisoned yet")
            wait_settled(daemon)
            _plant_wrong_bytes(daemon, every)
            engine.reset()
            all_same(engine.generate(*texts, tokens=TOKENS), expected, "poisoned")
            until(lambda: _caught(daemon) > 0, "wrong bytes are counted")
            # The recomputed blocks are stored, and served without a further failure.
            wait_settled(daemon)
            engine.reset()
            all_same(engine.generate(*texts, tokens=TOKENS), expected, "healed")
            engine.reset()


def _caught(daemon: Daemon) -> int:
    counters = daemon.counters()
    names = ("checksum_failures", "corrupt", "mismatch")
    return sum(count for name, count in counters.items() if any(one in name for one in names))


@pytest.mark.parametrize(
    ("name", "over"),
    [("other", {}), ("tiny", {"dtype": "bfloat16"}), ("tiny", {"block_size": 64})],
    ids=["other weights", "other dtype", "other blocks"],
)
def test_another_contract(
    served: Engine, daemon: Daemon, reference: Reference, name: str, over: dict[str, Any]
) -> None:
    """An engine whose KV is not interchangeable shares the daemon and no blocks."""
    text = prompt(f"contract {name} {sorted(over)}")
    same(cold(served, daemon, text), reference.answer(text), "cold")
    options = arguments(name, **over, kv_transfer_config=connector(daemon))
    with running_engine(served.log_path.parent, **options) as other:
        wait_attached(daemon, 2)
        first = other.one(text, tokens=TOKENS)
        assert first["cached"] == 0, "served another contract's blocks"
    if name == "other":
        assert first["tokens"] != reference.answer(text)["tokens"]
