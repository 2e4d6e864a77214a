"""kill -9 of the daemon, at random moments and at every fault point: no wrong byte, nothing lost.

Each lane runs one world after the other: an arena, two engines that store, check, pin and abort,
and a daemon that is killed and started again. Bytes follow from keys, so every served block can be
compared. A roomy world never evicts: there, each acknowledged block must come back.

``KVHEARTH_SEED`` repeats a run's choices (not its timing), ``KVHEARTH_SOAK_S`` is the length of the
slow test.
"""

from __future__ import annotations

import os
import random
import re
import secrets
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from support.daemon import Daemon, stopped_daemon, until

from kvhearth_lab.harness.engine import STORE_MAX, Engine, Seen, contract_of

ROOT = Path(__file__).resolve().parents[2]
LANES = 2
KILLS = 32
SOAK_S = float(os.environ.get("KVHEARTH_SOAK_S", "60"))
TRAFFIC_S = 0.3
"""Longest life of a daemon in a round, after its adopted blocks were checked."""
WORLD_ROUNDS = 9
AT_START = ("catalogue", "durable", "populate")
RARE = ("arena.slots_freed", "commit.between")
"""Points that are reached once a start, and by long stores only."""
EARLY = "start"
"""Marker instead of a fault: the daemon dies at a random moment of its start."""
BLOCKS_MAX = 700
"""Bound on blocks in a roomy world, of at most 48 KiB and two shards: less than half its memory."""


def fault_points() -> list[str]:
    """Every fault point of the daemon's sources, except those of other tests: of an SSD tier, see
    ``integration/test_ssd_lives``, ``sim/test_kill_ssd`` and the chaos kit; of an arena that grows
    or shrinks, see ``integration/test_arena_resize``; of a remote and its helper, see the chaos
    kit's worlds with a remote.
    """
    others = ("demote.", "mover.", "promote.", "remote.", "resize.", "ssd.")
    texts = (path.read_text() for path in (ROOT / "server").rglob("*.py"))
    found = {name for text in texts for name in re.findall(r'\bhit\("([a-z_.]+)"\)', text)}
    found -= {name for name in found if name.startswith(others)}
    assert len(found) >= 19, found
    return sorted(found)


def seed_of_run() -> int:
    """Returns the seed from the environment, or a new one."""
    return int(os.environ.get("KVHEARTH_SEED") or secrets.randbelow(1 << 32))


@dataclass
class Known:
    """One engine's knowledge of its blocks under one weights epoch.

    Attributes:
        bound: acknowledged blocks.
        tried: blocks that may be present.
    """

    bound: dict[bytes, None] = field(default_factory=dict)
    tried: dict[bytes, None] = field(default_factory=dict)


class Notes:
    """One engine's knowledge by epoch; ``epoch_min`` is the newest acknowledged epoch."""

    def __init__(self) -> None:
        self.epochs: dict[int, Known] = {}
        self.epoch_min = 0

    def of(self, engine: Engine) -> Known:
        """Returns the knowledge for the epoch that the engine runs with."""
        epoch = engine.client.epoch
        assert epoch < 0 or epoch >= self.epoch_min, f"epoch {epoch}, after {self.epoch_min}"
        return self.epochs.setdefault(epoch, Known())

    def void(self, engine: Engine) -> list[bytes]:
        """Returns keys that were stored under other epochs only."""
        now = self.of(engine).tried
        return sorted(
            {key for each in self.epochs.values() for key in each.tried if key not in now}
        )

    def __len__(self) -> int:
        return sum(len(each.tried) for each in self.epochs.values())


class World:
    """One arena with its engines; a round ends with the daemon's death."""

    def __init__(self, random_: random.Random, daemon: Daemon, name: str, *, roomy: bool) -> None:
        self.random = random_
        self.daemon = daemon
        self.name = name
        self.roomy = roomy
        self.deaths: Counter[str] = Counter()
        self.checked = 0
        self.dropped_pages = 0
        pages = random_.sample([4096, 16384, 40000, 49152], 2)
        shards = random_.choice([1, 2])
        self.contracts = [
            contract_of(pages[0], shards=shards, model=f"{name}a"),
            contract_of(pages[1], model=f"{name}b"),
        ]
        self.notes = [Notes(), Notes()]
        self.engines: list[Engine] = []

    # -- one round ---------------------------------------------------------------------------------

    def round(self, fault: str) -> None:
        """Starts with ``fault`` armed, checks the adopted blocks, makes traffic, dies."""
        if fault == EARLY:
            process = self.daemon.launch()
            time.sleep(self.random.uniform(0, 0.08))
            process.kill()
            process.wait()
        elif self.daemon.start(fault):
            self._be_reborn()
            with ThreadPoolExecutor(len(self.engines)) as pool:
                list(pool.map(self._live, range(len(self.engines))))
        died_at_fault = self.daemon.dead  # or during its start
        self.daemon.kill()
        self.deaths[fault.partition(":")[0] if died_at_fault else "random"] += 1

    def _be_reborn(self) -> None:
        """Replaces some engines; the others attach again by themselves."""
        for number, contract in enumerate(self.contracts):
            if number >= len(self.engines):
                self.engines.append(self._born(number, contract))
            elif self.random.random() < 0.6:
                self.engines[number].close()
                self.engines[number] = self._born(number, contract)

    def _born(self, number: int, contract: object) -> Engine:
        return Engine(self.daemon.url(), contract, f"e{number}")  # type: ignore[arg-type]

    def _live(self, number: int) -> None:
        """Runs one engine until the daemon dies."""
        engine, notes = self.engines[number], self.notes[number]
        rng = random.Random(self.random.random())
        if not engine.wait_ready(give_up=lambda: self.daemon.dead):
            return
        self.check(engine, notes, final=False)
        end = time.monotonic() + rng.uniform(0.02, TRAFFIC_S)
        while time.monotonic() < end and not self.daemon.dead:
            self._act(engine, notes, rng)

    def _act(self, engine: Engine, notes: Notes, rng: random.Random) -> None:
        known = notes.of(engine)
        choice = rng.random()
        if engine.client.epoch < 0 or choice < 0.05:
            notes.epoch_min = max(notes.epoch_min, engine.client.bump_epoch())
        elif choice < 0.6:
            self._store(engine, notes, rng)
        elif choice < 0.75:
            self._note(engine.check(_some(rng, known.tried, 16)))
        elif choice < 0.9:
            taken = engine.reserve(rng.randint(1, 16))
            if rng.random() < 0.5:
                engine.client.abort(
                    taken.groups, boot_id=taken.boot_id, in_doubt=rng.random() < 0.5
                )
        else:
            engine.pin(_some(rng, known.bound, 8), 0.2)

    def _store(self, engine: Engine, notes: Notes, rng: random.Random) -> None:
        if self.roomy and len(notes) > BLOCKS_MAX:
            return
        known = notes.of(engine)
        old = [*known.tried, *notes.void(engine)]
        most = STORE_MAX - 4 if rng.random() < 0.2 else 24
        keys = [rng.randbytes(32) for _ in range(rng.randint(1, most))]
        keys += _some(rng, old, rng.choice([0, 0, 4]))
        known.tried.update(dict.fromkeys(keys))
        parent = _some(rng, known.bound, 1)
        stored = engine.store(keys, sums=rng.random() < 0.5, parent=b"".join(parent))
        known.bound.update(dict.fromkeys(stored.bound))

    # -- what must hold ----------------------------------------------------------------------------

    def check(self, engine: Engine, notes: Notes, *, final: bool) -> None:
        """Compares all served blocks. In a roomy world each acknowledged block is present; at the
        end, it is also right.
        """
        if engine.client.epoch < 0:
            return
        known = notes.of(engine)
        seen = self._note(engine.check(list(known.tried)))
        lost = set(seen.absent) & set(known.bound)
        assert not (self.roomy and lost), f"{self.name}: lost {len(lost)} acknowledged blocks"
        if final and self.roomy:
            rest = set(known.bound) - set(seen.right)
            until(lambda: self._all_right(engine, rest), f"{len(rest)} blocks become right")
        stale = self._note(engine.check(notes.void(engine)))
        there = stale.right + stale.lower_tier
        assert not there, f"{self.name}: {len(there)} blocks of old weights are there"

    def _all_right(self, engine: Engine, rest: set[bytes]) -> bool:
        rest -= set(self._note(engine.check(sorted(rest))).right)
        return not rest

    def _note(self, seen: Seen) -> Seen:
        assert not seen.bad, f"{self.name}: {seen.bad}"
        self.checked += len(seen.right)
        return seen

    def finish(self) -> None:
        """Starts once more without a fault: checks everything, releases it, checks the books."""
        self.daemon.start()
        self._be_reborn()
        for engine, notes in zip(self.engines, self.notes, strict=True):
            engine.wait_ready()
            while engine.client.epoch < 0:
                engine.client.bump_epoch()
            self.check(engine, notes, final=True)
        found = self.daemon.stats()
        evicted = {n: c for n, c in found.counters.items() if n.startswith("evicted_blocks")}
        assert not (self.roomy and any(evicted.values())), f"the world is too small: {evicted}"
        assert not any(n.startswith("checksum_failures") and c for n, c in found.counters.items())
        assert not any(n.startswith("task_failures") and c for n, c in found.counters.items())
        self.close()
        self.daemon.wait_quiet()
        assert self.daemon.terminate() == 0

    def close(self) -> None:
        """Ends the engines."""
        for engine in self.engines:
            engine.close()
        self.engines.clear()


def _some(rng: random.Random, keys: Iterable[bytes], count: int) -> list[bytes]:
    """Returns up to ``count`` of ``keys``, in their order."""
    every = list(keys)
    return [every[i] for i in sorted(rng.sample(range(len(every)), min(count, len(every))))]


def plan(random_: random.Random) -> Iterator[str]:
    """Yields deaths without end: every fault point in turn, in random order, and random moments."""
    while True:
        points = [*fault_points(), EARLY, EARLY, "", "", ""]
        random_.shuffle(points)
        for point in points:
            most = 1 if point in RARE else 4 if point.startswith(AT_START) else 12
            armed = point not in ("", EARLY)
            yield f"{point}:{random_.randint(1, most)}" if armed else point


@dataclass
class Tally:
    """Results of one lane."""

    deaths: Counter[str] = field(default_factory=Counter)
    checked: int = 0
    worlds: int = 0


def lane(seed: int, kills: int, deadline: float) -> Tally:
    """Runs worlds one after the other until the number of kills or the deadline is reached."""
    rng = random.Random(seed)
    faults = plan(rng)
    tally = Tally()
    while tally.deaths.total() < kills and time.monotonic() < deadline:
        roomy = rng.random() < 0.6
        memory = "128MiB" if roomy else "6MiB"
        with stopped_daemon(memory=memory, stock_fraction_max=0.3) as daemon:
            world = World(rng, daemon, f"w{seed & 0xFFFF}.{tally.worlds}.", roomy=roomy)
            try:
                for _ in range(min(WORLD_ROUNDS, kills - tally.deaths.total())):
                    world.round(next(faults))
                    if time.monotonic() > deadline:
                        break
                world.finish()
            finally:
                world.close()
            tally.deaths += world.deaths
            tally.checked += world.checked
            tally.worlds += 1
    return tally


def run(kills: int, seconds: float) -> Counter[str]:
    """Runs all lanes; returns how often the daemon died at each point."""
    seed = seed_of_run()
    print(f"\nKVHEARTH_SEED={seed}")
    deadline = time.monotonic() + seconds
    with ThreadPoolExecutor(LANES) as pool:
        lanes = [
            pool.submit(lane, seed * LANES + number, -(-kills // LANES), deadline)
            for number in range(LANES)
        ]
        tallies = [each.result() for each in lanes]
    deaths = sum((tally.deaths for tally in tallies), Counter())
    checked = sum(tally.checked for tally in tallies)
    worlds = sum(tally.worlds for tally in tallies)
    print(f"{deaths.total()} kills in {worlds} worlds, {checked} blocks compared: {dict(deaths)}")
    assert checked
    return deaths


def test_the_daemon_dies_anywhere_and_serves_no_wrong_byte() -> None:
    assert run(KILLS, 300).total() >= KILLS


@pytest.mark.slow
@pytest.mark.timeout(SOAK_S + 300)
def test_the_daemon_dies_for_minutes() -> None:
    deaths = run(1 << 30, SOAK_S)
    assert deaths.total() > SOAK_S / 3
    if SOAK_S >= 120:
        assert set(fault_points()) <= set(deaths), "a fault point was never reached"
