"""``kvhearth bench ttft``: an engine's events and counters, and figures from samples.

``make bench-ttft`` measures the engines themselves.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from kvhearth_lab.bench.ttft.figures import (
    ALONE,
    COLD,
    LMCACHE,
    OURS,
    OWN,
    RESTART,
    WARM,
    Cost,
    Report,
    Sample,
    differences,
    interval,
    not_served,
)
from kvhearth_lab.bench.ttft.vllm_server import (
    Completion,
    EngineFailed,
    EventStream,
    Launch,
    ProcessTree,
    session_pids,
)

TOKENS = (7, 8)


# Events.


def cut(text: bytes, part_bytes: int) -> list[str]:
    """Returns all events of ``text``, fed in parts."""
    stream = EventStream()
    parts = (text[at : at + part_bytes] for at in range(0, len(text), part_bytes))
    return [data for part in parts for data in stream.feed(part)]


@pytest.mark.parametrize("part_bytes", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_events_are_cut_wherever_the_bytes_are(part_bytes: int, end: bytes) -> None:
    lines = [b": note", b"data: one", b"", b"event: x", b"data:two", b"data:  three", b"", b""]
    lines += ["data: vi\u00e8r".encode(), b"", b"data: open"]
    assert cut(end.join(lines) + end, part_bytes) == ["one", "two\n three", "vi\u00e8r"]


# Completions.


def event(*ids: int, **more: object) -> str:
    return json.dumps({"choices": [{"text": "", "token_ids": list(ids)}], **more})


USAGE = json.dumps({"choices": [], "usage": {"prompt_tokens_details": {"cached_tokens": 128}}})


def completion(*events: str) -> Completion:
    """A completion with one event a second; the request was sent at 10."""
    made = Completion(10.0)
    for second, data in enumerate(events, 11):
        made.take(data, float(second))
    return made


def test_the_first_token_counts_not_the_first_event() -> None:
    answer = completion(event(), event(3), event(4, 5), USAGE, "[DONE]").answer(3)
    assert (answer.ttft_s, answer.tokens, answer.cached) == (2.0, (3, 4, 5), 128)


@pytest.mark.parametrize(
    "events",
    [
        (event(3), USAGE),  # without the end of the stream
        (event(3), event(4), USAGE, "[DONE]"),  # too many tokens
        (USAGE, "[DONE]"),  # no tokens
        (event(3), "[DONE]"),  # no cache usage
    ],
)
def test_half_a_completion_is_none(events: Sequence[str]) -> None:
    with pytest.raises(EngineFailed):
        completion(*events).answer(1)


def test_only_the_connector_differs() -> None:
    bare = Launch(Path("python"), Path("mid"), "float32", 2)
    given = Launch(Path("python"), Path("mid"), "float32", 2, {"kv_role": "kv_both"})
    left = given.command(5)[len(bare.command(5)) :]
    assert given.command(5)[: len(bare.command(5))] == bare.command(5)
    assert left == ["--kv-transfer-config", '{"kv_role": "kv_both"}']


@pytest.fixture
def family(tmp_path: Path) -> Iterator[ProcessTree]:
    """A process with a child that outlives it unless both are ended."""
    child = "import time; time.sleep(60)"
    code = (
        "import subprocess, sys, time\n"
        f"child = subprocess.Popen([sys.executable, '-c', {child!r}])\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    made = ProcessTree(tmp_path / "log", [sys.executable, "-c", code], dict(os.environ))
    yield made
    made.end()


def test_a_family_is_found_and_ended(family: ProcessTree) -> None:
    for _ in range(1000):
        if family.said():
            break
        with pytest.raises(subprocess.TimeoutExpired):
            subprocess.run(["sleep", "1"], timeout=0.02, check=False)
    child = int(family.said())
    session = os.getsid(child)
    assert child in session_pids(session)
    assert len(session_pids(session)) == 2
    assert family.cpu_s() > 0
    family.end()
    assert family.ended is not None
    assert session_pids(session) == []


# Figures.


def sample(
    side: str, state: str, number: int, ttft_s: float, tokens: tuple[int, ...] = TOKENS
) -> Sample:
    cached = 0 if state == COLD else 4096
    return Sample(side, state, "4k", number, ttft_s, tokens, cached, cached)


def good_samples() -> list[Sample]:
    """Three prompts: cold in 1, 2 and 3 seconds, warm in at most a twentieth of that."""
    made = []
    for number in range(3):
        cold = number + 1.0
        times = {(ALONE, COLD): cold, (ALONE, OWN): cold / 40, (OURS, COLD): cold}
        times |= {(OURS, OWN): cold / 40, (OURS, WARM): cold / 25, (OURS, RESTART): cold / 20}
        times |= {(LMCACHE, COLD): cold, (LMCACHE, WARM): cold / 10}
        made += [sample(side, state, number, time) for (side, state), time in times.items()]
    return made


def costs(start: int = 0, more: float = 1.01, count: int = 5) -> list[Cost]:
    """Prompts of different cost; KVHearth costs ``more`` of each, the daemon a tenth."""
    made = []
    for number in range(count):
        seconds = number + 1.0
        made.append(Cost(ALONE, start, number, seconds, 0.0, 1000))
        made.append(Cost(OURS, start, number, seconds * more, seconds / 10, 1000))
    return made


def report(samples: Sequence[Sample], paid: Sequence[Cost]) -> dict[str, object]:
    return Report(["4k"], samples, paid).as_json()


def test_ratios_are_of_the_same_prompt() -> None:
    found = report(good_samples(), costs())
    wanted = {
        "cold_s_4k": 2.0,
        "engine_warm_s_4k": 0.05,
        "warm_s_4k": 0.08,
        "restart_s_4k": 0.1,
        "warm_ratio_4k": 0.04,
        "warm_of_engine_warm_4k": 1.6,
        "restart_ratio_4k": 0.05,
        "restart_of_warm_4k": 1.25,
        "peer_warm_ratio_4k": 0.1,
        "warm_of_peer_warm_4k": 0.4,
        "zero_hit_overhead": 0.01,
        "zero_hit_overhead_with_daemon": 0.11,
        "cpu_us_per_token": 3000.0,
        "identical_tokens": True,
    }
    assert {name: found[name] for name in wanted} == wanted
    assert found["spread"]["cold_s_4k"] == [1.0, 3.0]  # type: ignore[index]
    assert found["missed"] == ["restart_of_warm_4k"]
    assert found["sides"][OURS][WARM]["4k"] == [0.08, 0.04, 0.12]  # type: ignore[index]


def test_what_was_repeated_counts_once() -> None:
    again = [sample(OURS, WARM, 2, 9.0), sample(OURS, WARM, 2, 0.06)]
    found = report([*good_samples(), *again], costs())
    assert found["sides"][OURS][WARM]["4k"] == [0.08, 0.04, 0.12]  # type: ignore[index]
    assert found["warm_ratio_4k"] == 0.04


def test_one_other_token_is_seen() -> None:
    samples = [*good_samples(), sample(OURS, WARM, 3, 0.1), sample(ALONE, COLD, 3, 1.0, (7, 9))]
    assert differences(samples) == ["kvhearth warm 4k 3"]
    found = report(samples, costs())
    assert found["identical_tokens"] is False
    assert "identical_tokens" in found["missed"]  # type: ignore[operator]


def test_a_hit_that_was_not_served_is_told_and_stays() -> None:
    miss = Sample(OURS, WARM, "4k", 3, 5.0, TOKENS, 0, 4096)
    assert not_served([*good_samples(), miss]) == ["kvhearth warm 4k 3: 0 of 4096"]
    samples = [*good_samples(), miss, sample(ALONE, COLD, 3, 5.0)]
    assert report(samples, costs())["spread"]["warm_ratio_4k"] == [0.04, 1.0]  # type: ignore[index]


def test_the_interval_holds_the_median_and_narrows() -> None:
    few = [number / 10 for number in range(-5, 6)]
    low, high = interval(few)
    assert low <= 0 <= high
    closer = interval(few * 20)
    assert closer[1] - closer[0] < high - low
    assert interval(few) == [low, high]
