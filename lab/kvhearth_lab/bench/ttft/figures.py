"""Sizes and figures of ``kvhearth bench ttft``: targets, computation and plot."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvhearth_lab.bench import report
from kvhearth_lab.bench.report import Figure, p50, picture, whiskers

BLOCK_TOKENS = 128
PROBE_TOKENS = 64
"""Prompt of a readiness probe: less than a block, so that it leaves nothing in a cache."""
TAIL_TOKENS = 32
"""Tokens of a prompt after its whole blocks; every side computes them, even when warm."""
MODEL = "mid"
KV_BYTES_PER_TOKEN = {"float32": 16 << 10, "bfloat16": 8 << 10}
LONGEST = "4k"


def prompt_tokens(label: str) -> int:
    """Return the tokens of a prompt that the table calls ``1k``, ``2k``, ..."""
    return int(label.removesuffix("k")) * 1024 + TAIL_TOKENS


@dataclass(frozen=True)
class Sizes:
    """Counts of one run.

    Attributes:
        lengths: prompt tokens by label; ``4k`` is among them.
        rounds: prompts of each length.
        repeats: warm requests for each prompt.
        restarts: restarts of the engines; each prompt is sent once after each.
        pairs: blocks of the zero-hit part, before and after the restarts each. All sides run twice
            in a block, in both orders, so that a drift of the machine hits all alike.
        pair_tokens: tokens of a run's prompt. vLLM's worker spins for a second after its last step,
            which would dominate the run of a short prompt.
        output_tokens: tokens of each answer.
        dtype: dtype of weights and KV.
    """

    lengths: Mapping[str, int]
    rounds: int
    repeats: int
    restarts: int
    pairs: int
    pair_tokens: int
    output_tokens: int
    dtype: str

    @property
    def memory_bytes(self) -> int:
        """Memory of a daemon: room for all repeated prompts, twice. Prompts of the zero-hit part
        may be evicted.
        """
        prompts = self.rounds * sum(self.lengths.values())
        proof = 4 * self.lengths[LONGEST]
        return 2 * (prompts + proof) * KV_BYTES_PER_TOKEN[self.dtype] + (256 << 20)


def sizes_of(*, quick: bool, dtype: str) -> Sizes:
    """Return the sizes of a run.

    Args:
        quick: True for a smoke test.
        dtype: a key of ``KV_BYTES_PER_TOKEN``.
    """
    labels = (LONGEST,) if quick else ("1k", "2k", LONGEST)
    return Sizes(
        lengths={label: prompt_tokens(label) for label in labels},
        rounds=2 if quick else 5,
        repeats=1 if quick else 3,
        restarts=1 if quick else 3,
        pairs=2 if quick else 8,
        pair_tokens=prompt_tokens("1k" if quick else "2k"),
        output_tokens=8,
        dtype=dtype,
    )


COLD, OWN, WARM, RESTART = "cold", "engine_warm", "warm", "restart"
STATES = (COLD, OWN, WARM, RESTART)
"""States of a prompt: computed; in the engine's own memory; from the daemon, with the engine's own
memory empty; from the daemon after a restart of the engine, which has answered two short prompts
since.
"""
ALONE, OURS, REMOTE, LMCACHE = "none", "kvhearth", "kvhearth_remote", "lmcache"
ZERO_HIT = "zero_hit_overhead"
_RESAMPLES = 2000
_TAIL = 0.025


@dataclass(frozen=True)
class Sample:
    """One request for one prompt.

    Attributes:
        side, state: the engine asked, and the state of the caches.
        label, number: the prompt, by its length and its round.
        ttft_s: time to the first token.
        tokens: tokens of the answer.
        cached: prompt tokens that were not computed.
        expected: number of prompt tokens that should be cached.
    """

    side: str
    state: str
    label: str
    number: int
    ttft_s: float
    tokens: tuple[int, ...]
    cached: int
    expected: int


@dataclass(frozen=True)
class Cost:
    """One run of the zero-hit part; a side has two of the same number.

    Attributes:
        side: the engine measured.
        start, number: before or after the restarts, and which block of runs.
        engine_s, daemon_s: processor seconds until both were idle again.
        tokens: tokens of its prompts and answers.
    """

    side: str
    start: int
    number: int
    engine_s: float
    daemon_s: float
    tokens: int


def figure_list(labels: Iterable[str]) -> tuple[Figure, ...]:
    """Return the rows of the table. Only 4k has targets: shorter prompts are cheap to compute."""
    rows: list[Figure] = []
    for label in labels:
        aim = label == "4k"

        def target(bound: float, aim: bool = aim) -> tuple[str, float]:
            return ("<=", bound) if aim else ("", 0.0)

        rows += [
            Figure(f"cold_s_{label}", "no connector, computed"),
            Figure(f"engine_warm_s_{label}", "no connector, from the engine's own memory"),
            Figure(f"warm_s_{label}", "from KVHearth"),
            Figure(f"restart_s_{label}", "from KVHearth, the engine restarted"),
            Figure(f"warm_ratio_{label}", "warm of cold", *target(0.05)),
            Figure(f"warm_of_engine_warm_{label}", "warm of engine_warm", *target(2.0)),
            Figure(f"restart_ratio_{label}", "restart of cold"),
            Figure(f"restart_of_warm_{label}", "restart of warm", *target(1.2)),
            Figure(f"remote_warm_s_{label}", "from KVHearth over TCP"),
            Figure(f"remote_of_warm_{label}", "that of warm", *target(1.3)),
            Figure(f"peer_warm_s_{label}", "from LMCache"),
            Figure(f"peer_warm_ratio_{label}", "that of cold"),
            Figure(f"peer_restart_ratio_{label}", "the same, the engine restarted"),
            Figure(f"peer_restart_of_warm_{label}", "LMCache's restart of its warm"),
            Figure(f"warm_of_peer_warm_{label}", "KVHearth's warm of LMCache's", *target(1.0)),
        ]
    rows += [
        Figure(ZERO_HIT, "engine's CPU time for what no cache has, connector on : off", "<=", 0.02),
        Figure(f"{ZERO_HIT}_with_daemon", "the same, the daemon's CPU time added"),
        Figure(f"peer_{ZERO_HIT}", "engine's CPU time with LMCache's connector"),
        Figure(f"peer_{ZERO_HIT}_with_daemon", "the same, its daemon's CPU time added"),
        Figure("cpu_us_per_token", "engine's CPU time without a connector"),
    ]
    return tuple(rows)


class Report:
    """Figures with their spread, from samples and costs.

    Args:
        labels: labels of the lengths.
        samples, costs: measurements.
    """

    def __init__(
        self, labels: Sequence[str], samples: Sequence[Sample], costs: Sequence[Cost]
    ) -> None:
        self._labels = labels
        self._samples = samples
        self._costs = costs
        self._values: dict[str, Any] = {}
        self._spread: dict[str, list[float]] = {}

    def as_json(self) -> dict[str, Any]:
        """Return the object that the verb prints, without the description of the machine."""
        for label in self._labels:
            self._of_length(label)
        self._zero_hit(OURS, "")
        self._zero_hit(LMCACHE, "peer_")
        alone = [each for each in self._costs if each.side == ALONE]
        self._put("cpu_us_per_token", [each.engine_s / each.tokens * 1e6 for each in alone])
        differing = differences(self._samples)
        values = {**self._values, "identical_tokens": bool(self._samples) and not differing}
        return {
            **values,
            "differing": differing,
            "not_served": not_served(self._samples),
            "sides": self._by_side(),
            "spread": self._spread,
            "missed": missed(values, figure_list(self._labels)),
        }

    def _of_length(self, label: str) -> None:
        cold, own = self._times(ALONE, COLD, label), self._times(ALONE, OWN, label)
        warm, restart = self._times(OURS, WARM, label), self._times(OURS, RESTART, label)
        remote = self._times(REMOTE, WARM, label)
        peer = self._times(LMCACHE, WARM, label)
        peer_restart = self._times(LMCACHE, RESTART, label)
        times = {"cold_s": cold, "engine_warm_s": own, "warm_s": warm, "restart_s": restart}
        for name, found in {**times, "remote_warm_s": remote, "peer_warm_s": peer}.items():
            self._put(f"{name}_{label}", list(found.values()))
        ratios = {
            "warm_ratio": (warm, cold),
            "warm_of_engine_warm": (warm, own),
            "restart_ratio": (restart, cold),
            "restart_of_warm": (restart, warm),
            "remote_of_warm": (remote, warm),
            "peer_warm_ratio": (peer, cold),
            "peer_restart_ratio": (peer_restart, cold),
            "peer_restart_of_warm": (peer_restart, peer),
            "warm_of_peer_warm": (warm, peer),
        }
        for name, (over, under) in ratios.items():
            self._put(f"{name}_{label}", by_prompt(over, under))

    def _zero_hit(self, side: str, prefix: str) -> None:
        bare = overheads(self._costs, side, with_daemon=False)
        self._put(f"{prefix}{ZERO_HIT}", bare)
        whole = overheads(self._costs, side, with_daemon=True)
        self._put(f"{prefix}{ZERO_HIT}_with_daemon", whole)
        if bare:
            self._values[f"{prefix}{ZERO_HIT}_interval"] = interval(bare)
            starts = sorted({each.start for each in self._costs})
            parts = [[each for each in self._costs if each.start == start] for start in starts]
            per_start = [overheads(part, side, with_daemon=False) for part in parts]
            self._values[f"{prefix}{ZERO_HIT}_by_start"] = [
                round(p50(part), 4) for part in per_start if part
            ]

    def _by_side(self) -> dict[str, Any]:
        """Return median, minimum and maximum in seconds, by side, state and length."""
        made: dict[str, Any] = {}
        for side in dict.fromkeys(each.side for each in self._samples):
            for state in STATES:
                for label in self._labels:
                    times = list(self._times(side, state, label).values())
                    if times:
                        shown = [round(time, 4) for time in (p50(times), min(times), max(times))]
                        made.setdefault(side, {}).setdefault(state, {})[label] = shown
        return made

    def _times(self, side: str, state: str, label: str) -> dict[int, float]:
        """Return the seconds by prompt; the median of repeated requests."""
        found: dict[int, list[float]] = {}
        for each in self._samples:
            if (each.side, each.state, each.label) == (side, state, label):
                found.setdefault(each.number, []).append(each.ttft_s)
        return {number: p50(times) for number, times in found.items()}

    def _put(self, name: str, found: Sequence[float]) -> None:
        if found:
            self._values[name] = round(p50(found), 4)
            self._spread[name] = [round(min(found), 4), round(max(found), 4)]


def by_prompt(over: Mapping[int, float], under: Mapping[int, float]) -> list[float]:
    """Return the ratios for prompts that both have."""
    return [time / under[number] for number, time in over.items() if number in under]


def overheads(costs: Sequence[Cost], side: str, *, with_daemon: bool) -> list[float]:
    """Return, for each block of runs, the side's processor time per token divided by that of the
    engine alone, minus 1.
    """
    found: dict[str, dict[tuple[int, int], tuple[float, int]]] = {}
    for each in costs:
        blocks = found.setdefault(each.side, {})
        seconds, tokens = blocks.get((each.start, each.number), (0.0, 0))
        seconds += each.engine_s + (each.daemon_s if with_daemon else 0.0)
        blocks[each.start, each.number] = seconds, tokens + each.tokens
    alone = found.get(ALONE, {})
    return [
        (seconds / tokens) / (alone[block][0] / alone[block][1]) - 1.0
        for block, (seconds, tokens) in found.get(side, {}).items()
        if block in alone
    ]


def interval(samples: Sequence[float]) -> list[float]:
    """Return the 95 % interval of the median by resampling; deterministic for the same samples."""
    source = random.Random(len(samples))
    medians = sorted(p50(source.choices(samples, k=len(samples))) for _ in range(_RESAMPLES))
    cut = int(_TAIL * _RESAMPLES)
    return [round(medians[cut], 4), round(medians[-1 - cut], 4)]


def differences(samples: Sequence[Sample]) -> list[str]:
    """Return the answers that differ from those of the engine alone for the same prompt."""
    expected = {
        (each.label, each.number): each.tokens
        for each in samples
        if (each.side, each.state) == (ALONE, COLD)
    }
    return [
        f"{each.side} {each.state} {each.label} {each.number}"
        for each in samples
        if each.tokens != expected.get((each.label, each.number))
    ]


def not_served(samples: Iterable[Sample]) -> list[str]:
    """Return requests with another number of cached tokens than expected; they stay among the
    samples.
    """
    return [
        f"{each.side} {each.state} {each.label} {each.number}: {each.cached} of {each.expected}"
        for each in samples
        if each.cached != each.expected
    ]


def missed(values: Mapping[str, Any], rows: Iterable[Figure]) -> list[str]:
    """Return the names of the figures that do not reach their target."""
    names = report.missed(values, rows)
    return names if values.get("identical_tokens") else [*names, "identical_tokens"]


_BARS = (
    ("none", "cold", "computed", "tab:grey"),
    ("none", "engine_warm", "engine's own memory", "tab:green"),
    ("kvhearth", "warm", "KVHearth", "tab:orange"),
    ("kvhearth", "restart", "KVHearth, engine restarted", "tab:red"),
    ("kvhearth_remote", "warm", "KVHearth over TCP", "tab:olive"),
    ("lmcache", "warm", "LMCache", "tab:blue"),
    ("lmcache", "restart", "LMCache, engine restarted", "tab:cyan"),
)


def draw(found: Mapping[str, Any], path: Path) -> None:
    """Write the plot: TTFT by prompt length, and the overhead without a hit; raises as
    ``picture``.
    """
    labels = list(found["sizes"]["prompt_tokens"])
    with picture(path, 12, 5, width_ratios=(3, 1)) as (times, costs):
        known = [bar for bar in _BARS if bar[1] in found["sides"].get(bar[0], {})]
        for place, (side, state, title, colour) in enumerate(known):
            values = found["sides"][side][state]
            at = [labels.index(label) + (place + 0.5) / (len(known) + 1) for label in values]
            middle = [value[0] for value in values.values()]
            low = [value[0] - value[1] for value in values.values()]
            high = [value[2] - value[0] for value in values.values()]
            width = 0.9 / (len(known) + 1)
            times.bar(
                at, middle, width, yerr=[low, high], color=colour, label=title, ecolor="black"
            )
        times.set_yscale("log")
        times.set_xticks([place + 0.4 for place in range(len(labels))], labels)
        times.set_title(f"seconds to the first token, {found['sizes']['model']} model")
        times.legend()
        names = [name for name in (ZERO_HIT, f"peer_{ZERO_HIT}") if name in found]
        shown = [100 * found[name] for name in names]
        reach = [[100 * edge for edge in found[f"{name}_interval"]] for name in names]
        errors = whiskers(shown, reach)
        costs.bar(
            ["LMCache" if "peer" in name else "KVHearth" for name in names], shown, yerr=errors
        )
        costs.axhline(2.0, color="black")
        costs.set_title("% more CPU time without a hit\n(line: target, whisker: 95 %)")
