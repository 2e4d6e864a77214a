"""Connects the verbs to a running daemon: AdminService on its unix socket."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import grpc

from kvhearth.errors import KVHearthError, Reason
from kvhearth.proto.v1 import admin_pb2
from kvhearth.url import (
    ADMIN_SOCKET,
    ADMIN_TOKEN_FILE,
    default_socket_dir,
    find_socket_dir,
)
from kvhearth.wire.frames import (
    ADMIN_TOKEN_KEY,
    STATUS_DETAILS_KEY,
    Stub,
    decode_status,
    error_from_code,
)
from kvhearth_server.cli import liveness
from kvhearth_server.cli.output import written_directory
from kvhearth_server.config.load import load_settings

DEADLINE_S = 20.0
DIGEST_DIGITS = 64

_SHOWN = 12
_NAMED = 8
"""Digits of a namespace, and number of namespaces, that a message shows."""

Reply = TypeVar("Reply")


def directory(given: Path | None) -> Path:
    """Return the daemon's directory: as given (flag, environment), else from the settings.

    Raises:
        KVHearthError: ``config_invalid``.
    """
    if given is not None:
        return written_directory(given, "--socket-dir")
    found = load_settings({}).socket_dir
    return find_socket_dir() if found == default_socket_dir() else found


class AdminClient:
    """A context with one channel to the daemon of a directory.

    Args:
        given: ``--socket-dir``.

    Raises:
        KVHearthError: from every call: ``daemon_away``, ``not_admin``, or the daemon's refusal.
    """

    def __init__(self, given: Path | None) -> None:
        self._folder = directory(given)
        self._undo = ExitStack()
        options = [
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.enable_http_proxy", 0),
            ("grpc.default_authority", "localhost"),
            ("grpc.max_receive_message_length", -1),
        ]
        target = f"unix:{self._folder / ADMIN_SOCKET}"
        self._channel = self._undo.enter_context(grpc.insecure_channel(target, options=options))
        self._stub = Stub(self._channel, admin_pb2)

    def __enter__(self) -> AdminClient:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._undo.close()

    def stats(self) -> admin_pb2.StatsResponse:
        """Return sizes, counts and counters."""
        return self._ask(admin_pb2.StatsRequest(), admin_pb2.StatsResponse)

    def sessions(self) -> admin_pb2.ListSessionsResponse:
        """Return the attached processes."""
        return self._ask(admin_pb2.ListSessionsRequest(), admin_pb2.ListSessionsResponse)

    def leases(self) -> admin_pb2.ListLeasesResponse:
        """Return the readers' leases."""
        return self._ask(admin_pb2.ListLeasesRequest(), admin_pb2.ListLeasesResponse)

    def namespaces(self) -> admin_pb2.ListNamespacesResponse:
        """Return all namespaces."""
        return self._ask(admin_pb2.ListNamespacesRequest(), admin_pb2.ListNamespacesResponse)

    def explain_contract(self, tenant: str, text: str) -> admin_pb2.ExplainContractResponse:
        """Return the namespace of a contract, and those that are near it."""
        request = admin_pb2.ExplainContractRequest(tenant=tenant, contract_json=text)
        return self._ask(request, admin_pb2.ExplainContractResponse)

    def explain_key(self, key: bytes) -> admin_pb2.ExplainKeyResponse:
        """Return the places of a key."""
        return self._ask(admin_pb2.ExplainKeyRequest(key=key), admin_pb2.ExplainKeyResponse)

    def evict(
        self, namespace: str, keep_bytes: int, tier: admin_pb2.EvictTier.ValueType
    ) -> admin_pb2.EvictResponse:
        """Remove blocks of a namespace (all 64 hex digits) down to ``keep_bytes``."""
        request = admin_pb2.EvictRequest(namespace=namespace, keep_bytes=keep_bytes, tier=tier)
        return self._ask(request, admin_pb2.EvictResponse)

    def forget(
        self, namespace: str, epoch: int, label: str | None = None
    ) -> admin_pb2.ForgetNamespaceResponse:
        """Make all blocks of a namespace (all 64 hex digits) invalid, if ``epoch`` is current;
        ``label`` names the new weights at remotes.
        """
        request = admin_pb2.ForgetNamespaceRequest(
            namespace=namespace, expected_epoch=epoch, label=label
        )
        return self._ask(request, admin_pb2.ForgetNamespaceResponse)

    def drain(self) -> admin_pb2.DrainResponse:
        """Make the daemon refuse new stores and sessions."""
        return self._ask(admin_pb2.DrainRequest(), admin_pb2.DrainResponse)

    def reload_settings(self) -> admin_pb2.ReloadSettingsResponse:
        """Make the daemon read its settings again."""
        return self._ask(admin_pb2.ReloadSettingsRequest(), admin_pb2.ReloadSettingsResponse)

    def namespace(self, name: str) -> admin_pb2.NamespaceInfo:
        """Return the namespace whose hex digest starts with ``name``.

        Raises:
            KVHearthError: ``unknown_namespace`` unless there is exactly one.
        """
        found = [
            space
            for space in self.namespaces().namespaces
            if name and space.namespace.startswith(name.lower())
        ]
        if len(found) == 1:
            return found[0]
        message = f"no namespace starts with {name!r}; kvhearth ls lists all of them"
        if found:
            digits = next(n for n in range(1, DIGEST_DIGITS + 1) if _differ(found, n))
            names = ", ".join(space.namespace[: max(_SHOWN, digits)] for space in found[:_NAMED])
            more = f", and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
            message = (
                f"{len(found)} namespaces start with {name!r}: {names}{more}; give more digits"
            )
        raise KVHearthError(Reason.UNKNOWN_NAMESPACE, message)

    def _ask(self, request: object, kind: type[Reply]) -> Reply:
        """Make the call after which its reply's ``kind`` is named."""
        method = getattr(self._stub, kind.__name__.removesuffix("Response"))
        self._require_socket()
        metadata = ((ADMIN_TOKEN_KEY, self._token()),)
        try:
            reply: Reply = method(request, metadata=metadata, timeout=DEADLINE_S)
        except grpc.RpcError as error:
            raise self._error(error) from None
        return reply

    def _error(self, error: grpc.RpcError) -> KVHearthError:
        # The exception that a stub raises is a call too; the type of gRPC's errors does not say so.
        call: Any = error
        for key, value in call.trailing_metadata() or ():
            if key == STATUS_DETAILS_KEY and isinstance(value, bytes):
                return decode_status(value)
        if call.code() is grpc.StatusCode.UNAVAILABLE:
            return self._away()
        return error_from_code(call.code().value[0], call.details() or "no details")

    def _require_socket(self) -> None:
        path = self._folder / ADMIN_SOCKET
        try:
            path.stat()
        except PermissionError:
            raise KVHearthError(Reason.NOT_ADMIN, liveness.denied(str(path))) from None
        except OSError:
            raise self._away() from None
        if not os.access(path, os.W_OK, effective_ids=True):
            raise KVHearthError(Reason.NOT_ADMIN, liveness.denied(str(path)))

    def _away(self) -> KVHearthError:
        return KVHearthError(Reason.DAEMON_AWAY, liveness.away(str(self._folder / ADMIN_SOCKET)))

    def _token(self) -> str:
        path = self._folder / ADMIN_TOKEN_FILE
        try:
            return path.read_text(encoding="ascii").strip()
        except FileNotFoundError:
            raise self._away() from None
        except (OSError, UnicodeDecodeError) as error:
            message = getattr(error, "strerror", None) or "no token"
            raise KVHearthError(
                Reason.NOT_ADMIN,
                f"cannot read {path}: {message}; run this as the user that the daemon runs as",
            ) from None


def _differ(found: list[admin_pb2.NamespaceInfo], digits: int) -> bool:
    """Return whether this many digits tell all namespaces apart."""
    return len({space.namespace[:digits] for space in found}) == len(found)
