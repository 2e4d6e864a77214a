"""Client URL of a daemon: ``kvhearth+unix:///run/kvhearth?lookup_ms=50``."""

from __future__ import annotations

import socket
import struct
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qsl, unquote, urlsplit

from kvhearth.errors import KVHearthError, Reason

SCHEME = "kvhearth+unix"
ATTACH_SOCKET = "attach.sock"
CALLS_SOCKET = "calls.sock"
GRPC_SOCKET = "grpc.sock"
ADMIN_SOCKET = "admin.sock"
ADMIN_TOKEN_FILE = "admin.token"


@dataclass(frozen=True)
class DaemonUrl:
    """Location of the daemon's sockets, and the client's deadlines.

    Attributes:
        socket_dir: directory of ``attach.sock``, ``calls.sock`` and ``grpc.sock``.
        lookup_ms: deadline of a lookup.
        call_ms: deadline of every other call.
        attach_ms: deadline of the attach handshake.
        heartbeat_ms: pause between heartbeats.
        calls: transport of decisions: ``frames``, or ``grpc`` where a proxy or a tracer requires
            it.
        daemon_uid: user id that must serve the sockets; None for any. Whoever may write to the
            sockets' directory could serve them in the daemon's place.
    """

    socket_dir: Path
    lookup_ms: int = 250
    call_ms: int = 2000
    attach_ms: int = 5000
    heartbeat_ms: int = 1000
    calls: str = "frames"
    daemon_uid: int | None = None

    @property
    def attach_path(self) -> str:
        """Path of the attach socket."""
        return str(self.socket_dir / ATTACH_SOCKET)

    @property
    def calls_path(self) -> str:
        """Path of the calls socket."""
        return str(self.socket_dir / CALLS_SOCKET)

    @property
    def grpc_target(self) -> str:
        """gRPC's name of the decisions socket."""
        return f"unix:{self.socket_dir / GRPC_SOCKET}"

    def check_daemon(self, connection: socket.socket) -> None:
        """Refuse a connection to a socket that another user than ``daemon_uid`` serves. The kernel
        tells who called ``listen``.

        Raises:
            KVHearthError: ``peer_not_allowed``.
        """
        if self.daemon_uid is None:
            return
        data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        _, uid, _ = _CREDENTIALS.unpack(data)
        if uid != self.daemon_uid:
            raise KVHearthError(
                Reason.PEER_NOT_ALLOWED,
                f"user {uid} serves {self.socket_dir}, not user {self.daemon_uid} of the URL's "
                "daemon_uid",
            )


_CREDENTIALS = struct.Struct("3i")
_UID_MAX = 2**32 - 2
_TIMES = ("lookup_ms", "call_ms", "attach_ms", "heartbeat_ms")
_CALLS = ("frames", "grpc")


def parse_url(url: str) -> DaemonUrl:
    """Parse a client URL.

    Raises:
        KVHearthError: ``bad_url`` with the problem and an example.
    """
    parts = urlsplit(url)
    if parts.scheme != SCHEME or parts.netloc or not parts.path.startswith("/"):
        raise KVHearthError(
            Reason.BAD_URL, f"{url!r} is not of the form {SCHEME}:///run/kvhearth (three slashes)"
        )
    times: dict[str, int] = {}
    calls, daemon_uid = _CALLS[0], None
    for name, value in parse_qsl(parts.query, keep_blank_values=True):
        if name == "calls":
            if value not in _CALLS:
                raise KVHearthError(
                    Reason.BAD_URL, f"calls={value!r} is none of {', '.join(_CALLS)}"
                )
            calls = value
            continue
        if name == "daemon_uid":
            daemon_uid = _uid(value)
            continue
        if name not in _TIMES:
            known = ", ".join(("calls", "daemon_uid", *_TIMES))
            raise KVHearthError(Reason.BAD_URL, f"unknown option {name!r}; known: {known}")
        if not value.isdecimal() or not 0 < int(value) <= 600_000:
            raise KVHearthError(Reason.BAD_URL, f"{name}={value!r} is not 1..600000 milliseconds")
        times[name] = int(value)
    if daemon_uid is not None and calls != _CALLS[0]:
        raise KVHearthError(Reason.BAD_URL, f"daemon_uid needs calls={_CALLS[0]}: gRPC hides users")
    return DaemonUrl(Path(unquote(parts.path)), **times, calls=calls, daemon_uid=daemon_uid)


def _uid(value: str) -> int:
    if not (value.isascii() and value.isdecimal()) or len(value) > 10 or int(value) > _UID_MAX:
        raise KVHearthError(Reason.BAD_URL, f"daemon_uid={value!r} is not 0..{_UID_MAX}")
    return int(value)
