"""Shared parts of the fuzz tests: values of any kind, and the number of examples."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from kvhearth_lab.harness import HUNG_S

EXAMPLES_LEAST = int(os.environ.get("KVHEARTH_FUZZ_EXAMPLES", "0"))
"""Least number of examples of each property, for longer runs."""
texts = st.text(st.characters(codec=None), max_size=20)
"""Text that may include lone surrogates, which JSON can name."""
integers = st.integers() | st.sampled_from([0, -1, 1 << 31, 1 << 32, 1 << 63, 1 << 64, 10**30])
scalars = st.none() | st.booleans() | integers | st.floats() | texts
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3)
)


def fuzz(examples: int) -> settings:
    """Return the settings of a property."""
    checks = [HealthCheck.too_slow, HealthCheck.filter_too_much]
    return settings(max_examples=max(examples, EXAMPLES_LEAST), suppress_health_check=checks)


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


def pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    """Return ``data`` cut at these places, which are taken modulo its length."""
    ends = sorted({cut % (len(data) + 1) for cut in cuts} | {len(data)})
    return [data[start:end] for start, end in zip([0, *ends], ends, strict=False)]


class Liar:
    """A peer that answers each connection with scripted bytes, then ends it.

    Attributes:
        says: the bytes, in the parts in which they are sent.
        passes: number of descriptors that go with each part.
    """

    def __init__(self, listener: socket.socket) -> None:
        self.says: list[bytes] = []
        self.passes = 0
        self._listener = listener
        self._thread = threading.Thread(target=self._run, name="liar")
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join(HUNG_S)
        self._listener.close()
        assert not self._thread.is_alive()

    def _run(self) -> None:
        while True:
            try:
                line, _ = self._listener.accept()
            except OSError:
                return
            with line, contextlib.suppress(OSError):
                line.recv(1 << 16)
                for part in filter(None, self.says):
                    self._say(line, part)
                line.shutdown(socket.SHUT_WR)
                line.settimeout(0.2)
                while line.recv(1 << 16):
                    pass

    def _say(self, line: socket.socket, part: bytes) -> None:
        sent = 0
        if self.passes:
            with open(os.devnull, "rb") as file:
                sent = socket.send_fds(line, [part], [file.fileno()] * self.passes)
        line.sendall(part[sent:])
