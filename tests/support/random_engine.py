"""Random engines that die at any point: one process, or a scheduler and a second rank.

Both processes are forked by the nursery. Forbidden events go to ``report``, counts of other events
to ``tally``; both files are appended to at once, because the process may die the next moment.
"""

from __future__ import annotations

import json
import logging
import os
import random
import signal
import socket
import threading
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvhearth import Contract
from kvhearth import failpoints as faults
from kvhearth.model import EXTENT_DTYPE, Records
from kvhearth_lab.harness.engine import Copied, Engine, Rank, Seen, contract_of, key_of, rank_of

KEYS = 120
"""Number of keys of a model, which all its engines share."""
ANSWER_S = 30.0
LATE_S = 0.3
"""Time for which a rank continues to write after its scheduler died."""
GARBAGE = 0xEE
CLIENT_FAULTS = (
    "copier.store_block",
    "copier.store_done",
    "copier.load_block",
    "copier.load_done",
)


class WorkerGoneError(Exception):
    """The other process of this engine has ended."""


class Diary:
    """Appends lines to the two files."""

    def __init__(self, report: str, tally: str) -> None:
        self._report = os.open(report, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._tally = os.open(tally, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def bad(self, text: str) -> None:
        """Record an event that must not happen."""
        os.write(self._report, f"{text}\n".encode())

    def count(self, what: str, amount: int) -> None:
        """Count events."""
        if amount:
            os.write(self._tally, f"{what} {amount}\n".encode())

    def note(self, seen: Seen) -> None:
        """Record the outcome of a check."""
        for text in seen.bad:
            self.bad(text)
        self.count("right", len(seen.right))
        for reason, amount in seen.failed.items():
            self.count(f"failed_{reason}", amount)


class FarRank:
    """Rank 1 in another process, which copies on the scheduler's command; see ``Worker``."""

    number = 1

    def __init__(self, door: socket.socket) -> None:
        self._door = door
        self._lines = door.makefile("r")
        door.settimeout(ANSWER_S)

    @property
    def boot_id(self) -> str:
        """ID of the boot it is attached to, or empty."""
        return str(self._ask({"do": "boot"}))

    def store(self, boot_id: str, keys: list[bytes], epoch: int, extents: Records) -> Copied | None:
        """See ``RankLike``."""
        return self._copy("store", boot_id, keys, epoch, extents)

    def load(self, boot_id: str, keys: list[bytes], epoch: int, extents: Records) -> Copied | None:
        """See ``RankLike``."""
        return self._copy("load", boot_id, keys, epoch, extents)

    def close(self) -> None:
        """Let the other process end."""
        self._lines.close()
        self._door.close()

    def _copy(
        self, do: str, boot_id: str, keys: list[bytes], epoch: int, extents: Records
    ) -> Copied | None:
        answer = self._ask(
            {
                "do": do,
                "pid": os.getpid(),
                "boot_id": boot_id,
                "keys": [key.hex() for key in keys],
                "epoch": epoch,
                "extents": np.ascontiguousarray(extents).tobytes().hex(),
            }
        )
        if answer is None:
            return None
        sums = np.frombuffer(bytes.fromhex(answer["checksums"]), np.uint8).reshape(-1, 16)
        ok, wrong = np.array(answer["ok"], np.bool_), np.array(answer["wrong"], np.bool_)
        return Copied(ok, wrong, sums, answer["reasons"], answer["alive"])

    def _ask(self, request: dict[str, Any]) -> Any:
        try:
            self._door.sendall((json.dumps(request) + "\n").encode())
            line = self._lines.readline()
        except ConnectionError:
            line = ""
        if not line:
            raise WorkerGoneError
        return json.loads(line)


class Worker:
    """Rank 1: obeys the scheduler's process. When that process dies, it continues to write to the
    slots of its last store, as a GPU would.
    """

    def __init__(self, rank: Rank, door: socket.socket, diary: Diary, rng: random.Random) -> None:
        self._rank = rank
        self._door = door
        self._diary = diary
        self._rng = rng
        self._late = threading.Event()
        self._last: Records | None = None
        self._alone = False
        rank.client.add_quiesce_hook(lambda _: not self._late.is_set())

    def serve(self) -> None:
        """Obey commands until the scheduler's process ends."""
        with self._door.makefile("r") as lines:
            try:
                for line in lines:
                    answer = self._obey(json.loads(line))
                    self._door.sendall((json.dumps(answer) + "\n").encode())
                    if not self._alone:
                        self._last = None
            except ConnectionError:
                pass
        if self._last is not None:
            self._write_late(self._last)

    def _obey(self, request: dict[str, Any]) -> Any:
        if request["do"] == "boot":
            return self._rank.boot_id
        keys = [bytes.fromhex(key) for key in request["keys"]]
        extents = np.frombuffer(bytes.fromhex(request["extents"]), EXTENT_DTYPE)
        where = (request["boot_id"], keys, request["epoch"], extents)
        if request["do"] == "store":
            if self._rank.boot_id == request["boot_id"]:
                self._last = extents
                if self._rng.random() < 0.1:
                    os.kill(request["pid"], signal.SIGKILL)
                    self._alone = True
            copied = self._rank.store(*where)
        else:
            copied = self._rank.load(*where)
        if copied is None:
            return None
        return {
            "ok": copied.ok.tolist(),
            "wrong": copied.wrong.tolist(),
            "checksums": copied.checksums.tobytes().hex(),
            "reasons": copied.reasons,
            "alive": copied.alive,
        }

    def _write_late(self, extents: Records) -> None:
        """Write without checks while the session counts as undrained, which is the dangerous
        case.
        """
        arena = self._rank.client.arena
        self._late.set()
        # Only an arena that was still mapped when the drain was barred may be written to.
        if arena is None or self._rank.client.arena is not arena:
            self._late.clear()
            return
        end = time.monotonic() + self._rng.uniform(0, LATE_S)
        while time.monotonic() < end:
            for one in extents:
                start = int(one["offset"])
                arena.view(int(one["segment"]))[start : start + int(one["length"])] = GARBAGE
            time.sleep(0.001)
        self._diary.count("late_writes", len(extents))
        del arena
        self._late.clear()


class RandomLife:
    """Random actions of the scheduler's process, until it ends in some way."""

    def __init__(self, engine: Engine, model: str, diary: Diary, rng: random.Random) -> None:
        self._engine = engine
        self._model = model
        self._diary = diary
        self._rng = rng

    def live(self, life_s: float) -> None:
        """Act until the time is over."""
        end = time.monotonic() + life_s
        while time.monotonic() < end:
            if not self._engine.ready:
                # The daemon or a rank is away: lookups miss for a while, or this process ends.
                self._engine.client.wait_ready(0.05)
                time.sleep(0.005)
                self._diary.note(self._engine.check(self._keys(4)))
                self._diary.count(f"waits_{self._model}", 1)
                continue
            self._act()

    def _keys(self, count: int) -> list[bytes]:
        numbers = self._rng.sample(range(KEYS), count)
        return [key_of(self._model, number) for number in numbers]

    def _act(self) -> None:
        engine, rng = self._engine, self._rng
        choice = rng.random()
        if choice < 0.45:
            keys = self._keys(rng.randint(1, 16))
            stored = engine.store(keys, sums=rng.random() < 0.6, parent=self._keys(1)[0])
            self._diary.count(f"stored_{self._model}", len(stored.bound))
        elif choice < 0.8:
            self._diary.note(engine.check(self._keys(rng.randint(1, 24))))
        elif choice < 0.9:
            taken = engine.reserve(rng.randint(1, 8))
            if rng.random() < 0.6:
                engine.client.abort(
                    taken.groups, boot_id=taken.boot_id, in_doubt=rng.random() < 0.5
                )
        elif choice < 0.95:
            engine.pin(self._keys(4), 0.3)
        else:
            # Takes a lease that is never released.
            engine.client.lookup({0: self._keys(4)})


@dataclass(frozen=True)
class Life:
    """Parameters of an engine's processes; ``report`` and ``tally`` are the files of ``Diary``."""

    url: str
    name: str
    model: str
    page_bytes: int
    shards: int
    seed: int
    report: str
    tally: str

    @property
    def contract(self) -> Contract:
        """Contract of the engine."""
        return contract_of(self.page_bytes, shards=self.shards, model=self.model)


def scheduler(door: int, *, far: bool, **life: Any) -> int:
    """Run the process with the scheduler and rank 0; rank 1 is in it, too, unless ``far``."""
    its = Life(**life)
    rng, diary = _begin(its.seed), Diary(its.report, its.tally)
    others = [FarRank(socket.socket(fileno=door))] if far else None
    engine = Engine(its.url, its.contract, its.name, others)
    _arm(rng)
    try:
        RandomLife(engine, its.model, diary, rng).live(rng.uniform(0.05, 2.0))
    except WorkerGoneError:
        # The worker's writes are in doubt, and so is everything else: ending the group reports it.
        diary.count("workers_lost", 1)
    return _end(rng, engine)


def worker(door: int, **life: Any) -> int:
    """Run the process with rank 1."""
    its = Life(**life)
    rng = _begin(its.seed + 1)
    rank = rank_of(its.url, its.contract, its.name, 1)
    _arm(rng)
    Worker(rank, socket.socket(fileno=door), Diary(its.report, its.tally), rng).serve()
    return _end(rng, rank)


def _begin(seed: int) -> random.Random:
    # Hundreds of clients report hundreds of deaths.
    logging.getLogger("kvhearth").addHandler(logging.NullHandler())
    logging.getLogger("kvhearth").propagate = False
    return random.Random(seed)


def _arm(rng: random.Random) -> None:
    if rng.random() < 0.3:
        faults.arm(f"{rng.choice(CLIENT_FAULTS)}:{rng.randint(1, 40)}")


def _end(rng: random.Random, what: Engine | Rank) -> int:
    """Close properly, end without a goodbye, or die."""
    choice = rng.random()
    if choice < 0.4:
        what.close()
    elif choice < 0.7:
        os.kill(os.getpid(), signal.SIGKILL)
    return 0
