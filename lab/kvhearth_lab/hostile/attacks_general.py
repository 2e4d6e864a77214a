"""Attacks at every door: hostile bytes, storms, idle connections, evictions, kills."""

from __future__ import annotations

import os
import random
import socket
from collections.abc import Iterator
from pathlib import Path

from kvhearth.url import CALLS_SOCKET
from kvhearth_lab.hostile.attack import NOBODY, Attack, Target

_WAIT_S = 0.5


class RandomFrames(Attack):
    """Random bytes at the calls socket."""

    name = "random_frames"
    help = "nobody sends random bytes to the calls socket, one connection after another"
    who = NOBODY

    def run(self, target: Target, number: int) -> Iterator[None]:
        """See ``Attack.run``."""
        rng = random.Random(number)
        path = str(Path(target.socket_dir) / CALLS_SOCKET)
        while True:
            with socket.socket(socket.AF_UNIX) as line:
                line.settimeout(_WAIT_S)
                try:
                    line.connect(path)
                    line.sendall(os.urandom(rng.randrange(1, 65536)))
                    line.recv(4096)
                except OSError:
                    pass
            yield
