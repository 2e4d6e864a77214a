"""KV that survives a tool call: requests ask to have their blocks kept, or fetched."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from engines.harness import arguments, connector, running_engine
from engines.kit import (
    BLOCK_TOKENS,
    Reference,
    prompt,
    same,
    wait_attached,
    wait_settled,
    warm,
    whole_blocks,
)
from engines.serving import running_server, served
from support.daemon import running_daemon, until

LENGTH = 1000
BLOCKS = LENGTH // BLOCK_TOKENS
FLOOD = 24
"""Prompts of 7 blocks of 512 KiB: more than the memory of 64 MiB holds."""


def test_a_retained_prompt_outlives_a_flood(logs: Path, reference: Reference) -> None:
    """By its own parameter, or by an orchestrator's actions, of which one is unknown."""
    kept, control, pinned = (prompt(each, LENGTH) for each in ("kept", "control", "pinned"))
    actions = {"retain": {"ttl_s": 600}, "compress": {}}
    with running_daemon(memory="64MiB") as daemon:
        over = arguments(kv_transfer_config=connector(daemon))
        with running_engine(logs, **over) as engine:
            wait_attached(daemon)
            engine.one(kept, transfer={"kvhearth_retain_s": 600})
            engine.one(pinned, actions=actions)
            engine.one(control)
            until(lambda: daemon.stats().retained_blocks == 2 * BLOCKS, "they are kept")
            for number in range(FLOOD):
                engine.one(prompt(f"flood {number}", LENGTH))
                wait_settled(daemon)
            late = warm(engine, control)
            found = warm(engine, kept)
            print(
                f"TTFT {found['ttft_s']:.3f} s of the kept prompt, {late['ttft_s']:.3f} s without"
            )
            assert (found["cached"], late["cached"]) == (whole_blocks(LENGTH), 0)
            same(found, reference.answer(kept), "kept")
            assert warm(engine, pinned)["cached"] == whole_blocks(LENGTH)
            assert daemon.counters()["retained_hit_blocks"] >= 2 * (BLOCKS - 1)
            assert daemon.stats().retained_blocks == 2 * BLOCKS, "no session has gone on"
            assert engine.metric("vllm:kvhearth_hints_refused") == 1


def test_a_session_that_goes_on_ends_its_pin(logs: Path) -> None:
    """Over HTTP, as an agent sends it."""
    text, hint = prompt("session", LENGTH), {"kvhearth_retain_s": 600}
    with (
        running_daemon(memory="64MiB") as daemon,
        running_server(logs, **served(daemon, connector(daemon))) as server,
    ):
        wait_attached(daemon)
        server.complete(text, session_id="agent-7", kv_transfer_params=hint)
        until(lambda: daemon.stats().retained_blocks == BLOCKS, "they are kept")
        server.complete(text, session_id="agent-8")
        wait_settled(daemon)
        assert daemon.stats().retained_blocks == BLOCKS, "that was another session"
        server.reset()
        found = server.complete([*text, *prompt("next turn", 100)], session_id="agent-7")
        assert found["cached"] == whole_blocks(LENGTH)
        until(lambda: not daemon.stats().retained_blocks, "the pin has ended")
        assert daemon.counters()["retained_hit_blocks"] >= BLOCKS - 1


@pytest.mark.parametrize("wrong", [-1, 1e7, math.nan, "600"])
def test_a_hint_that_cannot_be_met_changes_no_answer(
    logs: Path, reference: Reference, wrong: object
) -> None:
    text = prompt(f"hint {wrong}", LENGTH)
    with (
        running_daemon(memory="64MiB") as daemon,
        running_engine(logs, **arguments(kv_transfer_config=connector(daemon))) as engine,
    ):
        wait_attached(daemon)
        hints = {"kvhearth_retain_s": wrong, "kvhearth_prefetch": True}
        same(engine.one(text, transfer=hints), reference.answer(text), "first")
        wait_settled(daemon)
        same(warm(engine, text), reference.answer(text), "again")
        names = ("vllm:kvhearth_hints_refused", "vllm:kvhearth_retain_refused")
        until(lambda: any(engine.metric(name) for name in names), "it is counted")
        assert not daemon.stats().retained_blocks


def test_a_prefetched_prompt_is_in_memory_before_its_turn(
    tmp_path: Path, logs: Path, reference: Reference
) -> None:
    """By a request for one token, as an agent can send it while its tool runs."""
    text = prompt("fetched", LENGTH)
    options = {"ssd_dirs": [f"{tmp_path}/ssd=256MiB"], "ssd_segment_bytes": "2MiB"}
    with running_daemon(memory="64MiB", **options) as daemon:
        flag = connector(daemon, promotion_wait_ms=60_000)
        with running_engine(logs, **arguments(kv_transfer_config=flag)) as engine:
            wait_attached(daemon)
            engine.one(text)
            until(lambda: daemon.counters()["demoted_blocks"] >= BLOCKS, "it is saved")
            (space,) = daemon.operator().namespaces().namespaces
            daemon.operator().evict(space.namespace, 0, "memory")
            engine.reset()
            engine.one(text, tokens=1, transfer={"kvhearth_prefetch": True})
            assert daemon.counters()["promoted_blocks"] >= BLOCKS - 1
            found = engine.one(text)
            assert found["cached"] == whole_blocks(LENGTH)
            same(found, reference.answer(text), "fetched")
