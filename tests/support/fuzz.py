"""Shared parts of the fuzz tests: values of any kind, and a well-behaved client that notices
damage.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from kvhearth.errors import Reason
from kvhearth_lab.harness.engine import Engine
from support.daemon import Daemon, until
from support.raw_door import NEIGHBOUR_S, goes_on, new_keys

fuzz = settings(
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
SOAK_EXAMPLES = int(os.environ.get("KVHEARTH_FUZZ_EXAMPLES", "100"))
"""Number of examples of each property in a slow run."""
RESIDENT_BYTES_MORE = 48 << 20
"""Allowed growth of a daemon under bad input: room for allocators' slack, but not for a soak's
leak.
"""

IDLE_CONNECTIONS = 8
"""Most idle connections that a client keeps."""

DELAY_S = float(os.environ.get("KVHEARTH_FUZZ_DELAY_S", "30"))
"""Time in which a well-behaved engine stores or loads four blocks meanwhile. It takes
milliseconds on an idle machine; the bound is for a shared one. Each of its calls must be answered
within the client's own deadline.
"""

texts = st.text(st.characters(codec=None), max_size=20)
"""Text that may include lone surrogates, which JSON can name."""
integers = st.integers() | st.sampled_from([0, -1, 1 << 31, 1 << 32, 1 << 63, 1 << 64, 10**30])
scalars = st.none() | st.booleans() | integers | st.floats() | texts
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3)
)


@st.composite
def changed(draw: st.DrawFn, good: dict[str, Any]) -> dict[str, Any]:
    """Draw a copy of a good object with some fields changed, missing, or added."""
    message = dict(good)
    for name in draw(st.lists(st.sampled_from(sorted(good)), max_size=2)):
        message[name] = draw(values)
    for name in draw(st.lists(st.sampled_from(sorted(good)), max_size=1)):
        message.pop(name)
    message.update(draw(st.dictionaries(texts, values, max_size=1)))
    return message


def depths(examples: int) -> pytest.MarkDecorator:
    """Run a test with ``examples``, and with ``SOAK_EXAMPLES`` among the slow ones."""
    slow = pytest.param(
        SOAK_EXAMPLES, marks=[pytest.mark.slow, pytest.mark.timeout(SOAK_EXAMPLES)], id="soak"
    )
    return pytest.mark.parametrize("examples", [pytest.param(examples, id="quick"), slow])


def pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    """Return ``data`` cut at these places, which are taken modulo its length."""
    ends = sorted({cut % (len(data) + 1) for cut in cuts} | {len(data)})
    return [data[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def refusals_by_reason(daemon: Daemon) -> dict[Reason, int]:
    """Return how often the daemon has refused something, by reason; zero for reasons that never
    occurred.
    """
    counters = daemon.counters()
    return {reason: counters.get(f"refusals{{{reason}}}", 0) for reason in Reason}


class Neighbour:
    """A well-behaved engine that stores and loads on a thread of its own until ``stop``."""

    def __init__(self, engine: Engine) -> None:
        self.rounds = 0
        self.slowest_s = 0.0
        self.hurt: list[str] = []
        self._engine = engine
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="neighbour")
        self._thread.start()

    def stop(self) -> None:
        """End the thread; fails if a byte was wrong, a block was lost or a call took too long."""
        # Even a short test should include some rounds.
        with contextlib.suppress(AssertionError):
            until(lambda: self.rounds >= 2 or self.hurt, "the neighbour works", 2 * NEIGHBOUR_S)
        self._stop.set()
        self._thread.join(2 * NEIGHBOUR_S)
        assert not self._thread.is_alive(), "the neighbour hangs"
        assert self.hurt == []
        assert self.rounds >= 2
        assert self.slowest_s < DELAY_S, f"a store or a load took {self.slowest_s:.1f} s"

    def _run(self) -> None:
        while not self._stop.wait(0.002) and not self.hurt:
            keys = new_keys(4)
            started = time.monotonic()
            stored = self._engine.store(keys)
            between = time.monotonic()
            seen = self._engine.check(keys)
            ended = time.monotonic()
            if stored.bound != keys or seen.right != keys or seen.bad:
                self.hurt.append(f"round {self.rounds}: {stored} {seen}")
            self.slowest_s = max(self.slowest_s, between - started, ended - between)
            self.rounds += 1


@contextlib.contextmanager
def unharmed(daemon: Daemon, engine: Engine) -> Iterator[None]:
    """Run a block that sends bad input. Meanwhile the well-behaved engine must continue, and
    afterwards no descriptor or memory may be left in use.
    """
    goes_on(engine)
    daemon.stats(check_books=True)
    descriptors, resident = daemon.descriptor_count(), daemon.private_bytes()
    neighbour = Neighbour(engine)
    try:
        yield
    finally:
        neighbour.stop()
    # The well-behaved engine's client keeps some connections for its next calls.
    descriptors += IDLE_CONNECTIONS
    until(lambda: daemon.descriptor_count() <= descriptors, "every descriptor is closed")
    daemon.stats(check_books=True)
    assert daemon.private_bytes() < resident + RESIDENT_BYTES_MORE
