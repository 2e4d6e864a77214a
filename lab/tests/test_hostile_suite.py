"""``kvhearth hostile`` finds a planted attack by each bound that it breaks, and clears a harmless
one.
"""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import pytest

from kvhearth_lab.hostile.attack import Attack, Target, table
from kvhearth_lab.hostile.run import run

pytestmark = pytest.mark.slow
STOPPED_S = 0.6
"""Longer than a lookup's deadline."""
NOISY = {"p99", "livez", "deadline", "errors", "descriptors"}
"""Measures that a busy machine alone may miss."""


class Stopper(Attack):
    """Stops the daemon again and again for longer than a lookup may take."""

    name = "stopper"

    def start(self, target: Target) -> None:
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._work, args=(target.daemon_pid,))
        self._thread.start()

    def _work(self, pid: int) -> None:
        while not self._ending.is_set():
            os.kill(pid, signal.SIGSTOP)
            self._ending.wait(STOPPED_S)
            os.kill(pid, signal.SIGCONT)
            self._ending.wait(0.1)

    def stop(self) -> None:
        self._ending.set()
        self._thread.join()

    def failures(self) -> list[str]:
        return []

    def check(self, target: Target, log: list[str]) -> list[str]:  # type: ignore[override]
        return ["planted"]


class Killer(Stopper):
    """Kills the daemon."""

    name = "killer"

    def _work(self, pid: int) -> None:
        os.kill(pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """Returns the object of one run with harmless and planted attacks."""
    harmless = table()["random_attach"]
    # The process of an attack imports its class, and tests are no package: `Attack` itself raises.
    attacks = {"killer": Killer, "harmless": harmless, "stopper": Stopper, "useless": Attack}
    lines: list[str] = []
    object_ = run(1, told=lines.append, attacks=attacks)
    print("\n".join(lines))
    return object_


def test_a_harmless_attack_misses_nothing_but_by_the_machines_noise(found: dict[str, Any]) -> None:
    row = found["rows"]["random_attach"]
    assert set(row["missed"]) <= NOISY, row
    assert row["rounds"] > 0
    for phase in ("idle", "under", "after"):
        assert row[phase]["count"] > 0
        assert 0 < row[phase]["p50_ms"] <= row[phase]["p99_ms"] <= row[phase]["max_ms"]


def test_a_stopped_daemon_misses_the_times(found: dict[str, Any]) -> None:
    row = found["rows"]["stopper"]
    assert {"p99", "planted"} <= set(row["missed"]), row
    assert row["under"]["max_ms"] >= 250
    assert row["factor"] > 5
    assert row["restarts"] == 0


def test_a_dead_daemon_is_counted_and_replaced(found: dict[str, Any]) -> None:
    row = found["rows"]["killer"]
    assert "restarts" in row["missed"]
    assert found["restarts"] == 1
    # The others ran after it, on another daemon.
    assert next(iter(found["rows"])) == "killer"
    assert found["attacks"] == 4


def test_an_attack_that_does_nothing_does_not_pass(found: dict[str, Any]) -> None:
    row = found["rows"][""]
    assert "attack" in row["missed"]
    assert "NotImplementedError" in row["failures"][0]
