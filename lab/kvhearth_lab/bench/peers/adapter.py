"""A peer's process: started with the peer's interpreter, driven by lines of JSON, always ended."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvhearth_server.config.load import ENV_PREFIX

PREPARE_S = 300.0
RUN_S = 120.0
CLOSE_S = 60.0
_ANSWER_BYTES_MAX = 1 << 20
_READ_BYTES = 1 << 16
_REASON_CHARS_MAX = 300
_KILL_S = 10.0
_LOOK_S = 0.5
"""Interval at which the process is checked for its end."""
_HARNESS = Path(__file__).with_name("adapters") / "harness.py"
_NOT_INSTALLED = "not-installed"


class PeerFailed(Exception):
    """A peer cannot be measured; the text gives the reason in one line."""


def parse_answer(line: bytes) -> dict[str, Any]:
    """Parse the object of one line.

    Raises:
        PeerFailed: it is no JSON object.
    """
    try:
        answer = json.loads(line)
    except ValueError:
        answer = None
    if not isinstance(answer, dict):
        raise PeerFailed(f"its adapter answers no JSON object: {reason_of(repr(line[:100]))}")
    return answer


def seconds_of(answer: Mapping[str, Any], name: str = "seconds") -> float:
    """Return a time of one measurement.

    Raises:
        PeerFailed: the time is missing or not positive.
    """
    seconds = answer.get(name)
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds > 0:
        raise PeerFailed(f"its adapter answers no {name}: {reason_of(repr(seconds))}")
    return float(seconds)


def parse_count(answer: Mapping[str, Any], name: str) -> int:
    """Return a field that counts something.

    Raises:
        PeerFailed: the field is missing or no count.
    """
    count = answer.get(name)
    if isinstance(count, bool) or not isinstance(count, int) or count < 0:
        raise PeerFailed(f"its adapter answers no {name}: {reason_of(repr(count))}")
    return count


def reason_of(text: str) -> str:
    """Return the last non-empty line, short enough for a report."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    last = lines[-1] if lines else "nothing was said"
    return last if len(last) <= _REASON_CHARS_MAX else last[: _REASON_CHARS_MAX - 3] + "..."


def check_installed(python: Path) -> None:
    """Check a peer's environment before anything is started.

    Raises:
        PeerFailed: there is no such interpreter, or the environment contains a note why it does not
            work (``not-installed`` beside ``bin``).
    """
    note = python.parent.parent / _NOT_INSTALLED
    if note.exists():
        raise PeerFailed(
            f"not installed: {reason_of(note.read_text(errors='replace', encoding='utf-8'))}"
        )
    if not os.access(python, os.X_OK):
        raise PeerFailed(f"no interpreter at {python}")


def adapter_of(python: Path, peer: str, folder: Path) -> Adapter:
    """Start the adapter of a peer.

    Args:
        python: the peer's interpreter.
        peer: prefix of the peer's file in ``adapters/``, such as ``lmcache`` or ``mooncake``.
        folder: folder for logs and sockets; a short path.
    """
    file = _HARNESS.with_name(f"{peer}_peer.py")
    return Adapter([str(python), str(_HARNESS), str(file), str(folder)], folder)


class Adapter:
    """The process of a peer.

    Args:
        command: what to run, with the interpreter first.
        folder: folder for logs and sockets; a short path.
        environment: variables in addition to this process's.
    """

    def __init__(
        self, command: Sequence[str], folder: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        self._log_path = folder / "adapter.log"
        self._rest = b""
        self._leftovers: list[Path] = []
        kept = {name: text for name, text in os.environ.items() if not name.startswith(ENV_PREFIX)}
        kept.pop("PYTHONPATH", None)
        with self._log_path.open("wb") as log:
            # A session of its own, so that its daemons always end with it.
            self._process = subprocess.Popen(
                list(command),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**kept, **(environment or {})},
                start_new_session=True,
            )

    def prepare(self, **config: object) -> dict[str, Any]:
        """Start the peer and return its description of itself.

        Raises:
            PeerFailed: it does not start.
        """
        answer = self.ask("prepare", PREPARE_S, **config)
        self._leftovers = [Path(name) for name in answer.pop("leftovers", [])]
        return answer

    def run(self, measure: str, number: int) -> dict[str, Any]:
        """Run one measurement. Raises PeerFailed."""
        return self.ask("run", RUN_S, measure=measure, number=number)

    def lookups(self, count: int) -> list[float]:
        """Return the seconds of each of ``count`` lookups. Raises PeerFailed."""
        answer = self.ask("lookup", RUN_S, count=count).get("seconds")
        if not isinstance(answer, list) or len(answer) != count:
            raise PeerFailed("its adapter answers no times of lookups")
        return [seconds_of({"seconds": each}) for each in answer]

    def ask(self, op: str, deadline_s: float, **fields: object) -> dict[str, Any]:
        """Send a request and wait for its answer.

        Raises:
            PeerFailed: the process ended or is late.
        """
        self.tell(json.dumps({"op": op, **fields}).encode() + b"\n")
        return parse_answer(self.line(op, deadline_s))

    def tell(self, line: bytes) -> None:
        """Send a line. Raises PeerFailed: the process ended."""
        stdin = self._process.stdin
        assert stdin is not None
        try:
            stdin.write(line)
            stdin.flush()
        except BrokenPipeError:
            raise self._ended() from None

    def close(self) -> None:
        """End the process, which is asked first, and everything that it started."""
        with contextlib.suppress(PeerFailed):
            if self._process.poll() is None:
                self.ask("close", CLOSE_S)
        self.end()

    def wait_end(self, deadline_s: float) -> None:
        """Wait until the process has ended well.

        Raises:
            PeerFailed: it failed, or is late.
        """
        try:
            status = self._process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            raise PeerFailed(f"its program does not end: {self._said()}") from None
        if status:
            raise self._ended()

    def end(self) -> None:
        """End the process and everything that it started."""
        for end in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, end)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_KILL_S)
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()
        for path in self._leftovers:
            path.unlink(missing_ok=True)

    def line(self, op: str, deadline_s: float) -> bytes:
        """Return the next line that the process writes, without its end.

        Raises:
            PeerFailed: it ended or is late; ``op`` says with what.
        """
        stdout, end = self._process.stdout, time.monotonic() + deadline_s
        assert stdout is not None
        while b"\n" not in self._rest:
            left = end - time.monotonic()
            if left <= 0:
                raise PeerFailed(f"its adapter does not answer to {op} in time: {self._said()}")
            gone = self._process.poll() is not None
            if not select.select([stdout], [], [], 0 if gone else min(left, _LOOK_S))[0]:
                if gone:  # its children may still hold the pipe open
                    raise self._ended()
                continue
            part = os.read(stdout.fileno(), _READ_BYTES)
            if not part:
                raise self._ended()
            self._rest += part
            if len(self._rest) > _ANSWER_BYTES_MAX:
                raise PeerFailed("its adapter answers without end")
        line, _, self._rest = self._rest.partition(b"\n")
        return line

    def _ended(self) -> PeerFailed:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_KILL_S)
        return PeerFailed(f"its adapter ended with {self._process.returncode}: {self._said()}")

    def _said(self) -> str:
        return reason_of(self._log_path.read_text(errors="replace", encoding="utf-8"))


def interpreters(given: Mapping[str, Path | None]) -> tuple[dict[str, Path], dict[str, str]]:
    """Return the usable peers' interpreters, and the reasons why the others cannot be used, by
    name.
    """
    usable: dict[str, Path] = {}
    skipped: dict[str, str] = {}
    for name, python in given.items():
        if python is None:
            skipped[name] = f"no interpreter was given with --{name}"
            continue
        try:
            check_installed(python)
        except PeerFailed as failed:
            skipped[name] = str(failed)
        else:
            usable[name] = python
    return usable, skipped
