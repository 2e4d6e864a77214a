"""Hundreds of aborts, preemptions and restarts leave nothing behind in either process."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engines.harness import MIB, Engine, arguments, connector, running_engine
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
    whole_blocks,
)
from support.daemon import Daemon, running_daemon, until

from kvhearth_lab.harness import HUNG_S

pytestmark = BOTH_WAYS
ROUNDS = int(os.environ.get("KVHEARTH_STORM_ROUNDS", "4"))
REQUESTS = 30
"""Requests of one round; 34 rounds make the thousand of the requirement."""
LINES = 8
"""Connections that a client may open beyond those of its first rounds."""
LOADED = "vllm:kvhearth_load_bytes"
SEED = int(os.environ.get("KVHEARTH_STORM_SEED", "5"))


@pytest.fixture(scope="module")
def engine(logs: Path, daemon: Daemon) -> Iterator[Engine]:
    """An engine of 40 blocks, so that requests also preempt each other."""
    options = arguments(
        max_model_len=2048,
        max_num_batched_tokens=1024,
        kv_cache_memory_bytes=20 * MIB,
        kv_transfer_config=connector(daemon),
    )
    with running_engine(logs, **options) as found:
        wait_attached(daemon)
        yield found


def descriptors(engine: Engine) -> int:
    """Returns the number of open descriptors of all its processes."""
    return sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in engine.pids)


def some_request(source: random.Random, texts: list[list[int]]) -> dict[str, Any]:
    """Mostly prompts that are in the cache; aborted at once, while loading, while computing, while
    decoding, or not at all.
    """
    text = source.choice(texts)
    if source.random() < 0.2:
        text = [*text[: source.randrange(len(text))], *prompt(source.random(), 200)]
    request: dict[str, Any] = {"prompt": text, "tokens": 6, "delay_s": source.random() * 0.3}
    fate = source.random()
    if fate < 0.6:
        request["abort_after_s"] = source.choice([0.0, 0.001, 0.005, 0.02, 0.1, 0.5])
    elif fate < 0.8:
        request["abort_after_tokens"] = source.randrange(1, 5)
    return request


def test_abort_storm(engine: Engine, daemon: Daemon, reference: Reference) -> None:
    source = random.Random(SEED)
    print(f"KVHEARTH_STORM_SEED={SEED} KVHEARTH_STORM_ROUNDS={ROUNDS}")
    texts = [prompt(f"storm {number}", 400 + 130 * number) for number in range(8)]
    expected = reference.answers(texts)
    all_same(engine.generate(*texts, tokens=12), expected, "before")
    wait_stored(daemon, sum(len(each) // 128 for each in texts))
    opened = 0
    aborted = 0
    for number in range(ROUNDS):
        requests = [some_request(source, texts) for _ in range(REQUESTS)]
        if source.random() < 0.5:
            engine.reset()
        found = engine.ask("generate", requests=requests)
        aborted += sum(each["finish"] == "abort" for each in found)
        if number == 1:
            opened = descriptors(engine)
        if number % 4 == 3:
            daemon.restart()
            wait_attached(daemon)
    assert aborted > ROUNDS * REQUESTS // 4
    wait_settled(daemon)
    engine.reset()
    assert engine.metric("vllm:kv_cache_usage_perc") == 0.0
    all_same(engine.generate(*texts, tokens=12), expected, "after")
    engine.reset()
    wait_settled(daemon)
    # A client opens lines as it needs them, but what each abort leaked would be dozens.
    most = opened + LINES
    until(lambda: descriptors(engine) <= most, f"{most} descriptors")


def hurt(daemon: Daemon, how: str) -> None:
    """Kills and restarts the daemon, or stops it for a moment."""
    if how == "killed":
        daemon.restart()
        return
    assert daemon.process is not None
    daemon.process.send_signal(signal.SIGSTOP)
    time.sleep(0.3)  # shorter than its heartbeat's deadline, longer than a load
    daemon.process.send_signal(signal.SIGCONT)


def test_tensor_parallel_in_chaos(
    reach: dict[str, object], reference: Reference, logs: Path
) -> None:
    """Two ranks load while the daemon is killed or stopped, and requests are aborted."""
    texts = [prompt(f"two ranks {number}", 1000) for number in range(4)]
    expected = reference.answers(texts)
    with (
        running_daemon(memory="256MiB", **elsewhere(reach)) as daemon,
        running_engine(
            logs, **arguments(tensor_parallel_size=2, kv_transfer_config=connector(daemon))
        ) as pair,
    ):
        wait_attached(daemon)
        for text, answer in zip(texts, expected, strict=True):
            same(cold(pair, daemon, text), answer, "cold")
        for how in ("killed", "stopped", "killed"):
            loaded = pair.metric(LOADED)
            all_same(hurt_while_loading(pair, daemon, texts, how), expected, how)
            assert pair.metric(LOADED) > loaded, "no rank has loaded anything"
        wait_attached(daemon)
        wait_settled(daemon)
        pair.reset()
        found = pair.generate(*texts, tokens=TOKENS)
        all_same(found, expected, "after")
        assert all(each["cached"] == whole_blocks(1000) for each in found)
        pair.reset()


def hurt_while_loading(
    pair: Engine, daemon: Daemon, texts: list[list[int]], how: str
) -> list[dict[str, Any]]:
    """Runs prompts one after the other, each also once aborted, and hurts the daemon after a load
    has ended; returns the results of those not aborted.
    """
    wait_attached(daemon)
    wait_settled(daemon)
    pair.reset()
    loaded = pair.metric(LOADED)
    requests = [
        {"prompt": text, "tokens": TOKENS, "delay_s": 0.15 * number}
        for number, text in enumerate(texts)
    ]
    aborted = [{**each, "abort_after_s": 0.02} for each in requests]
    running = pair.begin("generate", requests=[*requests, *aborted])
    until(lambda: pair.metric(LOADED) > loaded, "a load before the daemon is hurt")
    hurt(daemon, how)
    found: list[dict[str, Any]] = running.result(HUNG_S)
    return found[: len(texts)]
