"""Eight engines of random processes that die and are replaced, under a daemon that lives on.

Some engines have a second rank in its own process, which continues to write for a while when its
scheduler dies. No wrong byte may be served, and at the end nothing of the clients may be left:
slots, leases, sessions, descriptors. ``KVHEARTH_SEED`` repeats a run's choices (not its timing),
``KVHEARTH_SOAK_S`` is the length of the slow test.
"""

from __future__ import annotations

import os
import random
import secrets
import signal
import socket
import time
from collections import Counter
from pathlib import Path

import pytest
from support.daemon import Daemon, running_daemon, until
from support.nursery import Child, nursery

from kvhearth_lab.harness.engine import contract_of, engine_of

ENGINES = 8
SECONDS = 6.0
SOAK_S = float(os.environ.get("KVHEARTH_SOAK_S", "60"))
SETTINGS = {"memory": "12MiB", "held_fraction_max": 0.9, "leases_max": 64}
KINDS = (
    {"model": "one", "page_bytes": 16384, "shards": 1, "far": False},
    {"model": "two", "page_bytes": 32768, "shards": 2, "far": True},
    {"model": "odd", "page_bytes": 40000, "shards": 2, "far": False},
    {"model": "two", "page_bytes": 32768, "shards": 2, "far": True},
)
MEAN_LIFE_S = 1.0
DAEMON_FAULTS = ("", "", "commit.after:40", "journal.bind_half:25", "sum.computed:25")


class Cradle:
    """Processes of one engine, one generation after the other."""

    def __init__(self, daemon: Daemon, number: int, rng: random.Random, folder: Path) -> None:
        self._daemon = daemon
        self._rng = rng
        self._name = f"e{number}"
        self._kind = KINDS[number % len(KINDS)]
        self._files = {"report": str(folder / "report"), "tally": str(folder / "tally")}
        self.living: list[Child] = []
        self.deaths: Counter[int] = Counter()

    def tend(self) -> None:
        """Starts the next generation once a process of the last one has died; the others of the
        last one end by themselves, beside the new one.
        """
        before = len(self.living)
        for child in self.living:
            if child.poll() is not None:
                assert child.returncode is not None
                self.deaths[child.returncode] += 1
        self.living = [child for child in self.living if child.returncode is None]
        if not before or len(self.living) < min(before, 2 if self._kind["far"] else 1):
            self.living += self._born()

    def hit(self) -> None:
        """Kills or stops one of the processes."""
        if not self.living:
            return
        child = self._rng.choice(self.living)
        if self._rng.random() < 0.6:
            child.kill()
        else:
            child.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Continues every stopped process."""
        for child in self.living:
            child.send_signal(signal.SIGCONT)

    def _born(self) -> list[Child]:
        arguments = {
            **{name: value for name, value in self._kind.items() if name != "far"},
            **self._files,
            "url": self._daemon.url(),
            "name": self._name,
            "seed": self._rng.randrange(1 << 62),
        }
        ours, theirs = socket.socketpair()
        with ours, theirs:
            born = [
                nursery().birth(
                    "support.random_engine:scheduler",
                    [ours.fileno()],
                    far=self._kind["far"],
                    **arguments,
                )
            ]
            if self._kind["far"]:
                born.append(
                    nursery().birth("support.random_engine:worker", [theirs.fileno()], **arguments)
                )
        return born


def run(seconds: float, daemon_life_s: float) -> None:
    """Runs engines for so long, and ends the daemon at about the given age."""
    seed = int(os.environ.get("KVHEARTH_SEED") or secrets.randbelow(1 << 32))
    print(f"\nKVHEARTH_SEED={seed}")
    rng = random.Random(seed)
    with running_daemon(**SETTINGS) as daemon:
        with engine_of(daemon.url(), contract_of(16384, model="one"), "first"):
            pass
        daemon.wait_quiet()
        descriptors = daemon.descriptor_count()
        cradles = [Cradle(daemon, n, rng, daemon.folder) for n in range(ENGINES)]
        try:
            daemon_deaths = live(daemon, cradles, rng, seconds, daemon_life_s)
            die(cradles)
        finally:
            for child in (child for cradle in cradles for child in cradle.living):
                child.kill()
        deaths = sum((cradle.deaths for cradle in cradles), Counter())
        tally = tally_of(daemon)
        print(f"{deaths.total()} clients ended {dict(deaths)}, {daemon_deaths} daemons; {tally}")
        nothing_is_left(daemon, descriptors)
        assert set(deaths) <= {0, -signal.SIGKILL}, f"a client raised: {dict(deaths)}"
        assert tally["right"] > 10 * seconds, "the engines did next to nothing"
        assert tally["late_writes"]


def live(
    daemon: Daemon,
    cradles: list[Cradle],
    rng: random.Random,
    seconds: float,
    daemon_life_s: float,
) -> int:
    """Runs the random part; returns how often the daemon died."""
    start = time.monotonic()
    # The last daemon is not killed, and lives long enough to show a leak.
    calm_at = start + seconds / 2
    kill_at = min(calm_at, start + rng.expovariate(1 / daemon_life_s))
    daemon_deaths = 0
    while (now := time.monotonic()) < start + seconds:
        if daemon.dead or now > kill_at:
            calm = now > calm_at
            daemon.restart("" if calm else rng.choice(DAEMON_FAULTS))
            daemon_deaths += 1
            life_s = seconds if calm else rng.expovariate(1 / daemon_life_s)
            kill_at = now + life_s if calm else min(calm_at, now + life_s)
        for cradle in cradles:
            cradle.tend()
            if rng.random() < 0.05 / MEAN_LIFE_S / ENGINES:
                cradle.hit()
            if rng.random() < 0.02:
                cradle.go_on()
        assert not reported(daemon), (daemon.folder / "report").read_text()
        time.sleep(0.02)
    return daemon_deaths


def reported(daemon: Daemon) -> bool:
    """Whether a client reported a violation."""
    path = daemon.folder / "report"
    return path.exists() and path.stat().st_size > 0


def die(cradles: list[Cradle]) -> None:
    """Ends all processes: half by themselves, half by kill -9."""
    for number, cradle in enumerate(cradles):
        cradle.go_on()
        for child in cradle.living:
            if number % 2:
                child.kill()
    for cradle in cradles:
        for child in cradle.living:
            cradle.deaths[child.wait(60)] += 1
        cradle.living = []


def tally_of(daemon: Daemon) -> Counter[str]:
    """Returns the clients' counts."""
    found: Counter[str] = Counter()
    for line in (daemon.folder / "tally").read_text().splitlines():
        what, _, amount = line.partition(" ")
        found[what] += int(amount)
    return found


def nothing_is_left(daemon: Daemon, descriptors: int) -> None:
    """Checks that the present daemon holds nothing of any client, and that its blocks are right."""
    daemon.wait_quiet()
    assert not reported(daemon), (daemon.folder / "report").read_text()
    counters = daemon.counters()
    assert not [name for name in counters if name.startswith(("checksum_f", "task_f"))], counters
    until(
        lambda: daemon.descriptor_count() <= descriptors,
        f"{descriptors} descriptors, as before the clients",
    )
    assert daemon.terminate() == 0


def test_clients_die_anywhere() -> None:
    run(SECONDS, daemon_life_s=2.5)


@pytest.mark.slow
@pytest.mark.timeout(SOAK_S + 300)
def test_clients_die_for_minutes() -> None:
    run(SOAK_S, daemon_life_s=10.0)
