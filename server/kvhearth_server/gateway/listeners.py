"""The gateway's listening socket: bound once, it outlives the process that accepts from it."""

from __future__ import annotations

import errno
import socket
import time

from kvhearth.errors import KVHearthError, Reason

_BACKLOG = 256
_TAKEN_S = 3.0
_TAKEN_PAUSE_S = 0.05


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket.

    Raises:
        KVHearthError: ``socket_unusable``.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        _bind(listener, host, port)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise KVHearthError(
            Reason.SOCKET_UNUSABLE,
            f"cannot listen on {host}:{port} ({error.strerror or error}); give a free port of an "
            "address of this machine",
        ) from None
    listener.setblocking(False)
    return listener


def _bind(listener: socket.socket, host: str, port: int) -> None:
    """Bind; wait a little for a port that is taken, most likely by the gateway of a daemon that was
    killed a moment ago.
    """
    end = time.monotonic() + _TAKEN_S
    while True:
        try:
            listener.bind((host, port))
            return
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() > end:
                raise
            time.sleep(_TAKEN_PAUSE_S)
