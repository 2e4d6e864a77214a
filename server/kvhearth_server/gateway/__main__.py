"""``python -m kvhearth_server.gateway``: one gateway process."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from pathlib import Path

from kvhearth.errors import KVHearthError
from kvhearth.url import UnixUrl
from kvhearth_server.gateway.identity import OpenDoor
from kvhearth_server.gateway.server import Gateway, Place, listen
from kvhearth_server.observability import logs


def main() -> int:
    parser = argparse.ArgumentParser(prog="kvhearth gateway")
    parser.add_argument("--listen", default="127.0.0.1:9461")
    parser.add_argument("--socket-dir", default="/run/kvhearth")
    options = parser.parse_args()
    logs.configure("info", "json")
    host, _, port = options.listen.rpartition(":")
    listener = listen(host, int(port))
    bound = listener.getsockname()[1]
    gateway = Gateway(UnixUrl(Path(options.socket_dir)), OpenDoor("default"), Place(0, 1, (bound,)))
    stopping = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopping.set())
    gateway.start([listener])
    sys.stdout.write(f"{bound}\n")
    sys.stdout.flush()
    stopping.wait()
    gateway.stop()
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KVHearthError as error:
        sys.stderr.write(f"kvhearth: error: {error.message}\n")
        os._exit(1)
