"""One world: an arena, a drive's directory, a daemon and clients, for faults and checks."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from kvhearth_lab.harness import HUNG_S
from kvhearth_lab.harness.client_process import Client, Line
from kvhearth_lab.harness.relay import Relay
from kvhearth_lab.torture.plan import Plan
from kvhearth_lab.torture.report import CAUGHT, CRASH, LOST, WRONG, Report, Stalls, Window
from kvhearth_lab.torture.scene import Places, Scenario
from kvhearth_lab.torture.world_config import ROOMY

MOVER = "kvhearth_server.tiers.remote.helper"
"""Module that a remote's helper process runs."""
_STORES_A_GO = 14
_STORES_A_GO_PRESSED = 120
_KNOWN_A_GO = 200
_NUMBERS_A_LIFE = 100_000
_TICK_S = 0.02
_DIRECT_EACH = 4
"""Of this many lives of remote clients one goes past its relay."""
_URL_OPTIONS = "call_ms=8000&lookup_ms=8000&attach_ms=8000&heartbeat_ms=200"


class UselessError(Exception):
    """The world cannot continue; the problem was reported."""


class Clients(Scenario):
    """A scene with clients."""

    def __init__(self, plan: Plan, places: Places, report: Report, stalls: Stalls) -> None:
        super().__init__(plan, places, report, stalls)
        self.clients: list[Client] = []
        self._lives = 0
        self._slow: list[tuple[Client, str, float, float]] = []
        self._pauses = 0
        self._direct: set[int] = set()
        self._killed: set[int] = set()

    def traffic(self, seconds: float) -> None:
        """Let clients work; return early if the daemon is gone."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0 and not self.daemon.dead:
            time.sleep(min(_TICK_S, left))

    def add_client(self, index: int, *, direct: bool | None = None) -> Client:
        """Start the client with this index of the shape; a remote one ``direct``ly or by its relay
        (default: by its relay mostly).
        """
        model, cache = self.shape.clients[index]
        url = self.daemon.url(_URL_OPTIONS)
        if index in self.shape.remote:
            direct = self._lives % _DIRECT_EACH == 0 if direct is None else direct
            (self._direct.add if direct else self._direct.discard)(index)
            url = self.network.url(index, _URL_OPTIONS, direct=direct)
        page_bytes, shards = self.shape.models[model]
        self._lives += 1
        start = {
            "url": url,
            "engine_id": f"e{index}",
            "model": self.model_name(model),
            "page_bytes": page_bytes,
            "shards": shards,
            "cache": cache and shards == 1,
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
        """Return a client, by a number of the dice."""
        return self.clients[number % len(self.clients)]

    def local_clients(self) -> list[Client]:
        """Return the clients that attach on the daemon's own socket."""
        return [each for n, each in enumerate(self.clients) if n not in self.shape.remote]

    def relayed(self, number: int) -> tuple[Client, Relay]:
        """Return a remote client whose connections go through its relay, by a number of the dice.
        A client is replaced if there is none.
        """
        found = [n for n in self.shape.remote if n not in self._direct] or self.shape.remote[:1]
        index = found[number % len(found)]
        if index in self._direct:
            self.replace(self.clients[index], kill=False, direct=False)
        return self.clients[index], self.network.relays[index]

    @contextlib.contextmanager
    def without_gateway(self, why: str) -> Iterator[None]:
        """Mark slow operations of remote clients as expected, until a gateway serves after the
        block; local clients must notice nothing.
        """
        with self.window(why, *(f"e{index}" for index in self.shape.remote)):
            yield
            self._await_gateway()

    def kill_gateway(self) -> None:
        """Send SIGKILL to the gateway, also to one that only starts."""
        for pid in self.daemon.children():
            if _is_mover(pid):
                continue
            self._killed.add(pid)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _await_gateway(self) -> None:
        end = time.monotonic() + HUNG_S
        while not self.daemon.dead and not set(self.daemon.gateways()) - self._killed:
            time.sleep(_TICK_S)
            if time.monotonic() > end:
                text = f"no gateway serves after {HUNG_S:g} s: {self.daemon.complaints()}"
                self.report.find(CRASH, text, self.where)
                raise UselessError

    def replace(self, client: Client, *, kill: bool, direct: bool | None = None) -> None:
        """End a client and start one in its place; ``direct`` as for ``add_client``."""
        index = self.clients.index(client)
        if kill:
            client.kill()
        else:
            client.end()
        self.clients[index] = self.add_client(index, direct=direct)
        if not self._pauses:
            self.go(self.clients[index])

    def go(self, client: Client, more: int = 0) -> None:
        """Let a client work and store a portion of new blocks; ``more`` raises the portion even if
        nearly all blocks that the world may store were stored.
        """
        attempts, clients = self.oracle.attempts(), len(self.clients)
        left = max(0, self.shape.blocks_max - attempts) // clients
        kept = max(0, self.shape.blocks_kept + self.shape.blocks_max - attempts) // clients
        most = _STORES_A_GO if self.shape.keeps else _STORES_A_GO_PRESSED
        known = self.oracle.known(client.model)
        rng = random.Random(f"{self.plan.seed}/{self.plan.number}/{self.step}/{client.name}")
        client.say(
            "go",
            stores=max(min(most, left), min(more, kept)),
            known=rng.sample(known, min(len(known), _KNOWN_A_GO)),
        )

    def store_more(self, more: int = 0) -> None:
        """Let all clients store further new blocks; ``more`` as for ``go``."""
        if not self._pauses:
            for each in self.clients:
                self.go(each, more)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Keep all clients from working, after their earlier reports have arrived."""
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
        """Bump the epoch of a client's model; its other clients restart with the new weights."""
        with self.paused():
            epoch, _ = self.oracle.sealed(client.model)
            for number in range(1, 4):  # covers a lost answer
                self.oracle.bumped(client.model, epoch + number)
            label = f"{client.model} {epoch} {self.step}" if self.server else ""
            said = client.ask("bump", label=label)
            if said and said["epoch"] > 0:
                self.labels[client.model] = label
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
            if not self.explains_checksum("client"):
                self.report.find(CAUGHT, line["caught"], where)
        elif "promotion_s" in line and self.drive_is_good:
            longest = max(self.report.longest_promotion_s, line["promotion_s"])
            self.report.longest_promotion_s = longest

    def judge_slow(self) -> None:
        """Judge slow operations, now that all windows are known."""
        slow, self._slow = self._slow, []
        for client, name, begin, end in slow:
            left = end - begin - self.stalls.explained_s(begin, end, client.name)
            self.report.stall(left, f"{client.name} {name}", self.where)


class World(Clients):
    """A crew with its daemon's starts and ends."""

    def __init__(self, plan: Plan, places: Places, report: Report, stalls: Stalls) -> None:
        super().__init__(plan, places, report, stalls)
        self._down: Window | None = None

    def launch_daemon(self, fault: str = "") -> None:
        """Start the daemon's process without waiting."""
        if self._down is None:
            self._down = self.stalls.open("daemon away")
        self.trust_drive()
        self.daemon.launch(fault)

    def start_daemon(self, fault: str = "") -> bool:
        """Start the daemon and wait until it accepts clients; False if an armed fault ended it
        before.

        Raises:
            UselessError: it does not come up.
        """
        self.launch_daemon(fault)
        return self.wait_daemon(fault)

    def wait_daemon(self, fault: str = "") -> bool:
        """Wait for a daemon that was launched; as ``start_daemon``."""
        if not self.daemon.wait_ready():
            status = self.daemon.exit_code
            if fault and status == -9:
                return False
            how = "does not come up" if status is None else f"ended with {status} at its start"
            self.report.find(CRASH, f"the daemon {how}: {self.daemon.complaints()}", self.where)
            self.daemon.kill()
            raise UselessError
        if self._down is not None:
            self.stalls.close(self._down)
            self._down = None
        if self.shape.remote:
            with self.without_gateway("gateway starts"):
                pass
        return True

    def start_server(self) -> None:
        """Start the remote, if there is one, and wait until it serves.

        Raises:
            KVHearthError: ``internal``: it does not come up.
        """
        if self.server is not None:
            self.server.launch()
            self.server.wait()

    def begin(self) -> None:
        """Start the remote, the daemon and the clients; raises as ``start_daemon``."""
        self.start_server()
        self.start_daemon()
        self.start_clients()

    def end_server(self) -> None:
        """End the remote."""
        if self.server is not None:
            self.server.kill()

    def movers(self) -> list[int]:
        """Return the helper processes of the daemon's remote."""
        if self.server is None or self.daemon.dead:
            return []
        return [pid for pid in self.daemon.children() if _is_mover(pid)]

    def signal_movers(self, number: signal.Signals) -> int:
        """Send a signal to each helper of the remote, and return their number."""
        movers = self.movers()
        for pid in movers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        return len(movers)

    def kill_daemon(self, *, settled: bool = True) -> None:
        """Send SIGKILL. Unless ``settled`` is False, excuse the blocks that were lost with its
        memory.
        """
        if self._down is None:
            self._down = self.stalls.open("daemon away")
        self.daemon.kill()
        if settled:
            self.settle_memory()

    def terminate_daemon(self) -> None:
        """Send SIGTERM; the daemon must end without an error."""
        self._down = self._down or self.stalls.open("daemon away")
        begin = time.monotonic()
        status: int | None = None
        try:
            status = self.daemon.terminate()
        except subprocess.TimeoutExpired:
            self.daemon.kill()
        took_s = time.monotonic() - begin
        if status != 0:
            text = f"SIGTERM: status {status} after {took_s:.1f} s: {self.daemon.complaints()}"
            self.report.find(CRASH, text, self.where)
        else:
            self._all_written()
        self.settle_memory()

    def _all_written(self) -> None:
        """Check after an orderly end that sealed blocks are on the drive, unless the drive was
        faulty.
        """
        if not self.shape.ssd_bytes or not self.oracle.keeps or self.drive_is_suspect:
            return
        if self.shape.kind == ROOMY and self.damaged:
            return  # damaged records have not been noticed yet: memory has all blocks
        for model, above in self.not_on_disk(sealed=True).items():
            if above:
                text = f"{model}: {len(above)} sealed blocks were not written at an orderly end"
                self.report.find(LOST, f"{text}, such as {above[:8]}", self.where, len(above))
                self.oracle.excuse(model, above, "lost")

    def settle_memory(self) -> None:
        """Excuse blocks that were only in memory after a daemon's end, if the arena's files do not
        remain.
        """
        if not self.shape.arena_stays:
            self.excuse_not_on_disk("memory ended")


def _is_mover(pid: int) -> bool:
    """Whether a process is the helper of a remote."""
    with contextlib.suppress(OSError):
        return MOVER.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False
