"""Attacks on a daemon: their interface, the processes that they run in, and the table of all."""

from __future__ import annotations

import codecs
import contextlib
import importlib
import json
import os
import pkgutil
import queue
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import grpc

import kvhearth_lab.hostile
from kvhearth.errors import KVHearthError, Reason
from kvhearth_lab.harness.client_process import end_with
from kvhearth_lab.harness.daemon import clean_environment

TENANT_A = "a"
NOBODY = "nobody"
SECOND_UID = "second_uid"
NEEDS: Mapping[str, str] = {
    SECOND_UID: "the attacker and the good client are one user and one tenant: run it as root"
}
"""Conditions that attacks may need, each with the reason why such an attack is skipped."""
NICENESS = 10
START_S = 60.0
_TOLD_S = 0.1
_END_S = 5.0
_DESCRIPTORS = 65536
_CUT_PAUSE_S = 0.01
_SHOWN_CHARS = 1500


@dataclass(frozen=True)
class Target:
    """Facts that an attacker knows about the daemon, and the uids of the run.

    Attributes:
        socket_dir: directory of ``attach.sock``, ``calls.sock`` and ``grpc.sock``.
        http: HOST:PORT of the daemon's HTTP.
        folder: directory for files of an attack; every user may write there.
        daemon_pid: process of the daemon.
        good_pid: process of the good client.
        uid_a: user of tenant a; of the only tenant without a second uid.
        uid_b: user of tenant b, the good client's.
        uid_nobody: user of no tenant; without a second uid the same as the others.
        page_bytes: bytes of a block in the good client's contract.
        gateway: HOST:PORT of the daemon's gateway, if the attack wants one; else "".
        token_file: file with the token of tenant a for the gateway.
    """

    socket_dir: str
    http: str
    folder: str
    daemon_pid: int
    good_pid: int
    uid_a: int
    uid_b: int
    uid_nobody: int
    page_bytes: int
    gateway: str = ""
    token_file: str = ""

    @property
    def url(self) -> str:
        """URL for ``kvhearth.connect``, with long deadlines: attackers are patient."""
        return f"kvhearth+unix://{self.socket_dir}?lookup_ms=10000&call_ms=10000&attach_ms=10000"

    @property
    def http_address(self) -> tuple[str, int]:
        """Host and port of the daemon's HTTP."""
        host, _, port = self.http.rpartition(":")
        return host, int(port)

    def uid_of(self, who: str) -> int:
        """Return the user of ``TENANT_A`` or ``NOBODY``."""
        return {TENANT_A: self.uid_a, NOBODY: self.uid_nobody}[who]


class Attack:
    """One attack: a subclass in a module ``attacks_*`` of this package is in the table.

    A subclass overrides ``run``, which processes of its own execute as ``who`` until ``stop`` kills
    them with SIGKILL. An attack that needs something else overrides ``start`` and ``stop``. Its
    module imports all that ``run`` uses: other users may be unable to read the interpreter's files.

    The machine may have two cores only. Attackers therefore run with ``NICENESS``, and an attack
    whose ``run`` computes much sets ``pause_s``: measured is what the daemon does for an
    attacker, not the processor's share that the kernel gives any busy process.

    Attributes:
        name: name in the report and for ``--only``.
        help: one sentence for people.
        needs: keys of ``NEEDS``; the attack is skipped where one of them does not hold.
        who: user of its processes: ``TENANT_A`` or ``NOBODY``.
        processes: number of its processes.
        pause_s: pause of each process after each round of ``run``.
        seconds_least: shortest time under attack that shows what it does.
        settle_s: longest time until memory and descriptors are back.
        arena: whether the daemon's arena is in files, so that it has a durable catalogue.
        gateway: whether the daemon has a gateway; the good clients then use it, too.
        floods: whether it takes the loop's time with work on many connections. Nothing divides that
            time among peers: the good client's p99 is told, but only its deadlines count.
    """

    name: ClassVar[str] = ""
    help: ClassVar[str] = ""
    needs: ClassVar[frozenset[str]] = frozenset()
    who: ClassVar[str] = TENANT_A
    processes: ClassVar[int] = 1
    pause_s: ClassVar[float] = 0.0
    seconds_least: ClassVar[float] = 0.0
    settle_s: ClassVar[float] = 10.0
    arena: ClassVar[bool] = False
    gateway: ClassVar[bool] = False
    floods: ClassVar[bool] = False

    def __init__(self) -> None:
        self._attackers: list[Attacker] = []

    def settings(self, folder: Path) -> Mapping[str, object]:
        """Return settings of the daemon beyond the suite's; the attacks of equal settings share a
        daemon.
        """
        return {}

    def run(self, target: Target, number: int) -> Iterator[None]:
        """Attack, in a process of its own, and yield after each round.

        ``OSError``, ``KVHearthError`` and ``grpc.RpcError`` are the daemon's defence: ``run`` is
        called again after them. Any other exception and an end without one round fail the attack.

        Args:
            target: the daemon.
            number: number of the process among the attack's, from 0.
        """
        raise NotImplementedError

    def start(self, target: Target) -> None:
        """Begin to attack in the background; returns when all processes are about to.

        Raises:
            KVHearthError: a process does not come up.
        """
        self._attackers = [Attacker(self, target, number) for number in range(self.processes)]
        for attacker in self._attackers:
            attacker.wait_started()

    def stop(self) -> None:
        """End everything that ``start`` began. Idempotent."""
        for attacker in self._attackers:
            attacker.kill()

    def rounds(self) -> int:
        """Return the rounds of all processes so far."""
        return sum(attacker.rounds for attacker in self._attackers)

    def failures(self) -> list[str]:
        """Return failures of the attack itself, after ``stop``; it must not count as passed."""
        found = [attacker.failure for attacker in self._attackers if attacker.failure]
        return found if found or self.rounds() else ["no round was finished"]

    def check(self, target: Target, log: Sequence[str]) -> list[str]:
        """Return the names of further measures that fell short, after ``stop``.

        Args:
            target: the daemon.
            log: lines that the daemon printed since ``start``.
        """
        return []


class Attacker:
    """One process of an attack."""

    def __init__(self, attack: Attack, target: Target, number: int) -> None:
        self.rounds = 0
        self.failure = ""
        self._killed = False
        self._said: queue.Queue[str] = queue.Queue()
        kind = type(attack)
        words = [kind.__module__, kind.__qualname__, json.dumps(asdict(target)), str(number)]
        command = [sys.executable, "-m", __spec__.name, *words, str(os.getpid())]
        self._log = Path(target.folder) / f"{attack.name}-{number}.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=log,
                env=clean_environment(),
                start_new_session=True,
            )
        self._ears = threading.Thread(target=self._listen, daemon=True)
        self._ears.start()

    def wait_started(self) -> None:
        """Wait until the process is about to attack.

        Raises:
            KVHearthError: it does not come up.
        """
        said = ""
        with contextlib.suppress(queue.Empty):
            said = self._said.get(timeout=START_S)
        if not said:
            self.kill()
            raise KVHearthError(
                Reason.INTERNAL, f"an attacker does not come up: {self.failure or START_S}"
            )

    def kill(self) -> None:
        """End the process, and those that it started, with SIGKILL."""
        self._killed = True
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._ears.join(_END_S)

    def _listen(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as said:
            for data in said:
                with contextlib.suppress(ValueError):
                    line: dict[str, Any] = json.loads(data)
                    self.rounds = line.get("rounds", self.rounds)
                    self.failure = line.get("failure", self.failure)
                    self._said.put("started")
        self._process.wait()
        if not self._killed:
            text = self._log.read_text(errors="replace", encoding="utf-8")[-_SHOWN_CHARS:]
            self.failure = self.failure or f"ended with {self._process.returncode}: {text}"
        self._said.put("")


def table() -> dict[str, type[Attack]]:
    """Return all attacks by name, from the modules ``attacks_*`` of this package."""
    found: dict[str, type[Attack]] = {}
    for module in sorted(one.name for one in pkgutil.iter_modules(kvhearth_lab.hostile.__path__)):
        if module.startswith("attacks_"):
            loaded = importlib.import_module(f"{kvhearth_lab.hostile.__name__}.{module}")
            for kind in vars(loaded).values():
                if isinstance(kind, type) and issubclass(kind, Attack) and kind.name:
                    found[kind.name] = kind
    return found


def become(uid: int) -> None:
    """Give up all rights but those of the user ``uid``, for good; nothing if it is ours."""
    if uid == os.geteuid():
        return
    for name in ("ascii", "idna"):  # imports what is used later, while the files can be read
        codecs.lookup(name)
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


def main(words: Sequence[str]) -> int:
    """Run ``python -m kvhearth_lab.hostile.attack MODULE CLASS TARGET NUMBER PARENT``."""
    module, name, text, number, parent = words
    attack: Attack = getattr(importlib.import_module(module), name)()
    target = Target(**json.loads(text))
    descriptors = min(_DESCRIPTORS, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, descriptors))
    become(target.uid_of(attack.who))
    end_with(int(parent))  # a change of the user id voids it
    os.nice(NICENESS)
    return _attack(attack, target, int(number))


def _attack(attack: Attack, target: Target, number: int) -> int:
    rounds, told = 0, 0.0
    _say(rounds=0)
    while True:
        before = rounds
        try:
            for _ in attack.run(target, number):
                rounds += 1
                if time.monotonic() - told > _TOLD_S or rounds == 1:
                    told = time.monotonic()
                    _say(rounds=rounds, failure="")
                if attack.pause_s:
                    time.sleep(attack.pause_s)
        except (OSError, KVHearthError, grpc.RpcError) as error:
            if not rounds:
                _say(failure=f"no round: {error!r}"[:_SHOWN_CHARS])
            time.sleep(_CUT_PAUSE_S)
            continue
        if rounds == before:
            _say(rounds=rounds, failure="it ended without a round")
            return 1
        _say(rounds=rounds)


def _say(**line: object) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
