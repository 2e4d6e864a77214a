"""Child processes that start in milliseconds: forked from a process that has everything imported.

Starting an interpreter and importing gRPC takes most of a second, which would dominate tests that
kill hundreds of processes.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvhearth_lab.harness import HUNG_S

TESTS = Path(__file__).resolve().parents[1]
ANSWER_BYTES_MAX = 1 << 12
PRELOADED = (
    "kvhearth_server.cli.app",
    "kvhearth_server.cli.serve",
    "kvhearth_server.daemon",
    "kvhearth_server.transport.web.server",
    "pydantic.v1",  # FastAPI imports it with the first route
    "support.nursery_main:one_command",
    "support.puppet_main",
)


class Child:
    """A process that the nursery forked; has the parts of ``subprocess.Popen`` that tests use."""

    def __init__(self, nursery: Nursery, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._nursery = nursery
        self._descriptor = os.pidfd_open(pid)

    def poll(self) -> int | None:
        """Return the exit status, negative for a signal; None while it runs."""
        return self._wait(0)

    def wait(self, timeout_s: float | None = None) -> int:
        """Wait for the process and return its exit status."""
        status = self._wait(timeout_s)
        if status is None:
            raise subprocess.TimeoutExpired([str(self.pid)], timeout_s or 0)
        return status

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.returncode is None:
            # By descriptor: the number may belong to another process by now.
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._descriptor, number)

    def __del__(self) -> None:
        # Not earlier: another thread may be using the descriptor.
        os.close(self._descriptor)

    def _wait(self, timeout_s: float | None) -> int | None:
        if self.returncode is None:
            poller = select.poll()
            poller.register(self._descriptor, select.POLLIN)
            if not poller.poll(None if timeout_s is None else timeout_s * 1000):
                return None
            self.returncode = self._nursery.bury(self)
        return self.returncode


class Nursery:
    """The forking process; thread-safe.

    Args:
        python: its interpreter; this process's by default.
        paths: its module search path, besides the tests; this process's by default.
        preloaded: modules that it imports ("module:function" to call that, too); those that most
            tests need by default.
        environment: variables that override this process's.
    """

    def __init__(
        self,
        python: str = sys.executable,
        *,
        paths: Sequence[str] | None = None,
        preloaded: Sequence[str] = PRELOADED,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._lock = threading.Lock()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        variables = {n: v for n, v in os.environ.items() if not n.startswith("KVHEARTH_")}
        variables |= environment or {}
        found = os.pathsep.join([str(TESTS), *(sys.path if paths is None else paths)])
        with theirs:
            self._process = subprocess.Popen(
                [python, "-m", "support.nursery_main", str(theirs.fileno()), *preloaded],
                pass_fds=[theirs.fileno()],
                env={**variables, "PYTHONPATH": found},
            )
        self._control.settimeout(HUNG_S)
        self.pid = self._process.pid

    def birth(self, run: str, files: Sequence[int] = (), **arguments: Any) -> Child:
        """Fork a child that calls ``run`` ("module:function") with copies of the descriptors
        ``files`` and with ``arguments``, and exits with the return value.
        """
        answer = self._ask({"run": run, "arguments": arguments}, files)
        return Child(self, answer["pid"])

    def bury(self, child: Child) -> int:
        """Return the exit status of a child that has ended."""
        with self._lock:
            if child.returncode is not None:
                return child.returncode
            child.returncode = self._say({"bury": child.pid}, ())["status"]
            return child.returncode

    def close(self) -> None:
        """End the forking process, and with it all children."""
        self._control.close()
        self._process.wait()

    def _ask(self, request: dict[str, Any], files: Sequence[int]) -> Any:
        with self._lock:
            return self._say(request, files)

    def _say(self, request: dict[str, Any], files: Sequence[int]) -> Any:
        socket.send_fds(self._control, [json.dumps(request).encode()], list(files))
        return json.loads(self._control.recv(ANSWER_BYTES_MAX))


_nursery: Nursery | None = None
_making = threading.Lock()


def running() -> Nursery | None:
    """Return this process's nursery, if it has been started."""
    return _nursery


def nursery() -> Nursery:
    """Return this process's nursery."""
    global _nursery
    with _making:
        if _nursery is None:
            _nursery = Nursery()
            atexit.register(_nursery.close)
        return _nursery
