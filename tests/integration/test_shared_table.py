"""A table of the shared index beside a process that writes one all the time, and is killed."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support.table_rig import FIRST, Rig, names, shape_of

from kvhearth import native

pytestmark = pytest.mark.skipif(native.available() is not None, reason="no native module")


def test_a_reader_beside_a_writer_that_is_killed() -> None:
    """No mix of two writes is ever found, and no search hangs."""
    slots = 256
    shape = shape_of(slots)
    sizes = shape.bytes, 4 * (FIRST + slots)
    places = [os.memfd_create("table") for _ in sizes]
    for place, size in zip(places, sizes, strict=True):
        os.ftruncate(place, size)
    memory, generations = (np.frombuffer(mmap.mmap(place, 0), np.uint8) for place in places)
    rig = Rig(slots, memory, generations)
    keys = names(2 * slots)
    words = [sys.executable, "-m", "support.table_rig", *map(str, places), str(slots)]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    for _ in range(3):
        with subprocess.Popen(
            words, stdout=subprocess.PIPE, pass_fds=places, env=environment
        ) as writer:
            assert writer.stdout is not None
            assert writer.stdout.readline() == b"ready\n"
            searches = hits = 0
            while searches < 300 or not hits:
                searches += 1
                found, extents = rig.find(keys)
                sums = extents["checksum"].reshape(-1)
                for number in np.flatnonzero(found).tolist():
                    assert sums[number].tobytes() == keys[number][:16]
                    assert extents["slot"][number, 0] == FIRST + number % slots
                hits += np.count_nonzero(found)
                assert writer.poll() is None
            writer.send_signal(signal.SIGKILL)
        for _ in range(10):
            found, extents = rig.find(keys)
            assert not (found[:slots] & found[slots:]).any()
    for place in places:
        os.close(place)
