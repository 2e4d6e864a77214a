"""Client processes of the kit, which the kernel kills when the kit ends in any way."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvhearth_lab.harness.daemon import clean_environment, failures_since

_PR_SET_PDEATHSIG = 1


def end_with(parent: int) -> None:
    """Let the kernel kill this process, even a stopped one, when the thread that started it ends;
    the kit starts processes on its main thread. ``parent`` is that thread's process.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:  # the parent ended before the prctl call
        os.kill(os.getpid(), signal.SIGKILL)


ANSWER_S = 30.0
END_S = 30.0
Line = dict[str, Any]


class Client:
    """One client process.

    Args:
        name: name for people and for its log.
        folder: folder of its log.
        start: parameters of the process, as JSON.
        heard: called on a thread with each line that is no answer.
        module: module whose main is the process.
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        start: Line,
        heard: Callable[[Client, Line], None],
        module: str = "kvhearth_lab.torture.client",
    ) -> None:
        self.name = name
        self.model = str(start["model"])
        self.log_path = folder / f"{name}.log"
        self.doing: tuple[str, float] = ("", 0.0)
        self.expected_end = False
        self._read_to = self.log_path.stat().st_size if self.log_path.exists() else 0
        self._heard = heard
        self._answers: queue.Queue[Line] = queue.Queue()
        self._next_id = 0
        command = [sys.executable, "-m", module, json.dumps(start)]
        command.append(str(os.getpid()))
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=clean_environment(),
            )
        self._ears = threading.Thread(target=self._listen, daemon=True)
        self._ears.start()

    @property
    def alive(self) -> bool:
        """Whether the process runs (or is stopped)."""
        return self.process.poll() is None

    def say(self, do: str, **more: object) -> int:
        """Send a command; returns the number of its answer, 0 if the process is gone."""
        self._next_id += 1
        line = json.dumps({"do": do, "id": self._next_id, **more}) + "\n"
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(line.encode())
            self.process.stdin.flush()
        except (BrokenPipeError, ValueError):
            return 0
        return self._next_id

    def answer(self, number: int, timeout_s: float = ANSWER_S) -> Line | None:
        """Return the answer with this number; None if the process died or took too long."""
        end = time.monotonic() + timeout_s
        while number:
            try:
                found = self._answers.get(timeout=0.05)
            except queue.Empty:
                if time.monotonic() > end:
                    return None
                if not self._ears.is_alive() and self._answers.empty():
                    return None
                continue
            if found.get("id") == number:
                return found
        return None

    def ask(self, do: str, timeout_s: float = ANSWER_S, **more: object) -> Line | None:
        """Send a command and wait for the answer."""
        return self.answer(self.say(do, **more), timeout_s)

    def signal(self, number: int) -> None:
        """Send a signal."""
        self.process.send_signal(number)

    def stops_within(self, timeout_s: float) -> bool:
        """Wait until the process is stopped; False if it is not by then."""
        end = time.monotonic() + timeout_s
        while self.alive and time.monotonic() < end:
            text = Path(f"/proc/{self.process.pid}/stat").read_text(encoding="utf-8")
            if text.rpartition(")")[2].split()[0] == "T":
                return True
            time.sleep(0.01)
        return False

    def kill(self) -> None:
        """Send SIGKILL, and wait for the end of its output."""
        self.expected_end = True
        self.process.kill()
        self._reap()

    def end(self) -> int | None:
        """Let the process close and end; returns its exit status, None if it had to be killed."""
        self.expected_end = True
        self.signal(signal.SIGCONT)
        self.say("end")
        try:
            status = self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            self.signal(signal.SIGUSR1)  # dumps its threads' stacks into its log
            time.sleep(0.3)
            self.process.kill()
            status = None
        self._reap()
        return status

    def new_failures(self) -> list[str]:
        """Return exceptions that it logged or printed since the last call."""
        found, self._read_to = failures_since(self.log_path, self._read_to)
        return found

    def log_tail(self, lines: int = 40) -> str:
        """Return the end of its log."""
        text = (
            self.log_path.read_text(errors="replace", encoding="utf-8")
            if self.log_path.exists()
            else ""
        )
        return "\n".join(text.splitlines()[-lines:])

    def _reap(self) -> None:
        self.process.wait()
        self._ears.join(5.0)
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for data in self.process.stdout:
            try:
                line: Line = json.loads(data)
            except ValueError:
                continue  # cut off by its death
            if "beat" in line:
                self.doing = (line["beat"], line["since"])
            elif "did" in line:
                self._answers.put(line)
            else:
                self._heard(self, line)
