"""Lookups of 512 keys with a remote behind memory, beside those without: warm, dead, stalled, cold.

Half of the keys are in memory. All are asked by calls, as an engine asks what its mapped index
does not know.
"""

from __future__ import annotations

import contextlib
import http.client
import re
import secrets
import socket
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass

from kvhearth.proto.v1 import cache_pb2
from kvhearth.transports.base import LOOKUP, CacheTransport
from kvhearth_lab.bench.daemon import (
    DEADLINE_S,
    Served,
    attached,
    broken,
    contract,
    keys_of,
    served,
    store_zeros,
    wire,
)
from kvhearth_lab.bench.report import p50, steps

_KEYS = 512
_PAGE_BYTES = 4096
_WARM_S = 20.0
_SERIES = 20
"""Lookups of a side before the next one's: each daemon's first finds cold caches."""
_FRESH_S = 2.0
"""Age at which `/metrics` is rendered again, and more."""
_ASKED = re.compile(r'^kvhearth_remote_requests_total\{.*kind="exists".*\} (\S+)$', re.MULTILINE)


@dataclass(frozen=True)
class _Side:
    """A daemon with one remote or none, and a chain whose first half is in its memory."""

    daemon: Served
    address: str
    calls: CacheTransport
    epoch: int
    seed: bytes

    def ask(self, *, known: bool = True) -> tuple[float, int]:
        """Return the seconds of a lookup of the chain, or of one that nobody has, and its ETA in
        microseconds.
        """
        keys = keys_of(self.seed if known else secrets.token_bytes(16), 0, _KEYS)
        request = cache_pb2.LookupRequest(epoch=self.epoch)
        request.groups.add(group=0, keys=b"".join(keys))
        start = time.perf_counter()
        reply = self.calls.call(LOOKUP, request, DEADLINE_S)
        return time.perf_counter() - start, reply.eta_us

    def settle(self) -> None:
        """Ask until the answer needs no remote any more."""
        end = time.monotonic() + _WARM_S
        while self.ask()[1]:
            if time.monotonic() > end:
                raise broken("a remote is asked for ever")
            time.sleep(0.02)

    def asked_keys(self) -> float:
        """Return the number of keys that the remote was asked for so far."""
        connection = http.client.HTTPConnection(self.address, timeout=DEADLINE_S)
        try:
            connection.request("GET", "/metrics")
            text = connection.getresponse().read().decode()
        finally:
            connection.close()
        return sum(map(float, _ASKED.findall(text)))


def _opened(undo: contextlib.ExitStack, remote: str) -> _Side:
    daemon = undo.enter_context(
        served(memory="64MiB", remote=remote, remote_write="never", http="127.0.0.1:0")
    )
    address = str(daemon.ready()["http"])
    made, seed = contract(_PAGE_BYTES), secrets.token_bytes(16)
    client = undo.enter_context(attached(daemon.client_url, made))
    store_zeros(client, _PAGE_BYTES, seed, 0, _KEYS // 2)
    calls = undo.enter_context(wire(daemon.client_url, made, calls="frames"))
    side = _Side(daemon, address.removeprefix("http://").rstrip("/"), calls, client.epoch, seed)
    side.settle()
    return side


@contextlib.contextmanager
def _silent() -> Iterator[str]:
    """Provide a remote that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"s3://bucket/kv?endpoint=http://127.0.0.1:{server.getsockname()[1]}&region=r"


def lookup_part(null: str, dead_port: int, rounds: int) -> dict[str, float]:
    """Return the ratios of medians to a daemon without a remote, and the keys that a cold lookup
    asks the remote for.

    Args:
        null: URL of a bucket with nothing in it.
        dead_port: port on which nobody listens.
        rounds: lookups of each side, in turns.
    """
    with contextlib.ExitStack() as undo:
        folder = undo.enter_context(tempfile.TemporaryDirectory(prefix="kvh-"))
        remotes = {
            "none": "",
            "warm": f"file://{folder}",
            "dead": f"valkey://127.0.0.1:{dead_port}/kv",
            "stalled": undo.enter_context(_silent()),
        }
        sides = {name: _opened(undo, url) for name, url in remotes.items()}
        times: dict[str, list[float]] = {name: [] for name in sides}
        for _ in steps(-(-rounds // _SERIES), f"lookups of {_KEYS} keys"):
            for name, side in sides.items():
                times[name] += [side.ask()[0] for _ in range(_SERIES)]
        base = p50(times["none"])
        found = {
            f"lookup_{name}_ratio": round(p50(times[name]) / base, 3)
            for name in ("warm", "dead", "stalled")
        }
        cold = _opened(undo, null)
        time.sleep(_FRESH_S)
        before = cold.asked_keys()
        cold.ask(known=False)
        time.sleep(_FRESH_S)
        return {**found, "keys_asked": cold.asked_keys() - before}
