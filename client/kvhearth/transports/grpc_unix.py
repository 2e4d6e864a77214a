"""Decisions over gRPC on the daemon's unix socket."""

from __future__ import annotations

import os
import threading
import weakref
from typing import Any

import grpc

from kvhearth.errors import KVHearthError, Reason
from kvhearth.transports.base import ReplyT, RequestT, Rpc
from kvhearth.wire.frames import (
    SERVICE,
    STATUS_DETAILS_KEY,
    TOKEN_KEY,
    BareError,
    decode_status,
    error_from_code,
)


class GrpcUnixTransport:
    """A ``CacheTransport`` of one session; creates its channel on the first call.

    Args:
        target: gRPC's name of the socket (``unix:/run/kvhearth/grpc.sock``).
        token: the session's secret.
        message_bytes_max: bound of one message, both ways.
    """

    def __init__(self, target: str, token: str, message_bytes_max: int) -> None:
        self._target = target
        self._metadata = ((TOKEN_KEY, token),)
        self._message_bytes_max = message_bytes_max
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._channel: grpc.Channel | None = None
        self._calls: dict[str, Any] = {}
        self._closed = False
        _live.add(self)

    def call(self, rpc: Rpc[RequestT, ReplyT], request: RequestT, deadline_s: float) -> ReplyT:
        if os.getpid() != self._pid:
            raise KVHearthError(Reason.CLOSED, "this session is the parent process's: connect anew")
        callable_ = self._calls.get(rpc.name) or self._make_call(rpc)
        try:
            reply: ReplyT = callable_(request, timeout=deadline_s, metadata=self._metadata)
        except grpc.RpcError as error:
            raise _translate(error) from None
        except ValueError as error:
            # gRPC's answer on a channel that another thread has closed.
            raise KVHearthError(Reason.CLOSED, str(error)) from None
        return reply

    def has_connection(self) -> bool:
        """Return False, since a channel may wait; see ``CacheTransport.has_connection``."""
        return False

    def close(self) -> None:
        if os.getpid() != self._pid:
            return
        with self._lock:
            channel, self._channel, self._closed = self._channel, None, True
            self._calls = {}
        if channel is not None:
            channel.close()

    def _make_call(self, rpc: Rpc[RequestT, ReplyT]) -> Any:
        with self._lock:
            if self._closed:
                raise KVHearthError(Reason.CLOSED, "the transport is closed")
            if self._channel is None:
                self._channel = grpc.insecure_channel(self._target, options=self._options())
            callable_ = self._channel.unary_unary(
                f"/{SERVICE}/{rpc.name}",
                request_serializer=rpc.serialize,
                response_deserializer=rpc.parse,
            )
            self._calls[rpc.name] = callable_
            return callable_

    def _options(self) -> list[tuple[str, int | str]]:
        return [
            ("grpc.max_send_message_length", self._message_bytes_max),
            ("grpc.max_receive_message_length", self._message_bytes_max),
            # A channel of a new session must not inherit the back-off of an old one.
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.min_reconnect_backoff_ms", 100),
            ("grpc.max_reconnect_backoff_ms", 1000),
            ("grpc.enable_http_proxy", 0),
            ("grpc.default_authority", "localhost"),
        ]

    def _forget(self) -> None:
        """Detach from the parent's channel in a forked child: destroying it there may hang."""
        self._lock = threading.Lock()
        if self._channel is not None:
            _parents_channels.append((self._channel, self._calls))
        self._channel, self._calls, self._closed = None, {}, True


_live: weakref.WeakSet[GrpcUnixTransport] = weakref.WeakSet()
_parents_channels: list[object] = []


def _after_fork_in_child() -> None:
    for transport in list(_live):
        transport._forget()
    _live.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)


def _translate(error: grpc.RpcError) -> KVHearthError:
    # The errors that gRPC raises are also calls, but its stubs declare the two as unrelated.
    call: Any = error
    if not isinstance(call, grpc.Call):
        return BareError(Reason.INTERNAL, f"gRPC failed without a status: {call}")
    for key, value in call.trailing_metadata() or ():
        if key == STATUS_DETAILS_KEY and isinstance(value, bytes):
            return decode_status(value)
    number, _ = call.code().value
    return error_from_code(number, call.details() or "no details")
