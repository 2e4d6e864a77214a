"""Keepers of segments' memory: descriptors of sealed memfds survive while no daemon runs.

Under systemd its descriptor store keeps them. Elsewhere a holder process does, which the daemon
starts: it holds descriptors and nothing else, and ends by itself when no daemon has come for a
time. This module needs the standard library only, so that the holder stays small.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import os
import select
import selectors
import socket
import struct
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol

SOCKET_NAME = "memory.sock"
KEPT_MAX = 512
"""Most descriptors that a holder takes."""
CLIENTS_MAX = 16
"""Most connections to a holder: one daemon, and others that look."""
NAME_BYTES_MAX = 64
ANSWER_S = 10.0
"""Time allowed for an answer of the holder."""

_PREFIX = "kvhearth-"
_DOOR = 3
"""Number of the listening socket in a holder."""
_PUT, _TAKE, _FORGET, _DONE, _FULL = b"P", b"T", b"F", b".", b"!"
_CREDENTIALS = struct.Struct("3i")
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class Keeper(Protocol):
    """Holds descriptors by name. Each method raises OSError where the keeper does not answer."""

    def take(self) -> dict[str, int]:
        """Return copies of all kept descriptors, by name; the caller closes them."""

    def put(self, name: str, descriptor: int) -> None:
        """Keep a copy of a descriptor under a name that is not taken yet."""

    def forget(self, name: str) -> None:
        """Close a kept descriptor; an unknown name does nothing."""

    def close(self) -> None:
        """Let go of the keeper, which keeps what it has."""

    @property
    def alive(self) -> bool:
        """Whether it still keeps what was put."""


def is_sealed(descriptor: int) -> bool:
    """Whether nobody can resize a memfd; False for any other file."""
    try:
        return fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _SEALS == _SEALS
    except OSError:
        return False


def open_keeper(
    folder: Path,
    idle_s: float,
    *,
    start: bool = True,
    environment: Mapping[str, str] = os.environ,
) -> Keeper | None:
    """Return the keeper of an arena directory that this process has locked.

    Args:
        folder: the arena's directory; the holder's socket is there.
        idle_s: time after which a holder without a daemon ends.
        start: start a holder where none runs; otherwise return None.
        environment: variables in which systemd says that it keeps descriptors.

    Raises:
        OSError: the holder cannot be started, or another user's process answers.
    """
    # Set where the unit has FileDescriptorStoreMax= (systemd 254 and newer).
    if environment.get("NOTIFY_SOCKET") and environment.get("FDSTORE", "0") not in ("", "0"):
        return SystemdStore(environment)
    found = _connect(folder)
    if found is None and start:
        _start_holder(folder, idle_s)
        found = _connect(folder)
    return found


# -- systemd ---------------------------------------------------------------------------------------


class SystemdStore:
    """The descriptor store of this process's systemd unit.

    Descriptors that it kept are inherited from number 3 on; they stay open, so that ``take`` may be
    called again.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._address = environment["NOTIFY_SOCKET"]
        self._kept: dict[str, int] = {}
        if environment.get("LISTEN_PID") == str(os.getpid()):
            names = environment.get("LISTEN_FDNAMES", "").split(":")
            count = int(environment.get("LISTEN_FDS", "0"))
            for number, name in zip(range(3, 3 + count), names, strict=False):
                if name.startswith(_PREFIX):
                    self._kept[name.removeprefix(_PREFIX)] = number

    def take(self) -> dict[str, int]:
        """See ``Keeper.take``."""
        return {
            name: fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, 3)
            for name, number in self._kept.items()
        }

    def put(self, name: str, descriptor: int) -> None:
        """See ``Keeper.put``."""
        # Without polling: a memfd reports no hang-up, and epoll refuses it.
        self._send(f"FDSTORE=1\nFDPOLL=0\nFDNAME={_PREFIX}{name}", descriptor)

    def forget(self, name: str) -> None:
        """See ``Keeper.forget``."""
        number = self._kept.pop(name, -1)
        if number >= 0:
            os.close(number)
        self._send(f"FDSTOREREMOVE=1\nFDNAME={_PREFIX}{name}")

    def close(self) -> None:
        """See ``Keeper.close``."""

    @property
    def alive(self) -> bool:
        """True: the service manager outlives its units."""
        return True

    def _send(self, message: str, descriptor: int = -1) -> None:
        address = self._address
        if address.startswith("@"):
            address = "\0" + address[1:]
        descriptors = [descriptor] if descriptor >= 0 else []
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.settimeout(ANSWER_S)
            sender.connect(address)
            socket.send_fds(sender, [message.encode()], descriptors)


# -- the holder, seen from the daemon --------------------------------------------------------------


class HolderLink:
    """Connection to a holder process; while it is open, the holder does not end by itself."""

    def __init__(self, line: socket.socket) -> None:
        self._line = line

    def take(self) -> dict[str, int]:
        """See ``Keeper.take``."""
        self._line.send(_TAKE)
        found: dict[str, int] = {}
        while True:
            data, descriptors = _receive(self._line)
            if data == _DONE:
                return found
            if len(descriptors) != 1:
                raise ConnectionError("the holder of the memory has ended")
            found[data.decode()] = descriptors[0]

    def put(self, name: str, descriptor: int) -> None:
        """See ``Keeper.put``."""
        socket.send_fds(self._line, [_PUT + name.encode()], [descriptor])
        self._done()

    def forget(self, name: str) -> None:
        """See ``Keeper.forget``."""
        self._line.send(_FORGET + name.encode())
        self._done()

    def close(self) -> None:
        """See ``Keeper.close``."""
        self._line.close()

    @property
    def alive(self) -> bool:
        """Whether the holder runs: it says nothing unless asked, so readable means ended."""
        poll = select.poll()
        poll.register(self._line, select.POLLIN)
        return not poll.poll(0)

    def _done(self) -> None:
        answer, _ = _receive(self._line)
        if answer != _DONE:
            raise ConnectionError(
                f"the holder keeps {KEPT_MAX} descriptors already"
                if answer == _FULL
                else "the holder of the memory has ended"
            )


def _receive(line: socket.socket) -> tuple[bytes, list[int]]:
    """Receive one message and the descriptors that came with it, which are closed on ``exec``."""
    room = socket.CMSG_SPACE(array.array("i").itemsize)
    data, ancillary, _, _ = line.recvmsg(NAME_BYTES_MAX + 1, room, socket.MSG_CMSG_CLOEXEC)
    descriptors = array.array("i")
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            descriptors.frombytes(content[: len(content) // 4 * 4])
    return data, list(descriptors)


@contextlib.contextmanager
def _short_path(folder: Path) -> Iterator[str]:
    """Yield a path of the socket that is short, however deep the directory lies."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}/{SOCKET_NAME}"
    finally:
        os.close(descriptor)


def _connect(folder: Path) -> HolderLink | None:
    """Connect to the holder of a directory; None where none runs."""
    line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    with contextlib.ExitStack() as undo:
        undo.callback(line.close)
        line.settimeout(ANSWER_S)
        found = HolderLink(line)
        try:
            with _short_path(folder) as path:
                line.connect(path)
            if not _is_own(line):
                raise PermissionError(f"another user's process answers at {folder / SOCKET_NAME}")
            found.forget("")  # a holder that is about to end accepts connections, too
        except (FileNotFoundError, ConnectionError):
            return None
        undo.pop_all()
    return found


def _is_own(line: socket.socket) -> bool:
    credentials = line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, uid, _ = _CREDENTIALS.unpack(credentials)
    return uid in (os.geteuid(), 0)


def _start_holder(folder: Path, idle_s: float) -> None:
    """Start a holder that outlives this process; its socket listens before it runs."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC) as door:
        (folder / SOCKET_NAME).unlink(missing_ok=True)
        mask = os.umask(0o177)
        try:
            with _short_path(folder) as path:
                door.bind(path)
        finally:
            os.umask(mask)
        door.listen(CLIENTS_MAX)
        # As a file, so that nothing of the package is imported.
        command = [sys.executable, "-I", "-S", __file__, str(idle_s)]
        actions = [
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDWR, 0),
            (os.POSIX_SPAWN_DUP2, 0, 1),
            (os.POSIX_SPAWN_DUP2, 0, 2),
            (os.POSIX_SPAWN_DUP2, door.fileno(), _DOOR),
        ]
        pid = os.posix_spawn(command[0], command, {}, file_actions=actions, setsid=True)
        os.waitpid(pid, 0)  # the holder is its child, which is nobody's to wait for


# -- the holder ------------------------------------------------------------------------------------


class Holder:
    """Holds descriptors by name, and serves those who may have them, until nobody has come for
    ``idle_s``.
    """

    def __init__(self, door: socket.socket, idle_s: float) -> None:
        self._door = door
        self._idle_s = idle_s
        self._kept: dict[str, int] = {}
        self._lines = 0
        self._selector = selectors.DefaultSelector()
        self._selector.register(door, selectors.EVENT_READ)

    def run(self) -> None:
        """Serve until the idle time is over."""
        until = time.monotonic() + self._idle_s
        while self._lines or time.monotonic() < until:
            left_s = None if self._lines else max(until - time.monotonic(), 0.0)
            for key, _ in self._selector.select(left_s):
                line = key.fileobj
                assert isinstance(line, socket.socket)
                if line is self._door:
                    self._accept()
                elif not self._serve(line):
                    self._selector.unregister(line)
                    self._lines -= 1
                    line.close()
                    until = time.monotonic() + self._idle_s

    def _accept(self) -> None:
        line, _ = self._door.accept()
        if self._lines >= CLIENTS_MAX or not _is_own(line):
            line.close()
            return
        line.settimeout(ANSWER_S)
        self._selector.register(line, selectors.EVENT_READ)
        self._lines += 1

    def _serve(self, line: socket.socket) -> bool:
        """Answer one request; False if the connection has ended or is not understood."""
        try:
            data, descriptors = _receive(line)
            verb, name = data[:1], data[1:].decode(errors="replace")
            if verb == _PUT and len(descriptors) == 1 and name:
                line.send(_DONE if self._keep(name, descriptors[0]) else _FULL)
            elif data == _TAKE and not descriptors:
                for each, descriptor in self._kept.items():
                    socket.send_fds(line, [each.encode()], [descriptor])
                line.send(_DONE)
            elif verb == _FORGET and not descriptors:
                if name in self._kept:
                    os.close(self._kept.pop(name))
                line.send(_DONE)
            else:
                for descriptor in descriptors:
                    os.close(descriptor)
                return False
        except OSError:
            return False
        return True

    def _keep(self, name: str, descriptor: int) -> bool:
        if name in self._kept:
            os.close(self._kept.pop(name))
        if len(self._kept) >= KEPT_MAX:
            os.close(descriptor)
            return False
        self._kept[name] = descriptor
        return True


if __name__ == "__main__":
    if os.fork():
        os._exit(0)
    os.chdir("/")
    Holder(socket.socket(fileno=_DOOR), float(sys.argv[1])).run()
