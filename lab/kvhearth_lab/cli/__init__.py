"""Verbs that this package adds to ``kvhearth`` by the entry point group ``kvhearth.verbs``."""

from __future__ import annotations

import typer

BENCH_EPILOG = "Example: kvhearth bench local --quick"


def add_bench(app: typer.Typer) -> None:
    """Add ``kvhearth bench`` with its benchmarks."""
    from kvhearth_lab.cli import bench

    benches = typer.Typer(
        help="Run benchmarks, each with its own daemons.", epilog=BENCH_EPILOG, no_args_is_help=True
    )
    benches.command("local", epilog=bench.LOCAL_EPILOG)(bench.local)
    benches.command("peers", epilog=bench.PEERS_EPILOG)(bench.peers)
    benches.command("ssd", epilog=bench.SSD_EPILOG)(bench.ssd)
    benches.command("stalls", epilog=bench.STALLS_EPILOG)(bench.stalls)
    benches.command("ttft", epilog=bench.TTFT_EPILOG)(bench.ttft)
    app.add_typer(benches, name="bench")


def add_torture(app: typer.Typer) -> None:
    """Add ``kvhearth torture``."""
    from kvhearth_lab.cli import torture

    app.command("torture", epilog=torture.EPILOG)(torture.torture)


def add_hostile(app: typer.Typer) -> None:
    """Add ``kvhearth hostile``."""
    from kvhearth_lab.cli import hostile

    app.command("hostile", epilog=hostile.EPILOG)(hostile.hostile)
