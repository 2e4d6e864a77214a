"""A daemon process for tests, torture and benchmarks: its start, its ends, and its observation from
outside.
"""

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
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Protocol

from kvhearth import native
from kvhearth.errors import KVHearthError, Reason
from kvhearth.failpoints import ENVIRONMENT_NAME
from kvhearth.url import ATTACH_SOCKET
from kvhearth_lab.harness import HUNG_S
from kvhearth_server.cli.admin_client import AdminClient
from kvhearth_server.config.load import ENV_PREFIX, flag_of
from kvhearth_server.engine.snapshot import Stats

_SHOWN_CHARS = 1500
_TRACEBACK = "Traceback (most recent call last)"
_GATEWAY_ENDED = "gateway.ended"
_EXPECTED = "socket.accept() out of system resource"


class Process(Protocol):
    """The part of ``subprocess.Popen`` that a daemon's process needs."""

    pid: int

    def poll(self) -> int | None:
        """Return the exit status, negative for a signal; None while it runs."""

    def wait(self, timeout: float | None = None, /) -> int:
        """Wait for the end and return the exit status.

        Raises:
            subprocess.TimeoutExpired: the process still runs.
        """

    def kill(self) -> None:
        """Send SIGKILL."""

    def terminate(self) -> None:
        """Send SIGTERM."""

    def send_signal(self, sig: int, /) -> None:
        """Send a signal, unless the process has ended."""


Starter = Callable[[list[str], Mapping[str, str], IO[bytes]], Process]
"""Starts a daemon with these flags of ``kvhearth serve``, these additional variables, and its
output to the file.
"""


def clean_environment() -> dict[str, str]:
    """Return this process's variables without the operator's settings, which must not take part."""
    kept = {
        name: text
        for name, text in os.environ.items()
        if not name.startswith(ENV_PREFIX) or name == native.VARIABLE
    }
    kept.setdefault("NUMPY_MADVISE_HUGEPAGE", "0")  # as `kvhearth` sets it for itself
    return kept


def module(*words: str, before: Sequence[str] = ()) -> Starter:
    """Return a starter that runs a module: its name, and its arguments before the flags. ``before``
    is a command that executes another one.
    """

    def start(
        flags: list[str], environment: Mapping[str, str], log: IO[bytes]
    ) -> subprocess.Popen[bytes]:
        command = [*before, sys.executable, "-m", *words, *flags]
        variables = {**clean_environment(), **environment}
        return subprocess.Popen(command, stdout=log, stderr=log, env=variables)

    return start


def tied(clock_file: Path | None = None, before: Sequence[str] = ()) -> Starter:
    """Return a starter of a daemon that ends with this process.

    Args:
        clock_file: file that its clocks follow (``harness.faults``); None for the machine's clocks.
        before: a command that executes another one, in place of itself.
    """
    clock = str(clock_file or "")
    words = ("kvhearth_lab.harness.daemon_main", str(os.getpid()), clock, "serve")
    return module(*words, before=before)


SERVE = module("kvhearth_server.cli.app", "serve")
"""Starts ``kvhearth serve`` and nothing else."""


FLEET_KEY = b"0" * 64
"""Key of the fleet that all daemons here are of."""


def _fleet_key_file(folder: Path) -> Path:
    path = folder / "fleet.key"
    path.touch(0o600)
    path.write_bytes(FLEET_KEY)
    return path


class Daemon:
    """One daemon's settings and directories, and its process, if it runs.

    Args:
        folder: folder for sockets and the log; a short path.
        arena_dir: directory of the arena's files; None for anonymous memory.
        settings: by field name; read at each start.
        starter: starts the process.

    Attributes:
        environment: variables of the process in addition to this process's own.
        starts: number of starts so far.
    """

    def __init__(
        self,
        folder: Path,
        arena_dir: Path | None,
        settings: Mapping[str, object],
        starter: Starter = SERVE,
    ) -> None:
        self.folder = folder
        self.socket_dir = folder / "s"
        self.log_path = folder / "daemon.log"
        self.arena_dir = arena_dir
        self.settings = {"log_format": "json", **settings}
        if settings.get("remote") and "remote_fleet_key_file" not in settings:
            self.settings["remote_fleet_key_file"] = _fleet_key_file(folder)
        self.environment: dict[str, str] = {}
        self.starts = 0
        self.process: Process | None = None
        self._starter = starter
        self._launched_s = 0.0
        self._log_from = 0
        self._read_to = 0

    # -- the process -------------------------------------------------------------------------------

    def launch(self, fault: str = "") -> Process:
        """Start a process without waiting for it; ``fault`` is ``point:count``."""
        assert self.dead, "end the running daemon first"
        self.starts += 1
        armed = {ENVIRONMENT_NAME: fault} if fault else {}
        with self.log_path.open("ab") as log:
            self._log_from = log.tell()
            self._launched_s = time.monotonic()
            self.process = self._starter(self.flags(), {**self.environment, **armed}, log)
        return self.process

    def flags(self) -> list[str]:
        """Return settings and directories as flags of ``kvhearth serve``."""
        values = {**self.settings, "socket_dir": self.socket_dir}
        if self.arena_dir is not None:
            values["arena_dir"] = self.arena_dir
        flags = []
        for name, value in values.items():
            flag = flag_of(name)
            if isinstance(value, bool):
                flags.append(flag if value else f"--no-{flag[2:]}")
                continue
            for each in value if isinstance(value, list) else [value]:
                flags += [flag, str(each)]
        return flags

    def wait_ready(self) -> bool:
        """Wait until it accepts clients; False if it ended, or after ``HUNG_S``."""
        end = time.monotonic() + HUNG_S
        while not self.dead and time.monotonic() < end:
            if self._answers():
                return True
            time.sleep(0.005)
        return False

    def start(self, fault: str = "") -> bool:
        """Start and wait until it accepts clients; False if an armed fault ended it before.

        Raises:
            KVHearthError: it does not come up; with the end of its log.
        """
        self.launch(fault)
        if self.wait_ready():
            return True
        if fault and self.exit_code == -signal.SIGKILL:
            return False
        raise self._not_up()

    def _not_up(self) -> KVHearthError:
        how = "does not come up" if self.exit_code is None else f"ended with {self.exit_code}"
        return KVHearthError(Reason.INTERNAL, f"the daemon {how}\n{self.log_tail()}")

    def _answers(self) -> bool:
        """Whether the process accepts on the attach socket; the file may be that of a dead one."""
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(HUNG_S)
            try:
                probe.connect(str(self.socket_dir / ATTACH_SOCKET))
                data = probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
            except OSError:
                return False
        return bool(struct.unpack("3i", data)[0] == self.pid)

    def kill(self) -> None:
        """Send SIGKILL, and wait for the end."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def restart(self, fault: str = "") -> bool:
        """Kill it with SIGKILL, then start on the same directories."""
        self.kill()
        return self.start(fault)

    def terminate(self, timeout_s: float = HUNG_S) -> int:
        """Send SIGTERM. Return the exit status.

        Raises:
            subprocess.TimeoutExpired: it still runs.
        """
        assert self.process is not None
        self.process.terminate()
        return self.process.wait(timeout_s)

    def stop(self) -> None:
        """Send SIGSTOP."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Send SIGCONT."""
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)

    @property
    def dead(self) -> bool:
        """Whether no process runs. A stopped one counts as running."""
        return self.process is None or self.process.poll() is not None

    @property
    def exit_code(self) -> int | None:
        """Exit status of the last process; None while it runs."""
        return None if self.process is None else self.process.poll()

    @property
    def pid(self) -> int:
        """ID of the last process."""
        assert self.process is not None
        return self.process.pid

    # -- calls -------------------------------------------------------------------------------------

    def url(self, options: str = "call_ms=10000&lookup_ms=10000&heartbeat_ms=200") -> str:
        """Return the URL for clients."""
        return f"kvhearth+unix://{self.socket_dir}?{options}"

    def remote_url(
        self,
        options: str = "call_ms=10000&lookup_ms=10000&heartbeat_ms=200",
        host: str = "127.0.0.1",
    ) -> str:
        """Return the URL for clients of its gateway, which the setting ``listen`` starts."""
        port = str(self.settings["listen"]).rpartition(":")[2]
        return f"kvhearth://{host}:{port}?{options}"

    def operator(self, deadline_s: float = HUNG_S) -> AdminClient:
        """Return a client of the operators' door."""
        return AdminClient(self.socket_dir, deadline_s)

    def stats(self) -> Stats:
        """Return the statistics that ``kvhearth stat`` shows; raises as ``AdminClient``."""
        return self.operator().stats()

    def members(self) -> list[str]:
        """Return ``engine/rank:state`` of each member of a group; raises as ``AdminClient``."""
        found = self.operator().sessions().sessions
        return sorted(f"{one.engine_id}/{one.rank}:{one.state}" for one in found)

    # -- the log -----------------------------------------------------------------------------------

    def log_text(self) -> str:
        """Return the output of all starts."""
        return (
            self.log_path.read_text(errors="replace", encoding="utf-8")
            if self.log_path.exists()
            else ""
        )

    def log_tail(self, lines: int = 30) -> str:
        """Return the end of the log, for messages."""
        return "\n".join(self.log_text().splitlines()[-lines:])

    def own_lines(self) -> list[str]:
        """Return the complete lines of the current start's output."""
        if not self.log_path.exists():
            return []
        said = self.log_path.read_bytes()[self._log_from :]
        return said[: said.rfind(b"\n") + 1].decode(errors="replace").splitlines()

    def ready(self) -> dict[str, Any]:
        """Wait until the process reports that it is ready, and return that line's fields, with
        ``seconds`` since its start.

        Raises:
            KVHearthError: it does not come up; with the end of its log.
        """
        return self._said("ready")

    def populated(self) -> dict[str, Any]:
        """Wait until its arena has all the memory that it will have; as ``ready``."""
        return self._said("arena.populated")

    def _said(self, event: str) -> dict[str, Any]:
        while True:
            waited_s = time.monotonic() - self._launched_s
            for line in self.own_lines():
                said: dict[str, Any] = json.loads(line) if line.startswith("{") else {}
                if said.get("event") == event:
                    return {**said, "seconds": waited_s}
            if self.dead or waited_s > HUNG_S:
                raise self._not_up()
            time.sleep(0.002)

    def complaints(self, count: int = 12) -> str:
        """Return its last warnings and errors, each once, and printed lines that are no log
        lines.
        """
        found: dict[str, str] = {}
        for text in self.log_text().splitlines():
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
        found, self._read_to = failures_since(self.log_path, self._read_to)
        return found

    # -- the kernel's figures ----------------------------------------------------------------------

    def descriptor_count(self, pid: int = 0, *, segments: bool = True) -> int:
        """Return the number of open descriptors.

        Args:
            pid: of a process that it started; 0 for its own.
            segments: count those of segment files, too, which it keeps for good.
        """
        paths = list(Path(f"/proc/{pid or self.pid}/fd").iterdir())
        if segments:
            return len(paths)
        count = 0
        for path in paths:
            with contextlib.suppress(OSError):
                count += not os.readlink(path).endswith((".segment", ".segment.new"))
        return count

    def children(self) -> list[int]:
        """Return the processes that it started."""
        with contextlib.suppress(OSError):
            text = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text(encoding="utf-8")
            return [int(word) for word in text.split()]
        return []

    def gateways(self) -> list[int]:
        """Return its gateway processes that serve."""
        said = [line for line in self.own_lines() if '"gateway.serving"' in line]
        serving = {json.loads(line)["pid"] for line in said if line.startswith("{")}
        return [pid for pid in self.children() if pid in serving]

    def private_bytes(self, pid: int = 0) -> int:
        """Return the resident memory of the process, or one that it started, without the shared
        arena.
        """
        status = Path(f"/proc/{pid or self.pid}/status").read_text(encoding="utf-8")
        found = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
        return sum(int(found[name].split()[0]) for name in ("RssAnon", "RssFile")) * 1024

    def anonymous_bytes(self) -> int:
        """Return the private memory without a file, which grows with the index."""
        text = Path(f"/proc/{self.pid}/smaps_rollup").read_text(encoding="utf-8")
        line = next(line for line in text.splitlines() if line.startswith("Anonymous:"))
        return int(line.split()[1]) * 1024

    def cpu_s(self) -> float:
        """Return the processor time of all its live threads."""
        nanoseconds = 0
        for task in Path(f"/proc/{self.pid}/task").iterdir():
            with contextlib.suppress(FileNotFoundError):
                nanoseconds += int((task / "schedstat").read_text(encoding="utf-8").split()[0])
        return nanoseconds / 1e9


def failures_since(log_path: Path, offset: int) -> tuple[list[str], int]:
    """Return the exceptions in a log after ``offset`` bytes, except those that a fault must cause,
    and the log's size.
    """
    if not log_path.exists():
        return [], 0
    with log_path.open(errors="replace", encoding="utf-8") as log:
        log.seek(offset)
        lines, size = log.read().splitlines(), log.tell()
    found: list[str] = []
    for number, line in enumerate(lines):
        if line.startswith("{"):
            with contextlib.suppress(ValueError):
                said = json.loads(line)
                if said.get("event") == _GATEWAY_ENDED and said["code"] != -signal.SIGKILL:
                    found.append(f"a gateway process ended by itself with {said['code']}")
                if "exception" in said and not str(said.get("event")).startswith(_EXPECTED):
                    found.append(f"{said.get('event')}: {said['exception']}"[-_SHOWN_CHARS:])
        elif line.startswith(_TRACEBACK):
            found.append("\n".join(lines[number : number + 24])[:_SHOWN_CHARS])
    return found, size
