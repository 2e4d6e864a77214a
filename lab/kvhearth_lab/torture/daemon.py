"""The daemon under test: a real ``kvhearth serve`` process, observed from outside."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import grpc

from kvhearth.failpoints import ENVIRONMENT_NAME
from kvhearth.proto.v1 import admin_pb2, admin_pb2_grpc
from kvhearth.url import ADMIN_TOKEN_FILE, ATTACH_SOCKET, GRPC_SOCKET
from kvhearth_server.config.load import ENV_PREFIX
from kvhearth_server.transport.rpc.admin import ADMIN_TOKEN_KEY

Reply = TypeVar("Reply")

READY_S = 40.0
END_S = 30.0
STATS_S = 20.0
_SHOWN_CHARS = 1500
_SKEWED = "kvhearth_lab.harness.daemon_main"
_TRACEBACK = "Traceback (most recent call last)"
_EXPECTED = "socket.accept() out of system resource"
_URL_OPTIONS = "call_ms=8000&lookup_ms=8000&attach_ms=8000&heartbeat_ms=200"


class Daemon:
    """One daemon's settings and directories, and its process, if it runs.

    Args:
        folder: folder for sockets and the log; a short path.
        flags: flags of ``kvhearth serve``.
        environment: variables in addition to this process's own.
        clock_file: file that its clocks follow (``clock``); None for the machine's clocks.
    """

    def __init__(
        self,
        folder: Path,
        flags: list[str],
        environment: Mapping[str, str],
        clock_file: Path | None,
    ) -> None:
        self.socket_dir = folder / "s"
        self.log_path = folder / "daemon.log"
        self.starts = 0
        self.process: subprocess.Popen[bytes] | None = None
        self._environment = dict(environment)
        self._words = ["serve", *flags, "--socket-dir", str(self.socket_dir)]
        self._clock_file = clock_file
        self._read_to = 0

    @property
    def url(self) -> str:
        """URL for clients."""
        return f"kvhearth+unix://{self.socket_dir}?{_URL_OPTIONS}"

    @property
    def alive(self) -> bool:
        """Whether a process runs (or is stopped)."""
        return self.process is not None and self.process.poll() is None

    @property
    def pid(self) -> int:
        """Process id of the last process."""
        assert self.process is not None
        return self.process.pid

    def launch(self, fault: str = "") -> None:
        """Start a process without waiting; ``fault`` is ``point:count``."""
        assert not self.alive, "one daemon at a time"
        self.starts += 1
        kept = {name: text for name, text in os.environ.items() if not name.startswith(ENV_PREFIX)}
        kept |= self._environment
        if fault:
            kept[ENVIRONMENT_NAME] = fault
        clock = str(self._clock_file or "")
        command = [sys.executable, "-m", _SKEWED, str(os.getpid()), clock, *self._words]
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=kept)

    def wait_ready(self) -> bool:
        """Wait until it accepts clients; False if it ended, or the time is over."""
        end = time.monotonic() + READY_S
        while time.monotonic() < end and self.alive:
            if self._answers():
                return True
            time.sleep(0.01)
        return False

    def signal(self, number: int) -> None:
        """Send a signal to the process."""
        if self.process is not None:
            self.process.send_signal(number)

    def kill(self) -> None:
        """Send SIGKILL and wait for the end."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def terminate(self) -> int | None:
        """Send SIGTERM and return the exit status, None if it had to be killed."""
        assert self.process is not None
        self.process.terminate()
        try:
            return self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            self.kill()
            return None

    def wait_end(self, timeout_s: float) -> int | None:
        """Wait for the process to end by itself; returns its status, None if it did not."""
        assert self.process is not None
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def _answers(self) -> bool:
        """Whether this process accepts on the attach socket; the file may be that of a dead one."""
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(READY_S)
            try:
                probe.connect(str(self.socket_dir / ATTACH_SOCKET))
                data = probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
            except OSError:
                return False
        return bool(struct.unpack("3i", data)[0] == self.pid)

    # -- observations ------------------------------------------------------------------------------

    def stats(self, *, check_books: bool = True) -> admin_pb2.StatsResponse:
        """Return its statistics; raises as ``_ask``."""
        request = admin_pb2.StatsRequest(check_books=check_books)
        return self._ask(lambda stub, more: stub.Stats(request, **more))

    def members(self) -> list[str]:
        """Return ``engine/rank:state`` and the process id of each session; raises as ``_ask``."""
        request = admin_pb2.ListSessionsRequest()
        found = self._ask(lambda stub, more: stub.ListSessions(request, **more))
        return sorted(
            f"{one.engine_id}/{one.rank}:{one.state} pid {one.pid}" for one in found.sessions
        )

    def _ask(
        self, call: Callable[[admin_pb2_grpc.AdminServiceStub, dict[str, Any]], Reply]
    ) -> Reply:
        """Make one call on a channel of its own.

        Raises:
            grpc.RpcError: the daemon does not answer.
            OSError: the daemon has no token yet.
        """
        token = (self.socket_dir / ADMIN_TOKEN_FILE).read_text()
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0)]
        target = f"unix:{self.socket_dir / GRPC_SOCKET}"
        with grpc.insecure_channel(target, options=options) as channel:
            stub = admin_pb2_grpc.AdminServiceStub(channel)
            more = {"metadata": ((ADMIN_TOKEN_KEY, token),), "timeout": STATS_S}
            return call(stub, more)

    def descriptors(self) -> int:
        """Count its open descriptors, except those of segment files, which it keeps for good."""
        count = 0
        folder = Path(f"/proc/{self.pid}/fd")
        for name in os.listdir(folder):
            with contextlib.suppress(OSError):
                count += not os.readlink(folder / name).endswith((".segment", ".segment.new"))
        return count

    def children(self) -> list[int]:
        """Return the processes that it started."""
        with contextlib.suppress(OSError):
            text = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text()
            return [int(word) for word in text.split()]
        return []

    def complaints(self, count: int = 12) -> str:
        """Return its last warnings and errors, each once, and printed lines that are no log
        lines.
        """
        found: dict[str, str] = {}
        for text in self.log_path.read_text(errors="replace").splitlines():
            try:
                line = json.loads(text)
            except ValueError:
                found[text] = text
                continue
            if line.get("level") in ("error", "critical", "warning"):
                what = line.get("exception", "") or line
                found[str(line.get("event"))] = f"{line.get('event')}: {what}"[-_SHOWN_CHARS:]
        return "\n".join(list(found.values())[-count:])

    def new_failures(self) -> list[str]:
        """Return exceptions that it logged or printed since the last call."""
        if not self.log_path.exists():
            return []
        with self.log_path.open(errors="replace") as log:
            log.seek(self._read_to)
            text = log.read()
            self._read_to = log.tell()
        return failures_in(text)

    def stop(self) -> None:
        """Send SIGSTOP."""
        self.signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Send SIGCONT."""
        self.signal(signal.SIGCONT)


def failures_in(text: str) -> list[str]:
    """Return the exceptions in a log, except those that a fault of the kit must cause."""
    found: list[str] = []
    lines = text.splitlines()
    for number, line in enumerate(lines):
        if line.startswith("{"):
            with contextlib.suppress(ValueError):
                said = json.loads(line)
                if "exception" in said and not str(said.get("event")).startswith(_EXPECTED):
                    found.append(f"{said.get('event')}: {said['exception']}"[-_SHOWN_CHARS:])
        elif line.startswith(_TRACEBACK):
            found.append("\n".join(lines[number : number + 24])[:_SHOWN_CHARS])
    return found
