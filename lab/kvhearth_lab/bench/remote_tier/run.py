"""Runs ``kvhearth bench remote-tier``: a raw socket, a plain loop and a mover, in turns."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvhearth.model import checksum_of
from kvhearth_lab.bench.daemon import broken
from kvhearth_lab.bench.remote.ceiling import FarEnd
from kvhearth_lab.bench.remote_tier.figures import (
    BATCH,
    LOOKUP_FIGURES,
    STALL_FIGURES,
    Sizes,
    figures_of,
)
from kvhearth_lab.bench.remote_tier.lookups import lookup_part
from kvhearth_lab.bench.remote_tier.sealing import sealing_part
from kvhearth_lab.bench.report import machine, missed, steps
from kvhearth_server.memory.mapping import HugepagePolicy
from kvhearth_server.memory.segments import create_segment
from kvhearth_server.tiers.base import ADDRESS_DTYPE, BlockSpec, Done
from kvhearth_server.tiers.remote.mover import Answer, Delete, Exists, Get, Put
from kvhearth_server.tiers.remote.names import space_name
from kvhearth_server.tiers.remote.process import Mover
from kvhearth_server.tiers.remote.url import parse_remote

_CALL_S = 30.0
_STALL_S = 1.0
_ROUND_BYTES = 64 << 20
"""Bytes of a round; of smaller batches there are more."""
_KEY = b"fleet of the benchmark"
_SPACE = space_name(_KEY, "bench", "{}", "", 0)


def _cpu_s(pid: int) -> float:
    """Return the processor seconds that a process's threads have used so far, exactly."""
    spent = 0
    for path in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError):
            spent += int((path / "schedstat").read_text(encoding="ascii").split()[0])
    return spent / 1e9


class Moved:
    """A mover over an arena of two batches: one to put from, one to get to."""

    def __init__(self, url: str, size: int) -> None:
        self.size = size
        self._family = BlockSpec(bytes(32), 0, 1, size)
        whole = -(-2 * BATCH * size // (2 << 20)) * (2 << 20)
        self.segment = create_segment(whole, HugepagePolicy.PREFER)
        self.source = self.segment.view[: BATCH * size]
        self.target = self.segment.view[BATCH * size : 2 * BATCH * size]
        self.source[:] = np.random.default_rng(2).integers(0, 256, BATCH * size, np.uint8)
        self._places = np.zeros((2 * BATCH, 1), ADDRESS_DTYPE)
        self._places["offset"][:, 0] = size * np.arange(2 * BATCH)
        rows = self.source.reshape(BATCH, size)
        self._sums = np.array([[checksum_of(row.data)] for row in rows], "V16")
        self._mover = Mover(
            parse_remote(url), _KEY, [self.segment], 8 * BATCH * size, log_level="error"
        )
        self._keys: list[bytes] = []
        end = time.monotonic() + _CALL_S
        while not self._mover.up or self._mover.problem:
            if time.monotonic() > end:
                raise broken(f"{url}: {self._mover.problem}")
            self._answers(0.2)

    def _answers(self, seconds: float) -> list[Answer]:
        due_s = max(0.0, self._mover.due_at - time.monotonic())
        select.select([self._mover.event_fd], [], [], min(seconds, due_s))
        return self._mover.poll()

    def _do(self, request: Exists, seconds: float = _CALL_S) -> Iterator[Answer]:
        ticket = self._mover.submit(request, seconds)
        if not isinstance(ticket, int):
            raise broken(f"a request was refused: {ticket.reason}")
        while True:
            for answer in self._answers(1.0):
                yield answer
                if answer.final:
                    return

    def _timed(self, request: Exists) -> tuple[float, float]:
        began, cpu = time.perf_counter(), _cpu_s(self.helper) + time.process_time()
        *_, last = self._do(request)
        seconds = time.perf_counter() - began
        spent = _cpu_s(self.helper) + time.process_time() - cpu
        if not all(isinstance(each, Done) for each in last.outcomes):
            raise broken(f"{last.outcomes}")
        return seconds, spent

    @property
    def helper(self) -> int:
        """Process id of the helper."""
        pid = self._mover.pid
        assert pid is not None
        return pid

    def put(self) -> tuple[float, float]:
        """Put a batch under new names; return seconds and processor seconds."""
        self._keys = [secrets.token_bytes(32) for _ in range(BATCH)]
        parents = [b"", *self._keys[:-1]]
        places = self._places[:BATCH]
        return self._timed(Put(_SPACE, self._family, self._keys, places, self._sums, parents))

    def get(self) -> tuple[float, float]:
        """Get the batch that was put last, and compare it."""
        self.target[:] = 0
        found = self._timed(Get(_SPACE, self._family, self._keys, self._places[BATCH:]))
        if not (self.source == self.target).all():
            raise broken("other bytes came back")
        return found

    def forget(self) -> None:
        """Remove the batch."""
        for _ in self._do(Delete(_SPACE, self._family, self._keys)):
            pass

    def stall(self, server: int) -> dict[str, float]:
        """Get from a server that is stopped; return lateness in seconds, and late bytes."""
        self.put()
        self.target[:] = 0
        request = Get(_SPACE, self._family, self._keys, self._places[BATCH:])
        os.kill(server, signal.SIGSTOP)
        try:
            began = time.monotonic()
            told = freed = 0.0
            for _ in self._do(request, _STALL_S):
                told = told or time.monotonic() - began - _STALL_S
                freed = time.monotonic() - began - _STALL_S
            self.target[:] = 0xAA
        finally:
            os.kill(server, signal.SIGCONT)
        time.sleep(1.0)
        late = int((self.target != 0xAA).sum())
        return {
            "stall_told_s": round(told, 4),
            "stall_freed_s": round(freed, 4),
            "late_bytes": late,
        }

    def close(self) -> None:
        """End the helper."""
        self._mover.close()
        self.source = self.target = np.zeros(0, np.uint8)
        self.segment.close()


class Plain:
    """A process with the driver in a plain loop."""

    def __init__(self, url: str, size: int) -> None:
        command = [sys.executable, "-m", f"{__package__}.plain", url, str(size), str(BATCH)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, encoding="utf-8"
        )

    def run(self, what: str) -> tuple[float, float]:
        """Put or get a batch; return seconds and processor seconds."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{what}\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise broken("the plain loop ended")
        seconds, spent = json.loads(line)
        return seconds, spent

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(_CALL_S)
        assert self._process.stdout is not None
        self._process.stdout.close()


@contextlib.contextmanager
def null_bucket() -> Iterator[tuple[str, int]]:
    """Serve a bucket with nothing behind it; yield its URL and process id."""
    process = subprocess.Popen(
        [sys.executable, "-m", f"{__package__}.null_bucket"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": "secret"},
    )
    assert process.stdout is not None
    assert process.stdin is not None
    try:
        port = int(process.stdout.readline())
        yield f"s3://bucket/kv?endpoint=http://127.0.0.1:{port}", process.pid
    finally:
        process.stdin.close()
        process.wait(_CALL_S)
        process.stdout.close()


def _measure(url: str, size: int, rounds: int, raw: FarEnd) -> dict[str, Any]:
    """Measure one remote at one size of block."""
    gigabytes = BATCH * size / 1e9
    samples: dict[str, list[float]] = defaultdict(list)
    with contextlib.ExitStack() as undo:
        moved, plain = Moved(url, size), Plain(url, size)
        undo.callback(moved.close)
        undo.callback(plain.close)
        pages = moved.source.reshape(BATCH, size)
        for number in steps(
            rounds * max(1, _ROUND_BYTES // (BATCH * size)) + 1,
            f"{parse_remote(url).place} {size >> 10} KiB",
        ):
            found: dict[str, float] = {
                "raw_put": raw.put(pages, 1),
                "raw_get": raw.get(moved.target.reshape(BATCH, size), 1),
            }
            for what in ("put", "get"):
                run = moved.put if what == "put" else moved.get
                order = (lambda w=what: plain.run(w), run)
                pairs = [each() for each in (order if number % 2 else order[::-1])]
                (p_s, p_cpu), (m_s, m_cpu) = pairs if number % 2 else pairs[::-1]
                found |= {f"plain_{what}": p_s, f"moved_{what}": m_s}
                found[f"cpu_{what}"] = (m_cpu - p_cpu) / gigabytes
            moved.forget()
            if number:  # the first round warms connections up
                for name, value in found.items():
                    samples[name].append(value)
    return _figures(samples, gigabytes)


def _figures(samples: Mapping[str, Sequence[float]], gigabytes: float) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for what in ("put", "get"):
        moved = samples[f"moved_{what}"]
        for name, base in ((f"{what}_ratio", "raw"), (f"vs_plain_{what}", "plain")):
            pairs = zip(samples[f"{base}_{what}"], moved, strict=True)
            made[name] = round(statistics.median(one / other for one, other in pairs), 3)
        made[f"{what}_gb_s"] = round(gigabytes / statistics.median(moved), 3)
        made[f"cpu_s_per_gb_{what}"] = round(statistics.median(samples[f"cpu_{what}"]), 3)
    made["cpu_s_per_gb"] = max(made["cpu_s_per_gb_put"], made["cpu_s_per_gb_get"])
    return made


@contextlib.contextmanager
def _valkey(binary: Path | None) -> Iterator[dict[str, str]]:
    """Run a Valkey server without a disk, if there is one; yield its URL by its name."""
    if binary is None:
        yield {}
        return
    port = free_port()
    place = ("--port", str(port), "--bind", "127.0.0.1", "--save", "")
    bounds = ("--maxmemory", "1gb", "--maxmemory-policy", "allkeys-lru")
    process = subprocess.Popen([str(binary), *place, *bounds], stdout=subprocess.DEVNULL)
    try:
        yield {"valkey": f"valkey://127.0.0.1:{port}/kv"}
    finally:
        process.kill()
        process.wait()


def free_port() -> int:
    """Return a port that nobody uses now."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        port: int = found.getsockname()[1]
        return port


def run(sizes: Sizes, urls: Mapping[str, str], valkey: Path | None = None) -> dict[str, Any]:
    """Measure the null bucket and the named remotes; return the object that the verb prints.

    Args:
        urls: URL of each further remote, by a name for the report.
        valkey: server to start and to measure, too.
    """
    found: dict[str, Any] = {}
    short: list[str] = []
    os.environ.setdefault("AWS_ACCESS_KEY_ID", "id")
    os.environ.setdefault("AWS_SECRET_ACCESS_KEY", "secret")
    with null_bucket() as (null, server), _valkey(valkey) as started:
        raw = FarEnd(1)
        try:
            for name, url in {"null": null, **started, **urls}.items():
                for size in sizes.blocks:
                    values = _measure(url, size, sizes.rounds, raw)
                    values |= sealing_part(size, sizes.rounds)
                    key = f"{name}_{size >> 10}k"
                    found[key] = values
                    short += [f"{key}.{each}" for each in missed(values, figures_of(name))]
        finally:
            raw.close()
        moved = Moved(null, sizes.blocks[-1])
        try:
            stall = moved.stall(server)
        finally:
            moved.close()
        looked = lookup_part(null, free_port(), sizes.lookups)
    short += missed(stall, STALL_FIGURES) + missed(looked, LOOKUP_FIGURES)
    return {"drivers": found, **looked, **stall, "machine": machine(), "missed": short}
