"""Runs all parts of ``kvhearth bench ssd``."""

from __future__ import annotations

import asyncio
import gc
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvhearth.errors import KVHearthError, Reason
from kvhearth.version import __version__
from kvhearth_lab.bench.daemon import broken
from kvhearth_lab.bench.report import machine
from kvhearth_lab.bench.ssd.blocks import Course
from kvhearth_lab.bench.ssd.figures import Result
from kvhearth_lab.bench.ssd.peers import peers_part
from kvhearth_lab.bench.ssd.restart import adoption_part, recovery_part
from kvhearth_lab.bench.ssd.sizes import Sizes, check_room
from kvhearth_server.tiers.ssd.disk.probe import choose

_SWITCH_S = 0.0005
"""Interpreter's switch interval, as the daemon sets it."""


def run(
    folder: Path, sizes: Sizes, interface: str, peers: Mapping[str, Path | None]
) -> dict[str, Any]:
    """Measure everything on the drive of ``folder`` and return the object that the verb prints.

    Args:
        interface: auto, io_uring, libaio or threads.
        peers: interpreters of the peers' environments, by name.

    Raises:
        KVHearthError: ``config_invalid``: no room in ``folder``, or the interface does not work
            here; ``internal``: the drive or the tier failed, so that figures would mean nothing.
    """
    check_room(folder, sizes)
    try:
        name, _ = choose(interface, sizes.depth)
    except (OSError, ValueError) as error:
        raise KVHearthError(Reason.CONFIG_INVALID, f"--interface: {error}") from None
    result = Result()
    result.values |= {"version": __version__, "machine": machine(), "interface": name}
    start = time.monotonic()
    gc.freeze()  # as the daemon does
    with _own_folder(folder) as own, _switching(_SWITCH_S):
        try:
            asyncio.run(_measure(own, sizes, name, result))
            adoption_part(sizes, result)
            result.values |= peers_part(own, sizes, name, peers)
        except OSError as error:
            raise broken(str(error)) from error
    result.values["seconds"] = round(time.monotonic() - start, 1)
    return result.as_json()


async def _measure(own: Path, sizes: Sizes, interface: str, result: Result) -> None:
    await Course(own, sizes, interface, result).run()
    await recovery_part(own / "small", sizes, interface, result)


@contextmanager
def _own_folder(folder: Path) -> Iterator[Path]:
    try:
        made = tempfile.TemporaryDirectory(dir=folder, prefix="kvhearth-bench-")
    except OSError as error:
        raise KVHearthError(Reason.CONFIG_INVALID, f"--dir {folder}: {error.strerror}") from None
    with made as own:
        yield Path(own)


@contextmanager
def _switching(seconds: float) -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(seconds)
    try:
        yield
    finally:
        sys.setswitchinterval(before)
