"""The SSD tier in tables, for ``stat`` and ``top``."""

from __future__ import annotations

from rich.progress_bar import ProgressBar
from rich.table import Table

from kvhearth.proto.v1 import admin_pb2
from kvhearth_server.cli.output import facts, percent, row, size, table

_BAR_COLUMNS = 30


def reasons(found: admin_pb2.SsdStats) -> list[str]:
    """What is not as it should be with the tier."""
    told = [reason for each in found.directories for reason in each.reasons]
    return [*told, *filter(None, [found.interface_broken])]


def state(found: admin_pb2.SsdStats) -> str:
    """How the tier is, in a few words."""
    words = ["degraded" if reasons(found) else "healthy"]
    if found.recovering:
        words.append(f"reading back {found.files_recovered} of {found.files_found} files")
    return ", ".join(words)


def summary(found: admin_pb2.SsdStats) -> Table:
    """What the tier holds, and what it is doing."""
    written, stored = found.counters["written_bytes"], found.counters["stored_bytes"]
    rows = [
        ("SSD", f"{state(found)}, by {found.interface}"),
        ("blocks on SSD", f"{found.blocks} of {size(found.live_bytes)}"),
        ("going down, up", f"{found.demoting_blocks}, {found.promoting_blocks} blocks"),
        ("requests", f"{found.queued_writes} writes, {found.queued_reads} reads"),
        ("reads take", _reads(found)),
        ("written", f"{size(written)}, {written / stored:.2f} for each byte stored")
        if stored
        else ("written", size(written)),
    ]
    if found.HasField("budget_left_bytes"):
        rows.append(("budget left", size(max(0, found.budget_left_bytes))))
    return facts([*rows, *(("degraded", reason) for reason in reasons(found))])


def directories(found: admin_pb2.SsdStats, *, bars: bool = False) -> Table:
    """One row a directory."""
    heads = ("directory", *([""] if bars else []), "files", "of", "used", "open", "sealed", "free")
    shown = table(*heads, right=heads[1:])
    for each in found.directories:
        bar = ProgressBar(
            total=each.capacity_bytes or 1, completed=each.file_bytes, width=_BAR_COLUMNS
        )
        counts = (each.segments[name] for name in ("open", "sealed", "free"))
        row(
            shown,
            each.path,
            *([bar] if bars else []),
            size(each.file_bytes),
            size(each.capacity_bytes),
            percent(each.file_bytes, each.capacity_bytes),
            *map(str, counts),
        )
    return shown


def _reads(found: admin_pb2.SsdStats) -> str:
    """Latency and rate of reads; before the first one the daemon has only its assumptions."""
    if not found.counters["loaded_blocks"]:
        return "-"
    return f"{found.read_latency_s * 1e3:.2f} ms, {size(round(found.read_bytes_per_s))}/s"
