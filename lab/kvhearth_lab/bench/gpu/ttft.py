"""Time to the first token of long prompts: computed, and loaded in a fresh process.

One process computes each prompt, stores its KV, and takes one step; another one looks the prompt
up, loads it and takes the same step. The logits of both steps must be equal.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from kvhearth_lab.bench.daemon import broken, served
from kvhearth_lab.bench.gpu.bare_arena import spare_bytes
from kvhearth_lab.bench.gpu.llama import LLAMA_8B, TINY, Geometry
from kvhearth_lab.bench.gpu.stage import Stage
from kvhearth_lab.harness.daemon import clean_environment, module

ENGINE = "kvhearth_lab.bench.gpu.ttft_engine"
COLD, WARM = "cold", "warm"
BLOCK_TOKENS = 16
_SLAB_BYTES = 64 << 20
_END_S = 5.0


@dataclass(frozen=True)
class Sizes:
    """Prompts of one run.

    Attributes:
        geometry: dimensions of the model.
        prompt_tokens: lengths of the prompts, shortest first; each a multiple of ``BLOCK_TOKENS``.
        target_tokens: length whose ratio has the target.
        repeats: loads of each prompt; the first one counts.
    """

    geometry: Geometry
    prompt_tokens: tuple[int, ...]
    target_tokens: int
    repeats: int


FULL = Sizes(LLAMA_8B, (2048, 4096, 8192, 16384, 32768), 16384, repeats=3)
QUICK = Sizes(LLAMA_8B, (2048, 16384), 16384, repeats=1)
REHEARSAL = Sizes(TINY, (64, 128), 128, repeats=1)


def fitting(sizes: Sizes, memory_bytes: int, left_out: dict[str, str]) -> tuple[int, ...]:
    """Return the lengths whose KV fits into ``memory_bytes``; the reasons of the others go to
    ``left_out``.
    """
    kept: list[int] = []
    used = 0
    for tokens in sizes.prompt_tokens:
        need = tokens * sizes.geometry.token_bytes
        if used + need > memory_bytes:
            left_out[str(tokens)] = f"its KV of {need >> 20} MiB does not fit into memory"
            continue
        used += need
        kept.append(tokens)
    return tuple(kept)


def measure(
    stage: Stage,
    sizes: Sizes,
    left_s: Callable[[], float],
    say: Callable[[Mapping[str, Any]], None] = lambda _: None,
    *,
    plain: bool = False,
) -> dict[str, Any]:
    """Run both processes; ``say`` is called with the results so far.

    Args:
        plain: use the model of plain torch although transformers is installed.

    Returns:
        ``model``, ``rows`` by length, ``left_out`` with reasons, and ``figures``.

    Raises:
        KVHearthError: a process failed, or no time was left before the first prompt was loaded.
    """
    found: dict[str, Any] = {"rows": {}, "left_out": {}, "figures": {}}
    lengths = fitting(sizes, spare_bytes(), found["left_out"])
    memory_bytes = sum(lengths) * sizes.geometry.token_bytes + 4 * _SLAB_BYTES
    starter = module("kvhearth_server", "serve")
    with served(starter, memory=str(memory_bytes)) as daemon:
        daemon.ready()
        runs = {}
        with tempfile.TemporaryDirectory(prefix="kvh-") as folder:
            for role in (COLD, WARM):
                job = {
                    "role": role,
                    "url": daemon.client_url,
                    "device": stage.device,
                    "geometry": asdict(sizes.geometry),
                    "prompt_tokens": lengths,
                    "repeats": sizes.repeats,
                    "plain": plain,
                    "folder": folder,
                }
                runs[role] = _engine(job, left_s() * (0.6 if role == COLD else 1.0))
                found[role] = runs[role]
                say(found)
            found["model"] = runs[COLD].get("model", "")
            found["rows"] = rows_of(runs[COLD], runs[WARM], Path(folder))
    found["figures"] = figures_of(found["rows"], sizes)
    say(found)
    return found


def _engine(job: dict[str, Any], seconds: float) -> dict[str, Any]:
    """Run one engine and return its report; a late one is killed, and its lines so far count."""
    command = [sys.executable, "-m", ENGINE, json.dumps(job), str(os.getpid())]
    began_s = time.monotonic()
    text = partial(tempfile.TemporaryFile, "w+", encoding="utf-8")
    with text() as out, text() as errors:
        child = subprocess.Popen(command, stdout=out, stderr=errors, env=clean_environment())
        try:
            code: int | str = child.wait(max(seconds, _END_S))
        except subprocess.TimeoutExpired:
            code = "late"
        finally:
            child.kill()
            child.wait()
        out.seek(0)
        report: dict[str, Any] = {"rows": {}}
        for line in out.read().splitlines():
            said = json.loads(line) if line.startswith("{") else {}
            report["rows"].update(said.pop("rows", {}))
            report.update(said)
        report["seconds"] = round(time.monotonic() - began_s, 1)
        if code == "late" and report["rows"]:
            report["cut"] = f"killed after {report['seconds']} s"
        elif code:
            errors.seek(0)
            raise broken(f"the {job['role']} engine ended with {code}: {errors.read()[-1500:]}")
        return report


def rows_of(
    cold: Mapping[str, Any], warm: Mapping[str, Any], folder: Path
) -> dict[str, dict[str, Any]]:
    """Return the lengths that both processes ran, with ratios and the difference of logits."""
    rows = {}
    for name, computed in cold["rows"].items():
        loaded = warm["rows"].get(name)
        if loaded is None:
            continue
        pair = [np.load(folder / f"{role}-{name}.npy") for role in (COLD, WARM)]
        rows[name] = {
            **computed,
            **loaded,
            "ratio": round(loaded["warm_s"] / computed["cold_s"], 4),
            "logit_diff_max": float(np.abs(pair[0] - pair[1]).max()),
            "same_token": bool(pair[0].argmax() == pair[1].argmax()),
        }
    return rows


def figures_of(rows: Mapping[str, Mapping[str, Any]], sizes: Sizes) -> dict[str, float]:
    """Return the figures that have targets."""
    figures = {}
    if rows:
        figures["ttft_logit_diff_max"] = max(float(row["logit_diff_max"]) for row in rows.values())
    target = rows.get(str(sizes.target_tokens))
    if target is not None:
        figures["ttft_16k_ratio"] = float(target["ratio"])
    return figures
