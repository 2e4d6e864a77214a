"""Attach: passes identity and descriptors over a socket whose closing then ends the session."""

from __future__ import annotations

import array
import contextlib
import os
import select
import socket
import threading
import time
import weakref
from typing import Any

from kvhearth.errors import KVHearthError, Reason
from kvhearth.url import DaemonUrl
from kvhearth.wire.handshake import FrameDecoder, Hello, Welcome, encode_frame
from kvhearth.wire.status import rebuild_error

DESCRIPTORS_MAX = 253
"""The kernel's bound for one message (SCM_MAX_FD)."""
_READ_BYTES = 64 * 1024
_ANCILLARY_BYTES = socket.CMSG_SPACE(DESCRIPTORS_MAX * 4)


class Session:
    """One attached process: the daemon's welcome, and the attach socket.

    Attributes:
        welcome: the daemon's answer.
        descriptors: owned until ``take_descriptors``: one per segment in the welcome's order, then
            the generations' memfd; empty if the arena was not requested.
    """

    def __init__(self, welcome: Welcome, life_line: socket.socket, descriptors: list[int]) -> None:
        self.welcome = welcome
        self.descriptors = descriptors
        self._life_line = life_line
        self._pid = os.getpid()
        self._retired = False
        # Held across the system call, so that a closed descriptor's number is never polled.
        self._lock = threading.Lock()
        self._events: select.poll | None = select.poll()
        self._events.register(life_line, select.POLLIN)
        _live.add(self)

    def take_descriptors(self) -> list[int]:
        """Hand the descriptors to the caller, who closes them."""
        taken, self.descriptors = self.descriptors, []
        return taken

    def alive(self) -> bool:
        """Return whether the session may be used: not retired, and the daemon of this boot lives.

        One system call, no waiting. Once False, it stays False.
        """
        if self._retired or os.getpid() != self._pid:
            return False
        with self._lock:
            # The daemon sends nothing after the welcome: a byte is as bad a sign as the end of the
            # stream. A read would report the same by an exception, which costs three times as much.
            return self._events is not None and not self._events.poll(0)

    def retire(self) -> None:
        """Make ``alive`` False for good, so that no copy begins; the attach socket stays open."""
        self._retired = True

    def goodbye(self) -> None:
        """Announce a deliberate end of the session, then ``close``. Drain copies first."""
        _close_all(self.take_descriptors())
        if os.getpid() == self._pid:
            with self._lock:
                _say_bye(self._life_line)
        self.close()

    def close(self) -> None:
        """Close the attach socket and descriptors that were not taken. Idempotent."""
        with self._lock:
            self._events = None
            self._life_line.close()
        _close_all(self.take_descriptors())

    def leave_open(self) -> None:
        """Leave the attach socket open until the process ends, which ends the session."""
        with self._lock, contextlib.suppress(OSError):
            self._events = None
            self._life_line.detach()

    def _forget(self) -> None:
        """Close a forked child's copies: they must not make a dead parent look alive."""
        self._lock = threading.Lock()
        self.close()


_live: weakref.WeakSet[Session] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for session in list(_live):
        session._forget()
    _live.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)


def attach(url: DaemonUrl, hello: Hello) -> Session:
    """Attach to the daemon at ``url``; waits at most ``url.attach_ms``.

    Raises:
        KVHearthError: the daemon's refusal with its details; ``daemon_away`` if no daemon listens
            or the connection ends; ``deadline``; ``socket_unusable`` if this user may not connect;
            ``bad_message`` for a malformed answer; ``peer_not_allowed`` if the daemon runs as
            another user than the URL names.
    """
    deadline = time.monotonic() + url.attach_ms / 1000
    try:
        life_line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    except OSError as error:  # no descriptor is free
        raise _translate(error, url) from None
    descriptors: list[int] = []
    try:
        _set_timeout(life_line, deadline)
        life_line.connect(url.attach_path)
        url.check_daemon(life_line)
        life_line.sendall(encode_frame(hello.to_message()))
        welcome = _read_answer(_receive(life_line, deadline, descriptors))
        _check_descriptors(hello, welcome, descriptors)
        life_line.setblocking(False)
        return Session(welcome, life_line, descriptors)
    except BaseException as error:
        _close_all(descriptors)
        # In all of these cases no copy ever began.
        _say_bye(life_line)
        life_line.close()
        if isinstance(error, OSError):
            raise _translate(error, url) from None
        raise


def _set_timeout(life_line: socket.socket, deadline: float) -> None:
    left_s = deadline - time.monotonic()
    if left_s <= 0:
        raise TimeoutError
    life_line.settimeout(left_s)


def _receive(life_line: socket.socket, deadline: float, descriptors: list[int]) -> dict[str, Any]:
    """Return the first frame; append descriptors to ``descriptors`` as they come, close-on-exec."""
    decoder = FrameDecoder()
    while True:
        _set_timeout(life_line, deadline)
        data, ancillary, flags, _ = life_line.recvmsg(
            _READ_BYTES, _ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC
        )
        for level, kind, payload in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                numbers = array.array("i")
                numbers.frombytes(payload[: len(payload) - len(payload) % numbers.itemsize])
                descriptors.extend(numbers)
        if flags & socket.MSG_CTRUNC:
            raise KVHearthError(
                Reason.BAD_MESSAGE, "descriptors were lost on the way: raise RLIMIT_NOFILE"
            )
        if not data:
            raise KVHearthError(Reason.DAEMON_AWAY, "the daemon closed the connection at attach")
        messages = decoder.feed(data)
        if messages:
            return messages[0]


def _read_answer(message: dict[str, Any]) -> Welcome:
    if message.get("kind") != "refused":
        try:
            return Welcome.from_message(message)
        except (TypeError, ValueError) as error:
            raise KVHearthError(Reason.BAD_MESSAGE, f"welcome: {error}") from None
    details = message.get("details")
    raise rebuild_error(
        str(message.get("reason", "")),
        str(message.get("message", "")),
        details if isinstance(details, dict) else {},
    )


def _check_descriptors(hello: Hello, welcome: Welcome, descriptors: list[int]) -> None:
    wanted = len(welcome.segments) + 1 if hello.map_arena else 0
    if len(descriptors) != wanted:
        raise KVHearthError(
            Reason.BAD_MESSAGE, f"welcome came with {len(descriptors)} descriptors, not {wanted}"
        )


def _translate(error: OSError, url: DaemonUrl) -> KVHearthError:
    if isinstance(error, TimeoutError):
        return KVHearthError(
            Reason.DEADLINE, f"no answer at {url.attach_path} in {url.attach_ms} ms"
        )
    if isinstance(error, PermissionError):
        return KVHearthError(
            Reason.SOCKET_UNUSABLE,
            f"may not connect to {url.attach_path}: run as a user or group that may",
        )
    return KVHearthError(
        Reason.DAEMON_AWAY, f"no daemon at {url.attach_path} ({error}): is it running?"
    )


def _say_bye(life_line: socket.socket) -> None:
    with contextlib.suppress(OSError):
        life_line.send(encode_frame({"kind": "bye"}), socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)


def _close_all(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        with contextlib.suppress(OSError):
            os.close(descriptor)
    descriptors.clear()
