"""Drives one peer for ``kvhearth bench peers``: a line of JSON in, a line of JSON out.

    python harness.py lmcache_peer.py FOLDER

Runs in the peer's own interpreter, so it imports only numpy and the standard library. FOLDER holds
logs and sockets. An error ends the process; the last line of stderr gives the reason.

Requests have an ``op``: ``prepare`` starts the peer, ``run`` is one measurement, ``lookup`` a
series of lookups. ``close`` ends the process, as does the end of stdin. ``run`` compares every
loaded byte with the stored one and ends the process where they differ.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import mmap
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

U8 = NDArray[np.uint8]
CONNECTIONS = (1, 4, 16)
"""Numbers of connections over which ``WirePeer`` spreads blocks."""
_MAP_HUGETLB = 0x40000
_STAMP_EVERY = 512
_STAMPS = 251
_START_S = 120.0
_END_S = 15.0
_LOG_SHOWN_CHARS = 2000


@dataclass(frozen=True)
class Config:
    """Parameters of ``prepare``.

    Attributes:
        part: ``copies``, ``lookups``, ``files`` (blocks in files under ``folder``), or ``wire``
            (blocks over TCP, on 1, 4 and 16 connections).
        memory_bytes: upper bound on the peer's memory.
        batch, page_bytes: blocks of a batch, and bytes of one.
        small_bytes, blocks: bytes of a block to look up, and the number of such blocks.
        keys: keys of a lookup.
        hugepages: whether 2 MiB pages are free for all sides.
        folder: folder for logs and sockets.
    """

    part: str
    memory_bytes: int
    batch: int
    page_bytes: int
    small_bytes: int
    blocks: int
    keys: int
    hugepages: bool
    folder: Path


class Peer(Protocol):
    """Interface of the ``Peer`` class in a peer's file; it is constructed before it is started.

    Attributes:
        source, target: pages that an engine would have, shape (batch, page_bytes); set by ``start``
            for the parts ``copies`` and ``files``.
        pages: order of the pages in a batch.
    """

    source: U8
    target: U8
    pages: Sequence[int]

    def start(self, config: Config) -> Mapping[str, Any]:
        """Start its daemons and connect. Returns the answer of ``prepare``: ``versions``,
        ``settings``, ``pages``, ``leftovers`` (files that a killed daemon would leave).
        """

    def measures(self) -> Mapping[str, Callable[[int], float]]:
        """Return, by name, functions that run one measurement and return its seconds. ``store*``
        stores pages of ``source`` until the peer acknowledges them; ``load*`` brings the blocks
        stored last into the same pages of ``target``. The argument is the place in ``pages`` for
        single blocks.
        """

    def drop(self) -> None:
        """Drop stored blocks, so that the next store finds room."""

    def lookups(self, count: int) -> list[float]:
        """Return the seconds of each of ``count`` lookups that find every key, without releases."""

    def close(self) -> None:
        """End its daemons; also called after a failed start."""


def huge_or_not(count: int, block_bytes: int, hugepages: bool) -> tuple[U8, str]:
    """Return zeroed blocks, shape (count, block_bytes), and the kind of their pages."""
    size, kind = count * block_bytes, "2MiB"
    flags = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS
    try:
        if not hugepages:
            raise OSError
        memory = mmap.mmap(-1, size, flags=flags | _MAP_HUGETLB)
    except OSError:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        kind = "4KiB or transparent"
        with contextlib.suppress(OSError):  # a kernel without transparent huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8).reshape(count, block_bytes), kind


def pages_behind(memory: U8, kind: str) -> str:
    """Return the kind of pages of touched memory: ``kind``, unless the kernel had to choose."""
    if kind == "2MiB":
        return kind
    address, inside, huge = int(memory.ctypes.data), False, 0
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        word = line.split(maxsplit=1)[0]
        if "-" in word and not word.endswith(":"):
            start, end = (int(part, 16) for part in word.split("-"))
            inside = start <= address < end
        elif inside and word == "AnonHugePages:":
            huge += int(line.split()[1]) * 1024
    return "thp" if 2 * huge >= memory.nbytes else "4KiB"


def fill(source: U8) -> None:
    """Fill with random bytes, each block distinct."""
    source[:] = np.random.default_rng(1).integers(0, 256, source.shape[1], np.uint8)
    source[:, 0] = np.arange(len(source))


def order(count: int) -> list[int]:
    """Return all pages in random order, as a busy engine's are."""
    return [int(page) for page in np.random.default_rng(2).permutation(count)]


def stamp(source: U8, number: int) -> None:
    """Make the blocks differ from those of the last measurement, so that old bytes fail the
    comparison.
    """
    source[:, 8::_STAMP_EVERY] = number % _STAMPS


def wipe(target: U8) -> None:
    """Make the blocks differ from the content that a load should bring."""
    target[:, 8::_STAMP_EVERY] = 255


def compare(source: U8, target: U8) -> int:
    """Return the number of bytes compared.

    Raises:
        RuntimeError: they differ.
    """
    if not np.array_equal(source, target):
        raise RuntimeError("wrong bytes: what was loaded is not what was stored")
    return target.size


def free_port() -> int:
    """Return a port of 127.0.0.1 that was free just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class FilePeer:
    """Base of peers that keep one file a block; each subclass starts, closes and implements the two
    measures.
    """

    source: U8
    target: U8
    pages: Sequence[int] = ()

    def __init__(self) -> None:
        self.folder = Path()

    def prepare(self, config: Config) -> str:
        """Make the folder and the blocks, and return the kind of their pages."""
        self.folder = config.folder / "blocks"
        self.folder.mkdir()
        self.source, kind = huge_or_not(config.batch, config.page_bytes, config.hugepages)
        self.target, _ = huge_or_not(config.batch, config.page_bytes, config.hugepages)
        fill(self.source)
        self.target[:] = 0
        self.pages = order(config.batch)
        return pages_behind(self.source, kind)

    def measures(self) -> Mapping[str, Callable[[int], float]]:
        return {"store": lambda _: self.store(), "load": lambda _: self.load()}

    def store(self) -> float:
        """Store the source as blocks of new names and return the seconds."""
        raise NotImplementedError

    def load(self) -> float:
        """Load the blocks stored last into the target and return the seconds."""
        raise NotImplementedError

    def drop(self) -> None:
        for path in self.folder.rglob("*"):
            if path.is_file():
                path.unlink()

    def lookups(self, count: int) -> list[float]:
        """Fail: such peers have no lookups."""
        raise RuntimeError("no lookups are measured")


class WirePeer:
    """Base of peers whose blocks travel over TCP; each subclass starts, connects, puts and gets.

    ``store_4`` and ``load_4`` spread the blocks over 4 connections, each with a thread;
    ``store_one`` and ``load_one`` move one block.
    """

    source: U8
    target: U8
    pages: Sequence[int] = ()

    def __init__(self) -> None:
        self.children: list[Child] = []
        self._open: list[Any] = []
        self._threads = ThreadPoolExecutor(max(CONNECTIONS))

    def prepare(self, config: Config) -> str:
        """Make the blocks, and return the kind of their pages."""
        self.source, kind = huge_or_not(config.batch, config.page_bytes, config.hugepages)
        self.target, _ = huge_or_not(config.batch, config.page_bytes, config.hugepages)
        fill(self.source)
        self.target[:] = 0
        self.pages = range(config.batch)
        return pages_behind(self.source, kind)

    def measures(self) -> Mapping[str, Callable[[int], float]]:
        made: dict[str, Callable[[int], float]] = {}
        for count in CONNECTIONS:
            made[f"store_{count}"] = partial(self._spread, self.put, count)
            made[f"load_{count}"] = partial(self._spread, self.get, count)
        made["store_one"] = partial(self._one, self.put)
        made["load_one"] = partial(self._one, self.get)
        return made

    def connect(self) -> Any:
        """Return a connection."""
        raise NotImplementedError

    def put(self, connection: Any, pages: Sequence[int]) -> None:
        """Store blocks of the source until they are acknowledged."""
        raise NotImplementedError

    def get(self, connection: Any, pages: Sequence[int]) -> None:
        """Load blocks into the target."""
        raise NotImplementedError

    def _spread(self, move: Callable[[Any, Sequence[int]], None], count: int, _index: int) -> float:
        self._connect(count)
        parts = [self.pages[number::count] for number in range(count)]
        start = time.perf_counter()
        running = [
            self._threads.submit(move, connection, part)
            for connection, part in zip(self._open, parts, strict=False)
        ]
        for each in running:
            each.result()
        return time.perf_counter() - start

    def _one(self, move: Callable[[Any, Sequence[int]], None], index: int) -> float:
        self._connect(1)
        start = time.perf_counter()
        move(self._open[0], [self.pages[index]])
        return time.perf_counter() - start

    def _connect(self, count: int) -> None:
        while len(self._open) < count:
            self._open.append(self.connect())

    def drop(self) -> None:
        """See ``Peer``."""

    def lookups(self, count: int) -> list[float]:
        """Fail: such peers have no lookups."""
        raise RuntimeError("no lookups are measured")

    def close(self) -> None:
        self._threads.shutdown()
        for child in reversed(self.children):
            child.end()


class Child:
    """A process of the peer, its output in a file.

    Args:
        folder: folder of its log.
        name: name of the log.
        command, env: as for Popen.
    """

    def __init__(
        self, folder: Path, name: str, command: Sequence[str], env: Mapping[str, str] | None = None
    ) -> None:
        self.name = name
        self._log_path = folder / f"{name}.log"
        with self._log_path.open("wb") as log:
            self._process = subprocess.Popen(
                list(command), stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env
            )

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def check(self) -> None:
        """Raise RuntimeError if the process ended."""
        if self._process.poll() is not None:
            said = self._log_path.read_text(errors="replace", encoding="utf-8")[-_LOG_SHOWN_CHARS:]
            sys.stderr.write(said)
            last = said.strip().rpartition("\n")[2]
            raise RuntimeError(f"{self.name} ended with {self._process.returncode}: {last}")

    def wait_until(self, ready: Callable[[], bool]) -> None:
        """Wait until ``ready()``.

        Raises:
            RuntimeError: the process ended, or it takes too long.
        """
        end = time.monotonic() + _START_S
        while not ready():
            self.check()
            if time.monotonic() > end:
                raise RuntimeError(f"{self.name} is not ready after {_START_S:.0f} s")
            time.sleep(0.02)

    def wait_port(self, port: int) -> None:
        """Wait until the process listens on 127.0.0.1; raises as ``wait_until``."""

        def listens() -> bool:
            with socket.socket() as probe:
                return probe.connect_ex(("127.0.0.1", port)) == 0

        self.wait_until(listens)

    def end(self) -> None:
        """Stop the process."""
        self._process.terminate()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class Plain:
    """The plain copy that everything is compared with: block by block, one thread, between its own
    pages.

    It runs in the measured process, right before the measurement: on a busy machine a process that
    slept would be scheduled before one that did not.

    Args:
        source, target: shape (batch, page_bytes).
    """

    def __init__(self, source: U8, target: U8) -> None:
        self._source = source
        self._target = target

    def batch(self) -> float:
        """Return the seconds for all blocks."""
        start = time.perf_counter()
        for index in range(len(self._source)):
            np.copyto(self._target[index], self._source[index])
        return time.perf_counter() - start

    def one(self, index: int) -> float:
        """Return the seconds for one block."""
        start = time.perf_counter()
        np.copyto(self._target[index], self._source[index])
        return time.perf_counter() - start

    def beside(self, measure: str, number: int) -> float:
        """Return the seconds for as many bytes as the measure moves, of other blocks."""
        return self.one((number + 7) % len(self._source)) if "_one" in measure else self.batch()


def run_one(peer: Peer, plain: Plain, measure: str, number: int) -> dict[str, Any]:
    """Run one measurement with its check and return the answer of ``run``."""
    index = number % len(peer.pages)
    page = peer.pages[index]
    rows = slice(page, page + 1) if "_one" in measure else slice(None)
    source, target = peer.source[rows], peer.target[rows]
    load = measure.startswith("load")
    if not load:
        peer.drop()
    baseline = plain.beside(measure, number)
    if load:
        wipe(target)
    else:
        stamp(source, number)
    used = time.process_time()
    seconds = peer.measures()[measure](index)
    used = time.process_time() - used
    compared = compare(source, target) if load else 0
    return {
        "seconds": seconds,
        "cpu_s": used,
        "baseline": baseline,
        "compared_bytes": compared,
    }


def serve(peer: Peer, folder: Path, requests: Any, answer: Callable[[Any], None]) -> None:
    """Answer requests until ``close`` or their end."""
    config: Config | None = None
    plain: Plain | None = None
    for line in requests:
        asked = json.loads(line)
        op = asked.pop("op")
        if op == "prepare":
            config = Config(**asked, folder=folder)
            said = peer.start(config)
            answer({**said, "measures": list(peer.measures())})
        elif op == "run" and config is not None:
            plain = plain or _plain(config)
            answer(run_one(peer, plain, asked["measure"], asked["number"]))
        elif op == "lookup":
            answer({"seconds": peer.lookups(asked["count"])})
        elif op == "close":
            return
        else:
            raise RuntimeError(f"no such op, or not yet: {op}")


def _plain(config: Config) -> Plain:
    source, _ = huge_or_not(config.batch, config.page_bytes, config.hugepages)
    target, _ = huge_or_not(config.batch, config.page_bytes, config.hugepages)
    fill(source)
    target[:] = 0
    return Plain(source, target)


def _load(path: Path) -> Peer:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise RuntimeError(f"cannot load {path}")
    module = importlib.util.module_from_spec(spec)
    # Lets the peer's file import this module although KVHearth is not installed here.
    sys.modules["kvhearth_lab.bench.peers.adapters.harness"] = sys.modules["__main__"]
    sys.modules[path.stem] = module  # dataclasses look it up
    spec.loader.exec_module(module)
    made: Peer = module.Peer()
    return made


def main() -> None:
    """Run with the peer's file and a folder from the command line."""
    # Libraries print to stdout; the answers must be alone there.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def answer(said: Any) -> None:
        answers.write(json.dumps(said) + "\n")
        answers.flush()

    peer = _load(Path(sys.argv[1]))
    try:
        serve(peer, Path(sys.argv[2]), sys.stdin, answer)
    finally:
        peer.close()
    answer({})


if __name__ == "__main__":
    main()
