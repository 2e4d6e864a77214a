"""The miss-ratio curve of a live daemon: each lookup counted once, by whatever way it comes."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.daemon import Daemon, running_daemon, until
from support.http_door import ANY_PORT, ask, scraped
from support.raw_door import new_keys

from kvhearth import native
from kvhearth.contract import namespace_digest
from kvhearth_lab.harness.engine import Engine, contract_of, engine_of
from kvhearth_server.cli import app

PAGE = 64 << 10
BLOCKS = (16 << 20) // PAGE
"""Blocks that fit into the small daemon's memory."""


@contextlib.contextmanager
def attached(daemon: Daemon, name: str = "e", model: str = "m") -> Iterator[Engine]:
    with engine_of(daemon.url(), contract_of(PAGE, model=model), name) as engine:
        engine.wait_ready()
        yield engine


def curve(daemon: Daemon, namespace: str = "all") -> Any:
    """A curve of the daemon; None if it has none of this name."""
    found = {each.namespace: each for each in daemon.stats(check_books=False).curves}
    return found.get(namespace)


def wait_asked(daemon: Daemon, keys: int, namespace: str = "all") -> Any:
    """The curve once so many keys have been counted."""
    until(lambda: (curve(daemon, namespace) or _NONE).asked_keys >= keys, f"{keys} keys asked")
    return curve(daemon, namespace)


class _NONE:
    asked_keys = 0


@pytest.mark.parametrize("mapped", [True, False], ids=["index", "calls"])
def test_each_lookup_counts_once(mapped: bool) -> None:
    if mapped and native.available() is not None:
        pytest.skip("no native module")
    with running_daemon(arena=False, shared_index=mapped) as daemon, attached(daemon) as engine:
        keys = new_keys(20)
        assert engine.store(keys).bound == keys
        for _ in range(10):
            found = engine.client.lookup({0: keys})
            assert found.hit_tokens == 20 * 16
            assert found.lease is not None
            engine.client.release(found.lease)
        assert engine.client.lookup({0: new_keys(7)}).hit_tokens == 0
        engine.client.lookup({0: keys[:1]})
        wait_asked(daemon, 208)
        until(lambda: daemon.counters()["lookup_keys"] == 208, "the daemon counts the same")
        one = curve(daemon)
        assert one.asked_keys == 208
        # All hits came after the store, within 27 blocks of it.
        assert one.memory[1].hit_ratio == pytest.approx(201 / 208, abs=0.001)


@pytest.mark.parametrize("mapped", [True, False], ids=["index", "calls"])
def test_a_loop_that_does_not_fit_wants_more_memory(mapped: bool) -> None:
    with running_daemon(arena=False, shared_index=mapped) as daemon, attached(daemon) as engine:
        chains = [new_keys(BLOCKS // 8) for _ in range(12)]  # one and a half times the memory
        for turn, chain in enumerate(4 * chains):
            found = engine.client.lookup({0: chain})
            if found.lease is not None:
                engine.client.release(found.lease)
            wait_asked(daemon, (turn + 1) * len(chain))  # with the index, lookups are posted
            engine.store(chain)
        one = curve(daemon)
        assert [each.hit_ratio for each in one.memory] == [0, 0, 0.75, 0.75]
        assert [each.bytes for each in one.memory] == [8 << 20, 16 << 20, 32 << 20, 64 << 20]
        assert not one.ssd


def test_namespaces_have_curves_of_their_own_and_the_rest_share_one() -> None:
    with running_daemon(arena=False) as daemon:
        keys = new_keys(4)
        for number in range(18):
            with attached(daemon, f"e{number}", model=f"m{number}") as engine:
                engine.store(keys)
                engine.client.lookup({0: keys})
        wait_asked(daemon, 4 * 18)
        names = [each.namespace for each in daemon.stats().curves]
        assert names[0] == "all"
        assert names[-1] == "other"
        assert len(names) == 1 + 16 + 1
        digest = namespace_digest("default", contract_of(PAGE, model="m3")).hex()
        assert curve(daemon, digest[:12]).asked_keys == 4
        assert curve(daemon, "other").asked_keys == 8


def test_lookups_repeated_while_blocks_are_promoted_count_once(tmp_path: Path) -> None:
    with (
        running_daemon(arena=False, ssd_dirs=f"{tmp_path}=300MiB") as daemon,
        attached(daemon) as engine,
    ):
        chains = [new_keys(BLOCKS // 4) for _ in range(8)]
        for chain in chains:
            engine.store(chain)
            until(lambda: not daemon.stats(check_books=False).ssd.demoting_blocks)
        asked = 0
        for chain in chains[:2]:
            looks = 0
            while True:
                found = engine.client.lookup({0: chain}, prefetch=True)
                looks += 1
                if found.hit_tokens == len(chain) * 16:
                    break
                if found.lease is not None:
                    engine.client.release(found.lease)
            assert looks > 1
            asked += len(chain)
        one = wait_asked(daemon, asked)
        until(lambda: daemon.counters()["lookup_keys"] > asked)
        assert curve(daemon).asked_keys == asked
        assert one.ssd_bytes > 200 << 20
        assert one.ssd[1].hit_ratio == pytest.approx(1, abs=0.01)


def test_the_curve_in_http_metrics_and_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    with running_daemon(arena=False, http=ANY_PORT) as daemon:
        folder = ["--socket-dir", str(daemon.socket_dir)]
        assert app.run(["mrc", *folder]) == 0
        assert "nobody has looked anything up yet" in capsys.readouterr().err
        with attached(daemon) as engine:
            keys = new_keys(20)
            engine.store(keys)
            for _ in range(5):
                engine.client.lookup({0: keys})
            wait_asked(daemon, 100)
        stats = ask(daemon, "/v1/stats").json
        assert [each["factor"] for each in stats["curves"][0]["memory"]] == [0.5, 1, 2, 4]
        text = scraped(daemon)
        labels = 'factor="2",namespace="all",tenant="default",tier="memory"'
        (line,) = [
            line
            for line in text.splitlines()
            if line.startswith("kvhearth_capacity_hit_ratio{") and _labels(line) == labels
        ]
        assert float(line.rpartition(" ")[2]) == pytest.approx(1)
        assert app.run(["mrc", "--json", *folder]) == 0
        found = json.loads(capsys.readouterr().out)["curves"]
        assert found[0]["asked_keys"] == 100
        assert found[0]["memory"][2]["hit_ratio"] == pytest.approx(1)
        assert app.run(["mrc", *folder]) == 0
        shown = capsys.readouterr().out
        assert re.search(r"default +all +100 +memory +16 MiB( +[0-9.]+ %){4}", shown), shown
        assert "too few to trust" in shown
        assert app.run(["mrc", "--namespace", "zz", *folder]) == 1


def _labels(line: str) -> str:
    return ",".join(sorted(line.partition("{")[2].partition("}")[0].split(",")))
