"""Requests of more blocks than one call takes are looked up, leased, loaded and stored whole."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
from support.daemon import Daemon, running_daemon, until
from support.remote_raw import gateway
from support.scripted_engine import BLOCK_TOKENS, ScriptedEngine, scripted_engine

from kvhearth.connectors.core import scheduler
from kvhearth.contract import GroupKind, GroupSpec
from kvhearth.counters import Warnings

PAGE_BYTES = 64
GROUPS = (
    GroupSpec(GroupKind.FULL, BLOCK_TOKENS, PAGE_BYTES),
    GroupSpec(GroupKind.SLIDING_WINDOW, BLOCK_TOKENS, PAGE_BYTES, window_tokens=1000),
)


def prefill(engine: ScriptedEngine, name: str, tokens: int, chunk: int) -> None:
    """Run a new request in steps of ``chunk`` tokens; the slots of a step are there before it."""
    request = engine.add(name, "long", tokens)
    assert engine.admit(request) == 0
    engine.compute(request)
    slot_pool, need = engine.half._stores._slot_pool, chunk // BLOCK_TOKENS
    while request.num_computed_tokens < tokens:
        until(lambda: all(slot_pool.held(g) >= need for g in range(len(GROUPS))), "slots")
        engine.step({name: chunk})
        request.num_computed_tokens += chunk
    engine.finish(request)
    engine.settle()
    engine.step({})  # takes the counts of the last commits
    assert engine.counts.get("store_skipped", 0) == engine.counts.get("store_failed", 0) == 0


def load(engine: ScriptedEngine, name: str, tokens: int, last: int) -> None:
    """Load the request that ``prefill`` stored, all but its last block: a window cannot step
    back. The ``last`` blocks of each group are compared.
    """
    request = engine.add(name, "long", tokens)
    hit = tokens - BLOCK_TOKENS
    assert engine.admit(request) == hit
    assert engine.wait_loaded(request)
    end = hit // BLOCK_TOKENS
    for group in range(len(GROUPS)):
        for block in range(end - last, end):
            assert engine.holds(request, group, block)
    assert all(engine.holds(request, 0, block) for block in range(0, end, 97))
    engine.finish(request)


@contextlib.contextmanager
def reached(daemon: Daemon, *, far: bool) -> Iterator[str]:
    """Yield the URL of a daemon, or of a gateway to it."""
    if not far:
        yield daemon.url()
        return
    with gateway(daemon.socket_dir) as process:
        yield f"kvhearth://127.0.0.1:{process.port}?call_ms=10000&lookup_ms=10000"


@pytest.mark.parametrize("far", [False, True], ids=["near", "far"])
@pytest.mark.parametrize("shared_index", [True, False], ids=["mapped", "asked"])
def test_any_bound_of_keys_is_enough(shared_index: bool, far: bool) -> None:
    tokens = 1600
    settings = {"keys_max": 7 if far else 1, "shared_index": shared_index}
    with running_daemon(arena=False, **settings) as daemon:
        with (
            reached(daemon, far=far) as url,
            scripted_engine(url, groups=GROUPS, blocks=256, held_percent=90) as engine,
        ):
            prefill(engine, "a", tokens, 400)
            load(engine, "b", tokens, 62)
            client = engine.half._client
            keys = engine.half.groups.keys(engine.add("c", "long", tokens).block_hashes)
            assert all(flags.all() for flags in client.pin(keys, 60.0).pinned.values())
            found = client.prefetch(keys)
            assert all(each.present.all() for each in found.groups.values())
            client.touch(keys)
            engine.finish(engine.requests["c"])
        until(lambda: not daemon.stats().leases, "all leases are released")


def test_32_ranks_whose_extents_fill_a_message() -> None:
    """In messages of 64 KiB one call takes 45 blocks of 32 shards; a step stores 200."""
    tokens = 3200
    settings = {"memory": "256MiB", "slot_bytes_min": 4096, "message_bytes_max": "64KiB"}
    with running_daemon(arena=False, **settings) as daemon:
        with scripted_engine(
            daemon.url(), groups=GROUPS, ranks=32, blocks=512, held_percent=90, pool_tokens=3200
        ) as engine:
            prefill(engine, "a", tokens, 1600)
            load(engine, "b", tokens, 62)
        daemon.wait_quiet()


def test_what_bounds_leave_out_is_told(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "_warnings", Warnings())  # others may have warned just before
    tokens, settings = 2400, {"held_fraction_max": 0.2, "stock_fraction_max": 0.1}
    with running_daemon(arena=False, shared_index=False, keys_max=7, **settings) as daemon:
        with scripted_engine(daemon.url(), engine_id="all", held_percent=90) as engine:
            for part in (800, 1600, tokens):
                engine.run(f"a{part}", "long", part)
        with scripted_engine(daemon.url(), engine_id="some", held_percent=1) as engine:
            assert 0 < engine.run("c", "long", tokens) < tokens
            engine.run("d", "another", tokens)
            assert engine.counts["lookup_short"] == 1
            assert 0 < engine.counts["store_skipped"] < tokens // BLOCK_TOKENS
    (short,) = (line for line in caplog.messages if "lookup.short" in line)
    assert "reason=held_cap" in short
    assert "found_tokens=2400" in short
    assert any("store.skipped" in line and f"tokens={tokens}" in line for line in caplog.messages)
