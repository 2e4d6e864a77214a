"""Connections to a gateway over TCP or TLS, and decisions over them."""

from __future__ import annotations

import contextlib
import socket
import ssl
import time

from kvhearth.errors import KVHearthError, Reason
from kvhearth.transports.frames import FramesTransport
from kvhearth.url import RemoteUrl
from kvhearth.wire.remote import Purpose, preface

_KEEPALIVE_S = 15.0
"""Seconds of silence before the kernel looks for the peer, until the gateway names its own."""
_PROBES = 3
_PROBE_PAUSE_S = 1


class Dialer:
    """Opens connections of one session to a gateway.

    Args:
        url: where it listens; certificates are read now.

    Attributes:
        keepalive_s: seconds of silence after which the kernel looks whether the gateway lives; a
            connection whose bytes are not acknowledged for as long ends.

    Raises:
        KVHearthError: ``bad_url`` for certificates that cannot be used.
    """

    def __init__(self, url: RemoteUrl) -> None:
        self.keepalive_s = _KEEPALIVE_S
        self._url = url
        self._tls = url.tls_context()

    def connect(self, purpose: Purpose, end: float) -> socket.socket:
        """Connect and say what for; the socket has a timeout until the deadline.

        The name of a host is looked up without a deadline of ours: that is the resolver's.

        Args:
            purpose: of the connection.
            end: monotonic deadline.

        Raises:
            KVHearthError: ``peer_not_allowed`` if the gateway's certificate is not trusted.
            OSError: ``TimeoutError`` at the deadline.
        """
        raw = socket.create_connection((self._url.host, self._url.port), _left_s(end))
        stream = raw
        try:
            if raw.getsockname() == raw.getpeername():
                # Nobody listens, and the kernel chose the very port for this end: it would keep a
                # gateway from it.
                raise ConnectionRefusedError("nobody listens")
            self._set_options(raw)
            if self._tls is not None:
                raw.settimeout(_left_s(end))
                stream = self._tls.wrap_socket(raw, server_hostname=self._url.host)
            stream.settimeout(_left_s(end))
            stream.sendall(preface(purpose))
        except ssl.SSLCertVerificationError as error:
            raw.close()
            raise KVHearthError(
                Reason.PEER_NOT_ALLOWED,
                f"the certificate of {self._url.place} is not trusted "
                f"({error.verify_message}): name its issuer by ca=",
            ) from None
        except BaseException:
            stream.close()
            raw.close()
            raise
        return stream

    def calls(self, end: float) -> socket.socket:
        """Connect for calls; see ``frames.Connect``."""
        stream = self.connect(Purpose.CALLS, end)
        stream.setblocking(False)
        return stream

    def _set_options(self, raw: socket.socket) -> None:
        # Each request is sent whole: waiting for more of it would only delay it.
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.set_keepalive(raw)

    def set_keepalive(self, raw: socket.socket) -> None:
        """Let the kernel end a connection whose other end is gone, by ``keepalive_s``."""
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        silent_s = max(int(self.keepalive_s), 1)
        quiet_ms = (silent_s + _PROBES * _PROBE_PAUSE_S) * 1000
        with contextlib.suppress(AttributeError):  # names of Linux
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, silent_s)
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_PAUSE_S)
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, quiet_ms)


def over_tcp(dialer: Dialer, place: str, token: str, message_bytes_max: int) -> FramesTransport:
    """Return a transport over connections to a gateway; see ``FramesTransport``."""
    return FramesTransport(dialer.calls, place, token, message_bytes_max, may_break=True)


def _left_s(end: float) -> float:
    """Return the seconds until the monotonic time ``end``.

    Raises:
        TimeoutError: it has passed.
    """
    left_s = end - time.monotonic()
    if left_s <= 0:
        raise TimeoutError
    return left_s
