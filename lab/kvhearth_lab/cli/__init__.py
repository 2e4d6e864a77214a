"""Verbs that this package adds to ``kvhearth`` by the entry point group ``kvhearth.verbs``."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator
from types import FrameType

import typer

BENCH_EPILOG = "Example: kvhearth bench local --quick"
_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


def add_bench(app: typer.Typer) -> None:
    """Add ``kvhearth bench`` with its benchmarks."""
    from kvhearth_lab.cli import bench, bench_remote_tier

    benches = typer.Typer(
        help="Run benchmarks, each with its own daemons.", epilog=BENCH_EPILOG, no_args_is_help=True
    )
    benches.command("fronts", epilog=bench.FRONTS_EPILOG)(bench.fronts)
    benches.command("gpu", epilog=bench.GPU_EPILOG)(bench.gpu)
    benches.command("local", epilog=bench.LOCAL_EPILOG)(bench.local)
    benches.command("peers", epilog=bench.PEERS_EPILOG)(bench.peers)
    benches.command("remote", epilog=bench.REMOTE_EPILOG)(bench.remote)
    benches.command("remote-tier", epilog=bench_remote_tier.EPILOG)(bench_remote_tier.remote_tier)
    benches.command("scheduler", epilog=bench.SCHEDULER_EPILOG)(bench.scheduler)
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


@contextlib.contextmanager
def cleaned_up() -> Iterator[None]:
    """Make SIGTERM and SIGHUP end the block like an exception, so that nothing is left behind.

    The exit status is 128 more than the signal. Main thread only.
    """

    def ended(number: int, _: FrameType | None) -> None:
        for each in _SIGNALS:  # a second one must not interrupt the cleanup
            signal.signal(each, signal.SIG_IGN)
        sys.exit(128 + number)

    before = {each: signal.getsignal(each) for each in _SIGNALS}
    for each, handler in before.items():
        if handler is not signal.SIG_IGN:  # nohup
            signal.signal(each, ended)
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
