"""Verbs that this package adds to ``kvhearth`` by the entry point group ``kvhearth.verbs``."""

from __future__ import annotations

import typer

BENCH_EPILOG = "Example: kvhearth bench local --quick"


def add_bench(app: typer.Typer) -> None:
    """Add ``kvhearth bench`` with its benchmarks."""
    from kvhearth_lab.cli import bench, bench_peers, bench_ssd, bench_stalls, bench_ttft

    benches = typer.Typer(
        help="Measure, with daemons of its own.", epilog=BENCH_EPILOG, no_args_is_help=True
    )
    benches.command("local", epilog=bench.LOCAL_EPILOG)(bench.local)
    benches.command("peers", epilog=bench_peers.EPILOG)(bench_peers.peers)
    benches.command("ssd", epilog=bench_ssd.EPILOG)(bench_ssd.ssd)
    benches.command("stalls", epilog=bench_stalls.EPILOG)(bench_stalls.stalls)
    benches.command("ttft", epilog=bench_ttft.EPILOG)(bench_ttft.ttft)
    app.add_typer(benches, name="bench")


def add_torture(app: typer.Typer) -> None:
    """Add ``kvhearth torture``."""
    from kvhearth_lab.cli import torture

    app.command("torture", epilog=torture.EPILOG)(torture.torture)
