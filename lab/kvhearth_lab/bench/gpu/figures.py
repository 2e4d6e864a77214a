"""Figures of the measurements on a GPU, and their targets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvhearth_lab.bench.report import Figure, missed, picture

BENCH_FIGURES = (
    Figure("load_block_2mib_ratio", "GB/s of loads of 2 MiB blocks over pinned copies", ">=", 0.95),
    Figure("store_block_2mib_ratio", "the same for stores", ">=", 0.95),
    Figure("load_layer_64kib_ratio", "loads of layer-major fragments of 64 KiB", ">=", 0.9),
    Figure("store_layer_64kib_ratio", "the same for stores", ">=", 0.9),
    Figure("load_mla_ratio", "loads of MLA pages, 61 fragments of 18 KiB", ">=", 0.8),
    Figure("store_mla_ratio", "the same for stores", ">=", 0.8),
    Figure("load_tp8_ratio", "loads of shards of 8 ranks, 80 fragments of 8 KiB", ">=", 0.8),
    Figure("store_tp8_ratio", "the same for stores", ">=", 0.8),
    Figure("both_block_2mib_ratio", "2 MiB blocks in both directions over both pinned copies"),
    Figure("host_us_block", "processor time of the process, µs a block of a load", "<=", 2.0),
    Figure("main_us_block", "calling thread's time, µs a further block of a load", "<=", 0.05),
    Figure("ttft_16k_ratio", "time to the first token of 16k tokens, loaded / cold", "<=", 0.05),
    Figure("ttft_logit_diff_max", "largest difference of logits, loaded against cold", "<=", 0.0),
)
"""Figures of ``kvhearth bench gpu``."""

RUN_FIGURES = (
    Figure("correctness_failures", "checks of copied bytes that failed", "<=", 0),
    *BENCH_FIGURES,
    Figure("verify_all_ratio", "loads with every block verified over pinned copies", ">=", 0.9),
    Figure("decode_idle_p50_ratio", "inter-token p50, idle connector / none", "<=", 1.03),
    Figure("decode_busy_p50_ratio", "inter-token p50, both ways busy / none", "<=", 1.03),
    Figure("decode_busy_p99_ratio", "inter-token p99, both ways busy / none", "<=", 1.10),
    Figure("register_64gib_start_s", "delay of an engine's start by 64 GiB, in s", "<=", 2.0),
    Figure("register_s_per_gib", "registration in the background, in s a GiB"),
    Figure("fault_failures", "checks under faults that failed", "<=", 0),
    Figure("reregistered_s", "from a daemon's restart to a registered arena, in s"),
)
"""Figures of ``lab/gpu/run.py``."""


def judged(values: Mapping[str, Any], figures: Sequence[Figure]) -> dict[str, Any]:
    """Return ``table`` (name, value, target, what), ``missed`` and ``not_measured``."""
    rows = [
        {
            "name": each.name,
            "value": values.get(each.name),
            "target": each.target,
            "ok": each.good(values.get(each.name)),
            "what": each.what,
        }
        for each in figures
    ]
    absent = [each.name for each in figures if each.sign and values.get(each.name) is None]
    return {"table": rows, "missed": missed(values, figures), "not_measured": absent}


def draw(found: Mapping[str, Any], path: Path) -> None:
    """Draw GB/s by page size, and cold against loaded prompts.

    Raises:
        KVHearthError: ``config_invalid``: the file cannot be written.
    """
    rows = [row for row in found["bandwidth"]["rows"] if row["scattered"]]
    with picture(path, 11, 4) as (left, right):
        for method in sorted({row["method"] for row in rows}):
            for direction in ("store", "load"):
                mine = _best(row for row in rows if _is(row, method, direction))
                left.plot(list(mine), list(mine.values()), "o-", label=f"{direction}, {method}")
        left.set(xscale="log", xlabel="bytes of a page", ylabel="GB/s", title="scattered blocks")
        left.legend()
        prompts = found["ttft"]["rows"]
        for name in ("cold_s", "warm_s"):
            values = [row[name] for row in prompts.values()]
            right.plot([int(tokens) for tokens in prompts], values, "o-", label=name)
        right.set(xscale="log", yscale="log", xlabel="tokens", ylabel="s", title="first token")
        right.legend()


def _is(row: Mapping[str, Any], method: str, direction: str) -> bool:
    return bool(row["method"] == method and row["direction"] == direction)


def _best(rows: Iterable[Mapping[str, Any]]) -> dict[int, float]:
    """Return the greatest GB/s by page size, in the order of sizes."""
    best: dict[int, float] = {}
    for row in rows:
        size = int(row["page_bytes"])
        best[size] = max(best.get(size, 0.0), float(row["gbs"]))
    return dict(sorted(best.items()))
