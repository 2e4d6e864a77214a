"""One world: an arena, a drive's directory, a daemon, clients; what faults may do to them."""

from __future__ import annotations

import contextlib
import json
import random
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from kvhearth.faults import DISK_ENVIRONMENT_NAME
from kvhearth_server.torture import damage
from kvhearth_server.torture.clock import set_offsets
from kvhearth_server.torture.content import key_of
from kvhearth_server.torture.oracle import Oracle
from kvhearth_server.torture.places import Places
from kvhearth_server.torture.report import CAUGHT, CRASH, WRONG, Report
from kvhearth_server.torture.script import Plan
from kvhearth_server.torture.served import Daemon
from kvhearth_server.torture.stalls import Stalls
from kvhearth_server.torture.workers import Client, Line

_STORES_A_GO = 14
_KNOWN_A_GO = 200
_NUMBERS_A_LIFE = 100_000
_TICK_S = 0.02
PATIENCE_S = 15.0
"""What is not served, given back or closed after so long never will be."""


class UselessError(Exception):
    """The world cannot go on: what is wrong was reported."""


class World:
    """What faults and checks act on.

    Attributes:
        patience_s: ``PATIENCE_S``; shorter where something is known to be lost.
        monotonic_s: how far the daemon's monotonic clock is ahead.
        checksum_failures_expected: a fault damaged bytes.
        drive_is_good: no fault has hit the drive, so everything must reach it.
        counted: boot and counters of the daemon at the last look.
    """

    def __init__(self, plan: Plan, places: Places, report: Report, stalls: Stalls) -> None:
        self.plan, self.shape, self.places, self.report = plan, plan.shape, places, report
        self.stalls = stalls
        self.oracle = Oracle(keeps=self.shape.keeps)
        self.step = 0
        self.patience_s = PATIENCE_S
        self.monotonic_s = 0.0
        self.checksum_failures_expected = False
        self.drive_is_good = True
        self.counted: tuple[str, dict[str, int]] = ("", {})
        self.clients: list[Client] = []
        self._lives = 0
        self._slow: list[tuple[Client, str, float, float]] = []
        self._pauses = 0
        self._down: Any = None
        self.orders()
        set_offsets(places.clock, 0.0, 0.0)
        self.daemon = Daemon(
            places.folder,
            self.shape.flags(places.arena, places.ssd),
            {DISK_ENVIRONMENT_NAME: str(places.orders)} if self.shape.ssd_bytes else {},
            places.clock if self.shape.skewed else None,
        )

    @property
    def where(self) -> dict[str, Any]:
        """For findings."""
        return {"world": self.plan.number, "step": self.step, "kind_of_world": self.shape.kind}

    @property
    def arena_dir(self) -> Path:
        """Of the arena's files."""
        return self.places.arena

    @property
    def ssd_dir(self) -> Path:
        """The drive's directory."""
        return self.places.ssd

    @property
    def clock_file(self) -> Path:
        """What the daemon's clocks follow."""
        return self.places.clock

    def model_name(self, number: int) -> str:
        """Of one of the world's models."""
        return f"m{self.plan.seed}.{self.plan.number}.{number}"

    # -- the daemon --------------------------------------------------------------------------------

    def launch_daemon(self, fault: str = "") -> None:
        """Start its process and do not wait."""
        if self._down is None:
            self._down = self.stalls.open("daemon away")
        self.daemon.launch(fault)

    def start_daemon(self, fault: str = "") -> bool:
        """Start it and wait until it takes clients; false if an armed fault ended it before.

        Raises:
            UselessError: it does not come up.
        """
        self.launch_daemon(fault)
        if not self.daemon.wait_ready():
            status = self.daemon.wait_end(0.0)
            if fault and status == -9:
                return False
            how = "does not come up" if status is None else f"ended with {status} at its start"
            self.report.find(CRASH, f"the daemon {how}: {self.daemon.complaints()}", self.where)
            self.daemon.kill()
            raise UselessError
        if self._down is not None:
            self.stalls.close(self._down)
            self._down = None
        return True

    def kill_daemon(self, *, settled: bool = True) -> None:
        """kill -9. Unless not ``settled``, what ended with its memory is no longer expected."""
        if self._down is None:
            self._down = self.stalls.open("daemon away")
        self.daemon.kill()
        if settled:
            self.settle_memory()

    def terminate_daemon(self) -> None:
        """SIGTERM; it must end well."""
        self._down = self._down or self.stalls.open("daemon away")
        begin = time.monotonic()
        status = self.daemon.terminate()
        took_s = time.monotonic() - begin
        if status != 0:
            text = f"SIGTERM: status {status} after {took_s:.1f} s: {self.daemon.complaints()}"
            self.report.find(CRASH, text, self.where)
        self.settle_memory()

    def settle_memory(self) -> None:
        """After a daemon's end: without an arena's files, what is left is what is on the drive."""
        if not self.shape.arena_stays:
            self.excuse_nothing_but_disk()

    # -- traffic -----------------------------------------------------------------------------------

    def traffic(self, seconds: float) -> None:
        """Let clients work; back early if the daemon is gone."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0 and self.daemon.alive:
            time.sleep(min(_TICK_S, left))

    def add_client(self, index: int) -> Client:
        """Start the client with this index of the shape."""
        model, pipes = self.shape.clients[index]
        page_bytes, shards = self.shape.models[model]
        self._lives += 1
        start = {
            "url": self.daemon.url,
            "engine_id": f"e{index}",
            "model": self.model_name(model),
            "page_bytes": page_bytes,
            "shards": shards,
            "pipes": pipes and shards == 1,
            "first": self._lives * _NUMBERS_A_LIFE,
            "seed": f"{self.plan.seed}/{self.plan.number}/{self._lives}",
        }
        return Client(f"e{index}", self.places.folder, start, self._heard)

    def start_clients(self) -> None:
        """Start all clients, and let them work."""
        self.clients = [self.add_client(index) for index in range(len(self.shape.clients))]
        for each in self.clients:
            self.go(each)

    def client(self, number: int) -> Client:
        """One of them, by a number of the dice."""
        return self.clients[number % len(self.clients)]

    def replace(self, client: Client, *, kill: bool) -> None:
        """End a client and start one in its place."""
        index = self.clients.index(client)
        if kill:
            client.kill()
        else:
            client.end()
        self.clients[index] = self.add_client(index)
        if not self._pauses:
            self.go(self.clients[index])

    def go(self, client: Client) -> None:
        """Let a client work; it may store so many new blocks."""
        left = max(0, self.shape.blocks_max - self.oracle.attempts())
        known = self.oracle.known(client.model)
        dice = random.Random(f"{self.plan.seed}/{self.plan.number}/{self.step}/{client.name}")
        client.say(
            "go",
            stores=min(_STORES_A_GO, left // len(self.clients)),
            known=dice.sample(known, min(len(known), _KNOWN_A_GO)),
        )

    def store_more(self) -> None:
        """Let all clients store some more new blocks."""
        if not self._pauses:
            for each in self.clients:
                self.go(each)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """No client works meanwhile, and all that they learned before is known."""
        self._pauses += 1
        if self._pauses == 1:
            asked = [(each, each.say("pause")) for each in self.clients]
            for each, number in asked:
                each.answer(number)
        try:
            yield
        finally:
            self._pauses -= 1
            self.store_more()

    def bump(self, client: Client) -> None:
        """New weights for a client's model; its other clients begin anew with them."""
        with self.paused():
            epoch, _ = self.oracle.sealed(client.model)
            for number in range(1, 4):  # also if the answer gets lost
                self.oracle.bumped(client.model, epoch + number)
            said = client.ask("bump")
            if said and said["epoch"] > 0:
                self.oracle.bumped(client.model, said["epoch"])
                self.oracle.tried(client.model, said["epoch"], [])
            for other in list(self.clients):
                if other is not client and other.model == client.model:
                    self.replace(other, kill=False)

    def _heard(self, client: Client, line: Line) -> None:
        where = {**self.where, "client": client.name}
        if "tried" in line:
            self.oracle.tried(client.model, line["epoch"], line["tried"])
        elif "bound" in line:
            self.oracle.bound(client.model, line["epoch"], line["bound"])
        elif "counts" in line:
            self.report.count(line["counts"])
            self._slow += [(client, name, begin, end) for name, begin, end in line["slow"]]
        elif "late" in line:
            begin, end = line["late"]
            self.stalls.late(begin, end, client.name)
        elif "wrong" in line:
            self.report.find(WRONG, line["wrong"], where)
        elif "caught" in line:
            self.report.figures["checksum_failures_seen"] += 1
            if not self.checksum_failures_expected:
                self.report.find(CAUGHT, line["caught"], where)
        elif "climbed_s" in line and self.drive_is_good:
            longest = max(self.report.longest_promotion_s, line["climbed_s"])
            self.report.longest_promotion_s = longest

    def judge_slow(self) -> None:
        """Look at operations that took long, now that all windows are known."""
        slow, self._slow = self._slow, []
        for client, name, begin, end in slow:
            left = end - begin - self.stalls.explained_s(begin, end, client.name)
            self.report.stall(left, f"{client.name} {name}", self.where)

    @contextlib.contextmanager
    def window(self, why: str) -> Iterator[None]:
        """What takes long meanwhile is explained."""
        opened = self.stalls.open(why)
        try:
            yield
        finally:
            self.stalls.close(opened)

    # -- what faults say ---------------------------------------------------------------------------

    def orders(self, **said: Any) -> None:
        """Command the drive; without arguments it is good again."""
        fresh = self.places.orders.with_suffix(".new")
        fresh.write_text(json.dumps(said))
        fresh.replace(self.places.orders)

    def drive_faulted(self) -> None:
        """From now on blocks may be in memory only."""
        self.drive_is_good = False

    def expect_checksum_failures(self) -> None:
        """Bytes were damaged on purpose."""
        self.checksum_failures_expected = True

    def excuse(self, keys: Iterable[bytes], why: str) -> None:
        """Blocks that may be gone."""
        wanted = set(keys)
        for model in {each.model for each in self.clients}:
            known = self.oracle.known(model)
            hit = [number for number in known if key_of(model, number) in wanted]
            self.oracle.excuse(model, hit, why)

    def excuse_unless_on_disk(self, keys: Iterable[bytes], why: str) -> None:
        """Blocks whose copy in memory is damaged: a whole one on the drive repairs them."""
        whole = damage.keys_on_disk(self.ssd_dir) if self.shape.ssd_bytes else set()
        self.excuse([key for key in keys if key not in whole], why)

    def excuse_not_on_disk(self, why: str) -> None:
        """Blocks that are in memory only."""
        whole = damage.keys_on_disk(self.ssd_dir)
        for model in {each.model for each in self.clients}:
            known = self.oracle.known(model)
            gone = [number for number in known if key_of(model, number) not in whole]
            self.oracle.excuse(model, gone, why)

    def excuse_nothing_but_disk(self) -> None:
        """Memory has ended: what is whole on the drive must come back."""
        whole = damage.keys_on_disk(self.ssd_dir) if self.shape.ssd_bytes else set()
        for model in {each.model for each in self.clients}:
            known = self.oracle.known(model)
            gone = [number for number in known if key_of(model, number) not in whole]
            self.oracle.excuse(model, gone, "memory ended")

    def excuse_all(self, why: str) -> None:
        """Every block may be gone."""
        self.oracle.excuse_all(why)

    def stop_keeping(self, why: str) -> None:
        """From now on any block may be evicted."""
        self.oracle.excuse_all(why)
        self.oracle.keeps = False

    def note_point(self, point: str, *, reached: bool) -> None:
        """A fault point at which the daemon was to die."""
        self.report.figures[f"point {point}" if reached else f"not reached: {point}"] += 1
