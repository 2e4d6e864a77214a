"""Evaluation of the demo's three runs: checks, a table, and the same as JSON. Prints nothing."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from rich.console import Group
from rich.table import Table
from rich.text import Text

LOGITS_TOLERANCE = 1e-3
"""Largest difference of two logits that counts as rounding. Other chunk sizes alone give about
1e-5; one block of lost KV gives about 1.
"""
EFFECT_MIN = 100 * LOGITS_TOLERANCE
CHECKSUM_MISMATCH = "checksum_mismatch"

Report = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """One life of the engine: its report (see engine.py), the logits of the last position."""

    report: Report
    logits: np.ndarray[Any, Any]

    def difference(self, other: Run) -> float:
        """Return the largest absolute difference of the logits."""
        return float(np.abs(self.logits - other.logits).max())


@dataclass(frozen=True)
class Check:
    """One claim that must hold: a sentence, its outcome, and the numbers."""

    claim: str
    ok: bool
    detail: str


def checks(cold: Run, warm: Run, corrupt: Run, block_tokens: int, *, timed: bool) -> list[Check]:
    """Return all checks of the demo.

    Args:
        cold, warm, corrupt: the runs, in this order.
        block_tokens: tokens in one block.
        timed: also claim that warm is faster (a tiny model's times are mostly noise).
    """
    first, second, third = cold.report, warm.report, corrupt.report
    tokens = first["prompt_tokens"]
    full, usable = tokens // block_tokens, (tokens - 1) // block_tokens
    prefix = second["middle_block"] * block_tokens
    failed = third["load"]["failed"]
    effect = first["middle_block_effect"]
    found = [
        Check(
            "the cold engine found nothing and every full block of it was stored",
            first["hit_tokens"] == 0 and first["store"]["blocks"] == full,
            f"{first['hit_tokens']} tokens found, {first['store']['blocks']} of {full} stored",
        ),
        Check(
            "another engine process asked another run of the daemon",
            first["pid"] != second["pid"] and "" != first["boot_id"] != second["boot_id"] != "",
            f"boots {first['boot_id'][:8]} and {second['boot_id'][:8]}",
        ),
        Check(
            "the warm engine got every full block back",
            second["hit_tokens"] == usable * block_tokens and not second["load"]["failed"],
            f"{second['hit_tokens']} of {usable * block_tokens} tokens",
        ),
        Check(
            "the logits depend on the restored KV",
            effect >= EFFECT_MIN,
            f"with the KV of block {first['middle_block']} zeroed they move by {effect:.3g}",
        ),
        *_same_answer("warm", warm, cold),
        Check(
            "the corrupted block was caught, and only it",
            # The daemon may still be verifying adopted blocks, and then drops the block itself.
            failed == {CHECKSUM_MISMATCH: 1} or (not failed and third["hit_tokens"] == prefix),
            ", ".join(f"{count} {why}" for why, count in failed.items())
            or "the daemon dropped it before it was asked for",
        ),
        Check(
            "the prefix before it was used, the rest recomputed",
            third["hit_tokens"] == prefix,
            f"{third['hit_tokens']} of {prefix} tokens used, {third['computed_tokens']} computed",
        ),
        *_same_answer("corrupted", corrupt, cold),
    ]
    if timed:
        ratio = first["ttft_s"] / second["ttft_s"]
        found.append(Check("the warm answer comes sooner", ratio > 1, f"{ratio:.1f} times"))
    return found


def _same_answer(name: str, run: Run, cold: Run) -> list[Check]:
    difference = run.difference(cold)
    answer, wanted = run.report["answer"], cold.report["answer"]
    same = sum(left == right for left, right in zip(answer, wanted, strict=True))
    return [
        Check(
            f"{name}: the logits are the cold run's",
            difference <= LOGITS_TOLERANCE,
            f"largest difference {difference:.3g}, allowed {LOGITS_TOLERANCE:g}",
        ),
        Check(
            f"{name}: the greedy answer is the cold run's",
            answer == wanted,
            f"{same} of {len(wanted)} tokens equal",
        ),
    ]


def rate_gb_s(size_bytes: int, seconds: float) -> float:
    """Return GB/s (10^9 bytes), 0 where nothing moved."""
    return size_bytes / seconds / 1e9 if seconds > 0 else 0.0


def rates(report: Report) -> dict[str, float]:
    """Return GB/s each way: of the copies and checksums alone, and with all calls to the daemon."""
    load, store = report["load"], report["store"]
    return {
        "load_gb_s": rate_gb_s(load["bytes"], load["seconds"]),
        "load_copy_gb_s": rate_gb_s(load["bytes"], load["copy_seconds"]),
        "store_gb_s": rate_gb_s(store["bytes"], store["copy_seconds"] + store["call_seconds"]),
        "store_copy_gb_s": rate_gb_s(store["bytes"], store["copy_seconds"]),
    }


def _rows(runs: list[Run]) -> list[tuple[str, list[str]]]:
    reports = [run.report for run in runs]
    cold_s = reports[0]["ttft_s"]
    speeds = [rates(report) for report in reports]

    def megabytes(way: str) -> list[str]:
        return [f"{size / 1e6:.1f} MB" if (size := one[way]["bytes"]) else "-" for one in reports]

    def speed(name: str) -> list[str]:
        return [f"{one[name]:.2f} GB/s" if one[name] else "-" for one in speeds]

    def caught(report: Report) -> str:
        return str(report["load"]["failed"].get(CHECKSUM_MISMATCH, 0))

    return [
        ("prompt tokens", [f"{report['prompt_tokens']:,}" for report in reports]),
        ("  restored from KVHearth", [f"{report['hit_tokens']:,}" for report in reports]),
        ("  computed", [f"{report['computed_tokens']:,}" for report in reports]),
        ("time to first token", [f"{report['ttft_s']:.3f} s" for report in reports]),
        ("  times faster than cold", [f"{cold_s / report['ttft_s']:.1f}x" for report in reports]),
        ("KV loaded", megabytes("load")),
        ("  with lookup and checksums", speed("load_gb_s")),
        ("  copy and checksums alone", speed("load_copy_gb_s")),
        ("KV stored, beside the prefill", megabytes("store")),
        ("  with reserve, checksums, commit", speed("store_gb_s")),
        ("  copy and checksums alone", speed("store_copy_gb_s")),
        ("blocks caught by checksum", [caught(report) for report in reports]),
        ("logits, difference from cold", [f"{run.difference(runs[0]):.2g}" for run in runs]),
    ]


def render(runs: list[Run], found: list[Check]) -> Group:
    """Return the table of the runs and the list of checks."""
    table = Table(title="One prompt, three lives of the engine", title_justify="left")
    table.add_column("")
    for name in ("cold", "warm (all restarted)", "one block corrupted"):
        table.add_column(name, justify="right")
    for name, cells in _rows(runs):
        table.add_row(name, *cells)
    lines = []
    for check in found:
        mark = ("OK    ", "green") if check.ok else ("FAILED", "bold red")
        lines.append(Text.assemble(mark, f" {check.claim} ({check.detail})"))
    return Group(table, Text(), *lines)


def as_json(runs: list[Run], found: list[Check], total_s: float) -> dict[str, Any]:
    """Return the outcome for programs."""
    names = ("cold", "warm", "corrupt")
    return {
        "ok": all(check.ok for check in found),
        "checks": [asdict(check) for check in found],
        "total_s": round(total_s, 3),
        "ttft_ratio": runs[0].report["ttft_s"] / runs[1].report["ttft_s"],
        "runs": {
            name: {
                **run.report,
                **rates(run.report),
                "logits_difference": run.difference(runs[0]),
            }
            for name, run in zip(names, runs, strict=True)
        },
    }
