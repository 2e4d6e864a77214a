"""A daemon with a watched loop: ``python -m kvhearth_lab.bench.stalls.watched_daemon``.

It is the real daemon, except that its slots are smaller than a page, so that millions of them fit
into this machine's memory.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from kvhearth_lab.bench.stalls.loop_watch import LoopWatch, WatchFile
from kvhearth_lab.bench.stalls.sizes import SLAB_BYTES, SLOT_BYTES
from kvhearth_server.config.load import load_settings
from kvhearth_server.core.slot_table import Geometry
from kvhearth_server.memory.mapping import HugepagePolicy
from kvhearth_server.memory.plan import ArenaPlan
from kvhearth_server.observability import logs


def main(watch: str, slabs: str, *flags: str) -> int:
    """Serve until SIGTERM.

    Args:
        watch: file for the loop's times.
        slabs: size of the arena.
        flags: flags of ``kvhearth serve``, each followed by its value.
    """
    names = [flag.removeprefix("--").replace("-", "_") for flag in flags[::2]]
    settings = load_settings(dict(zip(names, flags[1::2], strict=True)))
    logs.configure(settings.log_level, settings.log_format)
    tenant = settings.effective_tenants(os.getuid())[0].name
    geometry = Geometry.of([(tenant, int(slabs) * SLAB_BYTES)], SLAB_BYTES, SLOT_BYTES)
    LoopWatch(WatchFile(Path(watch))).install()
    # Imported after the settings and the watch, as in the command: this loads gRPC.
    from kvhearth_server import daemon

    return daemon.run(settings, ArenaPlan(geometry, None, HugepagePolicy.OFF))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
