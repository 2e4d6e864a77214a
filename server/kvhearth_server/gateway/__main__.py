"""``python -m kvhearth_server.gateway``: the gateway's process, whose parent listens for it."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import sys
import threading
from functools import partial

from kvhearth.errors import KVHearthError
from kvhearth.url import UnixUrl
from kvhearth_server.child import begin, watch_parent
from kvhearth_server.config.load import Settings
from kvhearth_server.gateway.counters import ReportedCounters
from kvhearth_server.gateway.credentials import Credentials
from kvhearth_server.gateway.server import Gateway
from kvhearth_server.observability import logs

_SWITCH_S = 0.0002
_STACK_BYTES = 512 << 10
_DESCRIPTORS = 8192
"""Two for each connection, and those of the daemon's side."""


def serve(settings: Settings, listener: socket.socket) -> None:
    """Serve until stdin ends, SIGTERM or SIGINT; read certificates and tokens again at SIGHUP.

    Raises:
        KVHearthError: ``config_invalid`` for certificates or tokens that cannot be used.
    """
    url = UnixUrl(settings.socket_dir)
    counters = ReportedCounters(url)
    credentials = Credentials(settings, partial(counters.add, "gateway_peers_refused"))
    gateway = Gateway(url, credentials, counters, settings.attach_timeout_s)
    counters.start()
    stopping = threading.Event()
    hung_up = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopping.set())
    signal.signal(signal.SIGHUP, lambda *_: hung_up.set())
    gateway.start(listener)
    with contextlib.suppress(BrokenPipeError):  # the parent died: stdin ends as well
        sys.stdout.write("serving\n")
        sys.stdout.flush()
    watch_parent(stopping.set)
    while not stopping.wait(0.2):
        if hung_up.is_set():
            hung_up.clear()
            credentials.reload()
    gateway.stop()
    counters.stop()


def main() -> int:
    """Run a child of ``process.GatewayProcess``; return the exit status."""
    message = begin()
    if message is None:
        return 0  # the parent died
    settings = Settings(**message["settings"])
    logs.configure(settings.log_level, settings.log_format)
    logs.capture()
    sys.setswitchinterval(_SWITCH_S)
    threading.stack_size(_STACK_BYTES)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    bounded = _DESCRIPTORS if most == resource.RLIM_INFINITY else min(_DESCRIPTORS, most)
    resource.setrlimit(resource.RLIMIT_NOFILE, (bounded, most))
    listener = socket.socket(fileno=message["listener"])
    listener.setblocking(False)
    serve(settings, listener)
    return 0


if __name__ == "__main__":
    try:
        code = main()
    except KVHearthError as error:
        sys.stderr.write(f"kvhearth: error: {error.message}\n")
        code = 1
    sys.stderr.flush()
    os._exit(code)
