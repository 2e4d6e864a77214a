"""Client URLs: ``kvhearth+unix:///run/kvhearth`` here, ``kvhearth://host:9461`` on other hosts."""

from __future__ import annotations

import os
import socket
import ssl
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, quote, unquote, urlsplit

from kvhearth.errors import KVHearthError, Reason
from kvhearth.wire.remote import TOKEN_BYTES_MAX

SCHEME = "kvhearth+unix"
SYSTEM_SOCKET_DIR = Path("/run/kvhearth")
DEFAULT_URL = f"{SCHEME}:"
"""URL without a directory: the daemon that ``find_socket_dir`` finds."""
REMOTE_SCHEME = "kvhearth"
TLS_SCHEME = "kvhearths"
REMOTE_PORT = 9461
TOKEN_ENV = "KVHEARTH_TOKEN"
"""Environment variable with the identity's token, where the URL names no ``token_file``."""
ATTACH_SOCKET = "attach.sock"
CALLS_SOCKET = "calls.sock"
GRPC_SOCKET = "grpc.sock"
ADMIN_SOCKET = "admin.sock"
ADMIN_TOKEN_FILE = "admin.token"


@dataclass(frozen=True, kw_only=True)
class Deadlines:
    """The client's deadlines, which every URL may set.

    Attributes:
        lookup_ms: deadline of a lookup.
        call_ms: deadline of every other call.
        attach_ms: deadline of the attach handshake.
        heartbeat_ms: pause between heartbeats.
    """

    lookup_ms: int = 250
    call_ms: int = 2000
    attach_ms: int = 5000
    heartbeat_ms: int = 1000


@dataclass(frozen=True)
class UnixUrl(Deadlines):
    """Location of a daemon's sockets on this host.

    Attributes:
        socket_dir: directory of ``attach.sock``, ``calls.sock`` and ``grpc.sock``.
        calls: transport of decisions: ``frames``, or ``grpc`` where a proxy or a tracer requires
            it.
        daemon_uid: user id that must serve the sockets; None for any. Whoever may write to the
            sockets' directory could serve them in the daemon's place.
    """

    socket_dir: Path
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
        return f"unix:{os.fsencode(self.socket_dir / GRPC_SOCKET).decode()}"

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


@dataclass(frozen=True)
class RemoteUrl(Deadlines):
    """Location of a gateway, and how this process proves its identity to it.

    Attributes:
        host, port: where the gateway listens; a name or an address.
        tls: whether connections are encrypted and the gateway's certificate is checked.
        token_file: file with the identity's token; "" for that in ``KVHEARTH_TOKEN``, if any.
        ca: file with the certificates to trust; "" for the system's.
        cert, key: files of this process's own certificate and key; "" for none.
        connections: most connections for bytes of this process.
        staging_bytes: memory through which bytes pass that cannot go straight from pages to the
            network.
    """

    host: str
    port: int = REMOTE_PORT
    tls: bool = False
    token_file: str = ""
    ca: str = ""
    cert: str = ""
    key: str = ""
    connections: int = 4
    staging_bytes: int = 64 << 20

    @property
    def place(self) -> str:
        """Host and port, for messages."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    def secret(self, environment: Mapping[str, str] = os.environ) -> str:
        """Read the identity's token; "" if there is none.

        Raises:
            KVHearthError: ``bad_url`` if the file cannot be read or has no token.
        """
        if not self.token_file:
            return environment.get(TOKEN_ENV, "").strip()
        try:
            secret = Path(self.token_file).read_text(encoding="ascii").strip()
        except (OSError, ValueError) as error:
            problem = getattr(error, "strerror", None) or "it is not text"
            raise KVHearthError(
                Reason.BAD_URL, f"token_file={self.token_file} cannot be read: {problem}"
            ) from None
        if not 0 < len(secret) <= TOKEN_BYTES_MAX:
            raise KVHearthError(
                Reason.BAD_URL, f"token_file={self.token_file} has no token on its only line"
            )
        return secret

    def tls_context(self) -> ssl.SSLContext | None:
        """Read the certificates and return what connections need; None without TLS.

        Raises:
            KVHearthError: ``bad_url`` for a file that cannot be used.
        """
        if not self.tls:
            return None
        try:
            context = ssl.create_default_context(cafile=self.ca or None)
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            if self.cert:
                # Without a passphrase: one that was asked for would wait at a terminal.
                context.load_cert_chain(self.cert, self.key or None, password="")
        except (OSError, ValueError) as error:
            files = ", ".join(filter(None, (self.ca, self.cert, self.key)))
            raise KVHearthError(
                Reason.BAD_URL, f"certificates of {files or 'the system'}: {error}"
            ) from None
        return context


DaemonUrl = UnixUrl | RemoteUrl

_CREDENTIALS = struct.Struct("3i")
_UID_MAX = 2**32 - 2
_SOCKET_PATH_BYTES_MAX = 107
_TIMES = ("lookup_ms", "call_ms", "attach_ms", "heartbeat_ms")
_CALLS = ("frames", "grpc")
_SIZES = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_STAGING_BYTES = range(1 << 20, (1 << 40) + 1)
_CONNECTIONS = range(1, 65)
_SECRET_NAMES = ("token", "secret", "password")


def default_socket_dir() -> Path:
    """Return the socket directory of a daemon that is given none: ``/run/kvhearth`` for root and
    for a user who may write there, else the user's own.
    """
    return SYSTEM_SOCKET_DIR if _system_is_ours() else _own_socket_dir()


def find_socket_dir() -> Path:
    """Return the socket directory of a client that is given none: that of the user's own daemon if
    there is one, else ``/run/kvhearth`` if it exists, which another user's daemon may serve.
    """
    own = _own_socket_dir()
    if _system_is_ours() or (
        SYSTEM_SOCKET_DIR.is_dir() and not os.path.exists(own / ATTACH_SOCKET)
    ):
        return SYSTEM_SOCKET_DIR
    return own


def _system_is_ours() -> bool:
    return os.geteuid() == 0 or os.access(SYSTEM_SOCKET_DIR, os.W_OK | os.X_OK)


def _own_socket_dir() -> Path:
    """Return ``$XDG_RUNTIME_DIR/kvhearth``; without that variable a directory with the user's id,
    below systemd's own or in /tmp.
    """
    uid = os.geteuid()
    runtime = os.environ.get("XDG_RUNTIME_DIR") or f"/run/user/{uid}"
    if os.path.isabs(runtime) and os.access(runtime, os.W_OK | os.X_OK):
        return Path(runtime) / "kvhearth"
    return Path(f"/tmp/kvhearth-{uid}")


def parse_url(url: str) -> DaemonUrl:
    """Parse a client URL. One without a directory, ``kvhearth+unix:``, is of ``find_socket_dir``.

    Raises:
        KVHearthError: ``bad_url`` with the problem and an example; never with a secret.
    """
    parts = urlsplit(url)
    if parts.scheme == SCHEME and not parts.netloc and not parts.path:
        return parse_url(_found_url(parts.query))
    if parts.scheme in (REMOTE_SCHEME, TLS_SCHEME):
        return _remote_url(url)
    if parts.scheme != SCHEME or parts.netloc or not parts.path.startswith("/"):
        raise KVHearthError(
            Reason.BAD_URL,
            f"{_without_secrets(url)!r} is not of the form {SCHEME}:///run/kvhearth (three "
            f"slashes), {REMOTE_SCHEME}://host:{REMOTE_PORT} or {TLS_SCHEME}://host:{REMOTE_PORT}",
        )
    readers = {"calls": _calls, "daemon_uid": _uid}
    options = _options(parts.query, readers)
    if options.get("daemon_uid") is not None and options.get("calls", _CALLS[0]) != _CALLS[0]:
        raise KVHearthError(Reason.BAD_URL, f"daemon_uid needs calls={_CALLS[0]}: gRPC hides users")
    found = UnixUrl(Path(_local(unquote(parts.path, errors="surrogateescape"))), **options)
    path = os.fsencode(found.attach_path)
    if len(path) > _SOCKET_PATH_BYTES_MAX:
        raise KVHearthError(Reason.BAD_URL, f"{found.attach_path!r} is too long for a socket")
    if found.calls == "grpc" and path.decode(errors="replace").encode() != path:
        raise KVHearthError(Reason.BAD_URL, f"{found.attach_path!r} is not UTF-8: use frames")
    return found


def _local(text: str) -> str:
    """Return a path as this process's locale decodes it: a URL is UTF-8 in any locale."""
    try:
        return os.fsdecode(text.encode("utf-8", "surrogateescape"))
    except UnicodeEncodeError:
        raise KVHearthError(Reason.BAD_URL, f"{text!r} is no path") from None


def _found_url(query: str) -> str:
    """Return the URL of the daemon that ``find_socket_dir`` finds, with these options."""
    found = find_socket_dir()
    # Anybody may make a directory in /tmp: only the user's own daemon is talked to there.
    own = found != SYSTEM_SOCKET_DIR and "daemon_uid" not in query and "calls=grpc" not in query
    options = "&".join(filter(None, (query, f"daemon_uid={os.geteuid()}" if own else "")))
    return f"{SCHEME}://{quote(os.fsencode(found))}" + (f"?{options}" if options else "")


def _remote_url(url: str) -> RemoteUrl:
    parts = urlsplit(url)
    if parts.username is not None or parts.password is not None:
        raise _secret_in_url()
    try:
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if not host or port == 0 or parts.path not in ("", "/") or parts.fragment:
        raise KVHearthError(
            Reason.BAD_URL,
            f"{_without_secrets(url)!r} is not of the form {parts.scheme}://host:{REMOTE_PORT}",
        )
    readers = {
        **dict.fromkeys(("token_file", "ca", "cert", "key"), _file),
        "calls": _remote_calls,
        "connections": _connections,
        "staging": _staging,
    }
    options = _options(parts.query, readers)
    options.pop("calls", None)
    if "staging" in options:
        options["staging_bytes"] = options.pop("staging")
    tls = parts.scheme == TLS_SCHEME
    files = [name for name in ("ca", "cert", "key") if name in options]
    if files and not tls:
        raise KVHearthError(Reason.BAD_URL, f"{files[0]} needs {TLS_SCHEME}://")
    if "key" in options and "cert" not in options:
        raise KVHearthError(Reason.BAD_URL, "key needs cert, this process's own certificate")
    return RemoteUrl(host, port or REMOTE_PORT, tls, **options)


def _options(query: str, readers: Mapping[str, Callable[[str, str], Any]]) -> dict[str, Any]:
    """Read the options of a URL.

    Args:
        query: its part after the question mark.
        readers: by option, the function that reads a value, given the option's name and the text.
    """
    every = {**readers, **dict.fromkeys(_TIMES, _milliseconds)}
    found = {}
    for name, value in parse_qsl(query, keep_blank_values=True):
        if name in _SECRET_NAMES:
            raise _secret_in_url()
        if name not in every:
            known = ", ".join(every)
            raise KVHearthError(Reason.BAD_URL, f"unknown option {name!r}; known: {known}")
        found[name] = every[name](name, value)
    return found


def _milliseconds(name: str, value: str) -> int:
    if not value.isdecimal() or not 0 < int(value) <= 600_000:
        raise KVHearthError(Reason.BAD_URL, f"{name}={value!r} is not 1..600000 milliseconds")
    return int(value)


def _calls(name: str, value: str) -> str:
    if value not in _CALLS:
        raise KVHearthError(Reason.BAD_URL, f"{name}={value!r} is none of {', '.join(_CALLS)}")
    return value


def _remote_calls(name: str, value: str) -> str:
    if value != _CALLS[0]:
        raise KVHearthError(
            Reason.BAD_URL, f"{name}={value!r}: a gateway takes frames only, leave the option out"
        )
    return value


def _uid(name: str, value: str) -> int:
    if not (value.isascii() and value.isdecimal()) or len(value) > 10 or int(value) > _UID_MAX:
        raise KVHearthError(Reason.BAD_URL, f"{name}={value!r} is not 0..{_UID_MAX}")
    return int(value)


def _file(name: str, value: str) -> str:
    if not value or "\0" in value:
        raise KVHearthError(Reason.BAD_URL, f"{name}={value!r} is no path of a file")
    return _local(value)


def _connections(name: str, value: str) -> int:
    if not (value.isascii() and value.isdecimal()) or int(value[:6]) not in _CONNECTIONS:
        low, high = _CONNECTIONS[0], _CONNECTIONS[-1]
        raise KVHearthError(Reason.BAD_URL, f"{name}={value!r} is not {low}..{high}")
    return int(value)


def _staging(name: str, value: str) -> int:
    digits = value.rstrip("KMGiB")
    unit = _SIZES.get(value[len(digits) :], 0)
    if not (digits.isascii() and digits.isdecimal()) or len(digits) > 15:
        unit = 0
    if not unit or int(digits) * unit not in _STAGING_BYTES:
        raise KVHearthError(Reason.BAD_URL, f"{name}={value!r} is not a size such as 64MiB")
    return int(digits) * unit


def _secret_in_url() -> KVHearthError:
    return KVHearthError(
        Reason.BAD_URL,
        "a URL holds no secret, since it is shown in logs and process lists: use "
        f"token_file=/path, or the environment variable {TOKEN_ENV}",
    )


def _without_secrets(url: str) -> str:
    """Return a URL for a message: without its options and a user's name or password."""
    return url.partition("?")[0].rpartition("@")[2] if "@" in url else url.partition("?")[0]
