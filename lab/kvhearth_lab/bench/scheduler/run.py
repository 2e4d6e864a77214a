"""Runs ``kvhearth bench scheduler``: one rig a side, in turns, and a daemon."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from kvhearth.version import __version__
from kvhearth_lab.bench.daemon import broken, served
from kvhearth_lab.bench.peers.adapter import Adapter, PeerFailed
from kvhearth_lab.bench.report import Result, machine, missed, p50, steps
from kvhearth_lab.bench.scheduler.figures import FIGURES, SIDES, Sizes

PREPARE_S = 300.0
PHASE_S = 300.0
_RIG = Path(__file__).with_name("rig.py")
_BLOCK_TOKENS, _BLOCK_BYTES = 16, 4096
"""As in the rig."""
_DECODED_TOKENS = 1024
"""Room for tokens that a request decodes."""
_WARM_TOKENS = 32

Rigs = dict[str, Adapter]


def run(python: Path, sizes: Sizes, say: Callable[[str], None]) -> dict[str, Any]:
    """Measure all sides and return the object that the verb prints.

    Args:
        python: interpreter of an environment with vLLM and the client.
        sizes: sizes of the run.
        say: receives notes about the progress.

    Raises:
        KVHearthError: a rig does not work, so that figures would mean nothing.
    """
    start, books = time.monotonic(), list[str]()
    found: dict[str, Any] = {}
    for prompt in sizes.prompts:
        say(f"prompts of {prompt} tokens")
        found[str(prompt)] = _measure(python, sizes, prompt, books)
    result = Result()
    result.values = {"version": __version__, "machine": machine(), "sides": found}
    _figures(result, found, sizes)
    values = result.values
    values["seconds"] = round(time.monotonic() - start, 1)
    values["books"] = {"balanced": not books, "errors": books}
    return {**values, "spread": result.spread, "missed": missed(values, FIGURES)}


def _measure(python: Path, sizes: Sizes, prompt: int, books: list[str]) -> dict[str, Any]:
    pages = sizes.running * -(-(prompt + _DECODED_TOKENS) // _BLOCK_TOKENS) + 1024
    memory_bytes = max(2 * pages * _BLOCK_BYTES, 256 << 20)
    # In slots of the usual least size, four times as large, not all prompts would find room.
    with served(memory=memory_bytes, slot_bytes_min=_BLOCK_BYTES) as daemon:
        daemon.ready()
        try:
            with _rigs(python, sizes, daemon.client_url, pages, memory_bytes) as rigs:
                found = _turns(rigs, sizes, prompt)
        except PeerFailed as failed:
            raise broken(str(failed)) from None
        books += daemon.book_errors()
    return found


@contextlib.contextmanager
def _rigs(python: Path, sizes: Sizes, url: str, pages: int, memory_bytes: int) -> Iterator[Rigs]:
    with contextlib.ExitStack() as stack:
        rigs: Rigs = {}
        for side in SIDES:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvh-")))
            rigs[side] = Adapter([str(python), str(_RIG), str(folder)], folder)
            stack.callback(rigs[side].close)
        for side, rig in rigs.items():
            rig.ask(
                "prepare",
                PREPARE_S,
                side=side,
                url=url,
                running=sizes.running,
                pages=pages,
                memory_bytes=memory_bytes,
                forward_s=sizes.forward_s,
            )
        yield rigs


def _turns(rigs: Rigs, sizes: Sizes, prompt: int) -> dict[str, Any]:
    """Measure zero hits, decode in turns, and the same prompts again."""
    found: dict[str, dict[str, Any]] = {side: {} for side in rigs}

    def fill(phase: str) -> None:
        for side, rig in rigs.items():
            answer = rig.ask(
                "fill",
                PHASE_S,
                prompt_tokens=prompt,
                count=sizes.running,
                each_step=sizes.each_step,
            )
            found[side][phase] = _per_request(answer, sizes.running)

    fill("zero_hits")
    rounds: dict[str, list[dict[str, Any]]] = {side: [] for side in rigs}
    for number in steps(sizes.rounds, f"decode behind {prompt} tokens"):
        for side in list(rigs)[:: -1 if number % 2 else 1]:
            rounds[side].append(rigs[side].ask("decode", PHASE_S, steps=sizes.steps))
    for side, rig in rigs.items():
        found[side]["decode"] = _decode(rounds[side])
        found[side]["stored_blocks"] = rig.ask("clear", PHASE_S)["stored_blocks"]
    fill("full_hits")
    for side, rig in rigs.items():
        found[side]["full_hits"]["loads"] = rig.ask("clear", PHASE_S)["loads"]
    return found


def _per_request(answer: dict[str, Any], count: int) -> dict[str, Any]:
    return {
        "request_us": round(sum(answer["cpu_s"]) * 1e6 / count, 1),
        "connector_request_us": round(sum(answer["connector_s"]) * 1e6 / count, 1),
        "admission_us": round(sum(answer["admission_s"]) * 1e6 / count, 1),
        "deferred": round(answer["deferred"] / count, 3),
        "steps": len(answer["cpu_s"]),
    }


def _decode(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the means over all steps, and the connector's share of each round."""
    cpu = [each for one in rounds for each in one["cpu_s"]]
    inside = [each for one in rounds for each in one["connector_s"]]
    shares = []
    for one in rounds:
        total, own = sum(one["cpu_s"]), sum(one["connector_s"])
        shares.append(round(own / (total - own), 4))
    return {
        "step_us": round(sum(cpu) * 1e6 / len(cpu), 1),
        # The mean: a store every few steps is not in the median.
        "connector_us": round(sum(inside) * 1e6 / len(cpu), 1),
        "connector_max_us": round(max(inside, default=0.0) * 1e6, 1),
        "shares": shares,
    }


def _figures(result: Result, found: dict[str, Any], sizes: Sizes) -> None:
    """Derive the figures; those of decode are the worst of all lengths."""
    ours = {prompt: sides["kvhearth"] for prompt, sides in found.items()}
    worst = max(ours.values(), key=lambda one: p50(one["decode"]["shares"]))
    result.put("decode_step_share", worst["decode"]["shares"], 4)
    result.values["decode_step_added"] = round(
        max(
            sides["kvhearth"]["decode"]["step_us"] / sides["none"]["decode"]["step_us"] - 1
            for sides in found.values()
        ),
        4,
    )
    result.values["decode_vs_offloading"] = round(
        max(
            sides["kvhearth"]["decode"]["connector_us"]
            / sides["offloading"]["decode"]["connector_us"]
            for sides in found.values()
        ),
        3,
    )
    longest = ours[str(sizes.prompts[-1])]
    loads = {prompt: one["full_hits"]["loads"] for prompt, one in ours.items()}
    if min(loads.values()) < sizes.running:
        raise broken(f"not all of {sizes.running} prompts that were stored were found: {loads}")
    result.values["full_hit_admission_us"] = longest["full_hits"]["admission_us"]
    result.values["zero_hit_admission_us"] = longest["zero_hits"]["admission_us"]
    result.values["deferred_per_hit"] = max(one["full_hits"]["deferred"] for one in ours.values())
