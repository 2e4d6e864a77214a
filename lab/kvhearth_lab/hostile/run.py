"""Runs ``kvhearth hostile``: one attack after another on a daemon with a good client."""

from __future__ import annotations

import contextlib
import http.client
import os
import shutil
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvhearth.errors import KVHearthError, Reason
from kvhearth.url import UnixUrl
from kvhearth_lab.bench.peers.adapters.harness import free_port
from kvhearth_lab.harness.client_process import Client, Line
from kvhearth_lab.harness.daemon import Daemon, tied
from kvhearth_lab.hostile import good
from kvhearth_lab.hostile.attack import NEEDS, SECOND_UID, Attack, Target, table
from kvhearth_lab.hostile.figures import LATE_S, Calls, Row, least, only_slow, summary
from kvhearth_server.gateway.tokens import Identity, add_token, new_token

UID_A, UID_B, UID_NOBODY = 61001, 61002, 65534
TENANT_MIB = 64
PAGE_BYTES = 16 << 10
REPEATS_MAX = 5
IDLE_SHARE, UNDER_SHARE, AFTER_SHARE = 0.35, 0.5, 0.15
IDLE_S_LEAST, UNDER_S_LEAST, AFTER_S_LEAST = 1.0, 1.5, 0.5
READY_S = 30.0
_WARM_S = 1.0
_SHARED_MEMORY = Path("/dev/shm")
_TOLD_S = 5.0
_SAMPLE_S = 0.05
_LIVEZ_PAUSE_S = 0.1
_LIVEZ_S = 5.0
_CALLS_KEPT = 1_000_000
Told = Callable[[str], None]


@dataclass(frozen=True)
class Users:
    """Uids of the run: three with root's rights, else one."""

    a: int
    b: int
    nobody: int

    @classmethod
    def here(cls) -> Users:
        """Return the users that this process may have."""
        own = os.geteuid()
        return cls(UID_A, UID_B, UID_NOBODY) if own == 0 else cls(own, own, own)

    @property
    def holds(self) -> frozenset[str]:
        """Keys of ``NEEDS`` that hold."""
        return frozenset({SECOND_UID}) if self.a != self.b else frozenset()

    def settings(self) -> dict[str, object]:
        """Return the daemon's settings of memory and tenants."""
        if self.a == self.b:
            return {"memory": f"{2 * TENANT_MIB}MiB"}
        tenants = [f"a={self.a}:{TENANT_MIB}MiB", f"b={self.b}:{TENANT_MIB}MiB"]
        return {"memory": f"{2 * TENANT_MIB}MiB", "tenants": tenants}


class Watch:
    """Samples memory and descriptors of a daemon with its gateway, and the time of ``/livez``, on
    two threads.
    """

    def __init__(self, daemon: Daemon, address: str, *, gateway: bool) -> None:
        self._daemon = daemon
        self._address = address
        self._gateway = gateway
        self._ending = threading.Event()
        self.waits: list[tuple[float, float]] = []
        """Time, seconds that the daemon's loop has waited for a processor."""
        self.memory: list[tuple[float, int, int]] = []
        """Time, resident bytes, descriptors."""
        self.livez: list[tuple[float, float]] = []
        """Time of the answer, seconds that it took."""
        self._threads = [threading.Thread(target=each) for each in (self._sample, self._ask)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """End the threads."""
        self._ending.set()
        for thread in self._threads:
            thread.join()

    def most(self, begin: float, end: float) -> tuple[int, int]:
        """Return the greatest memory and number of descriptors in a time."""
        found = [each for each in self.memory if begin <= each[0] <= end] or self.memory[-1:]
        return max(each[1] for each in found), max(each[2] for each in found)

    def now(self) -> tuple[int, int]:
        """Return memory and descriptors of daemon and gateway now; zeros if the daemon is dead."""
        with contextlib.suppress(OSError, KeyError):
            pids = [self._daemon.pid, *(self._daemon.children() if self._gateway else ())]
            memory = sum(self._daemon.private_bytes(pid) for pid in pids)
            # The SSD tier opens its log's files as it fills.
            count = sum(self._daemon.descriptor_count(pid, segments=False) for pid in pids)
            return memory, count
        return 0, 0

    def livez_s(self, begin: float, end: float) -> float:
        """Return the longest answer that ended in a time, or began and has not ended."""
        return max((took for at, took in self.livez if begin <= at <= end), default=0.0)

    def wait_share(self, begin: float, end: float) -> float:
        """Return the part of a time in which the daemon's loop waited for a processor."""
        found = [each for each in self.waits if begin <= each[0] <= end]
        if len(found) < 2:
            return 0.0
        return round((found[-1][1] - found[0][1]) / (found[-1][0] - found[0][0]), 3)

    def _sample(self) -> None:
        pid = self._daemon.pid
        while not self._ending.wait(_SAMPLE_S):
            self.memory.append((time.monotonic(), *self.now()))
            with contextlib.suppress(OSError):
                text = Path(f"/proc/{pid}/task/{pid}/schedstat").read_text(encoding="utf-8")
                self.waits.append((time.monotonic(), int(text.split()[1]) / 1e9))

    def _ask(self) -> None:
        while not self._ending.wait(_LIVEZ_PAUSE_S):
            began = time.monotonic()
            line = http.client.HTTPConnection(self._address, timeout=_LIVEZ_S)
            took = _LIVEZ_S
            try:
                line.request("GET", "/livez")
                if line.getresponse().status == http.client.OK:
                    took = time.monotonic() - began
            except (OSError, http.client.HTTPException):
                took = max(_LIVEZ_S, time.monotonic() - began)
            finally:
                line.close()
            self.livez.append((time.monotonic(), took))


class Goods:
    """The good client and the one that comes and goes, and all that they reported."""

    def __init__(self, url: str, users: Users, folder: Path) -> None:
        self.lines: list[Line] = []
        self.clients = []
        for name, visits in (("good", False), ("visitor", True)):
            start = {"url": url, "page_bytes": PAGE_BYTES, "model": name, "uid": users.b}
            more = {"visits": visits, "attach_s": READY_S}
            client = Client(name, folder, {**start, **more}, self._heard, good.__name__)
            self.clients.append(client)
        self.staying = self.clients[0]

    def wait_ready(self) -> None:
        """Wait until both have done their work once.

        Raises:
            KVHearthError: one does not.
        """
        end = time.monotonic() + READY_S
        while time.monotonic() < end:
            lines = list(self.lines)
            if any(line.get("calls") for line in lines) and any("attaches" in x for x in lines):
                return
            if not all(client.alive for client in self.clients):
                break
            time.sleep(0.01)
        logs = "\n".join(client.log_tail() for client in self.clients)
        raise KVHearthError(Reason.INTERNAL, f"hostile: a good client does not work\n{logs}")

    def wait_told(self, at: float) -> None:
        """Wait until the good client has reported all calls that ended before ``at``."""
        end = time.monotonic() + _TOLD_S
        while time.monotonic() < end and self.staying.alive:
            if any(line["from"] == self.staying.name and line["at"] > at for line in self.lines):
                return
            time.sleep(0.01)

    def calls(self, begin: float, end: float, kind: str = "calls") -> list[tuple[str, float]]:
        """Return name and seconds of the calls that began in a time."""
        return [
            (name, ended - began)
            for line in list(self.lines)
            for name, began, ended in line.get(kind, [])
            if begin <= began <= end
        ]

    def said(self, kind: str, begin: float, end: float) -> list[str]:
        """Return the texts of a kind (errors, wrong, lost) reported in a time."""
        lines = [line for line in list(self.lines) if begin <= line["at"] <= end]
        return [text for line in lines for text in line.get(kind, [])]

    def failures(self) -> list[str]:
        """Return the ends of good clients that nobody ended."""
        return [
            f"the process {client.name} ended: {client.log_tail(12)}"
            for client in self.clients
            if not client.alive and not client.expected_end
        ]

    def end(self) -> None:
        """End both."""
        for client in self.clients:
            client.kill()

    def _heard(self, client: Client, line: Line) -> None:
        self.lines.append({**line, "from": client.name})


@dataclass(frozen=True)
class Stage:
    """A running daemon with its good clients, its watch, and the facts for attackers."""

    daemon: Daemon
    watch: Watch
    goods: Goods
    target: Target

    def measure(self, attack: Attack, seconds: float) -> Row:
        """Run one attack between two quiet times; the daemon may be dead afterwards."""
        row = Row(attack.name, attack.floods)
        begin = time.monotonic()
        time.sleep(max(IDLE_S_LEAST, IDLE_SHARE * seconds))
        quiet = time.monotonic()
        row.rss_before, row.descriptors_before = self.watch.most(begin, quiet)
        log_from = len(self.daemon.own_lines())
        try:
            attack.start(self.target)
            under = time.monotonic()
            self._wait(max(UNDER_S_LEAST, UNDER_SHARE * seconds, attack.seconds_least))
        finally:
            attack.stop()
        over = time.monotonic()
        self._settle(row, attack.settle_s)
        settled = time.monotonic()
        self._wait(max(AFTER_S_LEAST, AFTER_SHARE * seconds))
        end = time.monotonic()
        self.goods.wait_told(end)
        row.seconds = round(over - under, 1)
        row.idle = Calls.of([took for _, took in self.goods.calls(begin, quiet)])
        row.under = Calls.of([took for _, took in self.goods.calls(under, over)])
        row.after = Calls.of([took for _, took in self.goods.calls(settled, end)])
        row.idle_wait = self.watch.wait_share(begin, quiet)
        row.under_wait = self.watch.wait_share(under, over)
        self._judge(row, quiet, end)
        row.rounds = attack.rounds()
        row.failures = [*attack.failures(), *self.goods.failures()]
        row.own = attack.check(self.target, self.daemon.own_lines()[log_from:])
        return row

    def _judge(self, row: Row, quiet: float, end: float) -> None:
        """Count what went wrong from the start of the attack until now."""
        row.rss_max, row.descriptors_max = self.watch.most(quiet, end)
        row.livez_s = round(self.watch.livez_s(quiet, end), 3)
        row.restarts = int(self.daemon.dead)
        row.late = sum(
            took > _deadline_s(name) + LATE_S for name, took in self.goods.calls(quiet, end)
        )
        attaches = self.goods.calls(quiet, end, "attaches")
        row.attach_ms = round(1000 * max((took for _, took in attaches), default=0.0), 1)
        now = time.monotonic()
        row.errors = dict(Counter(self.goods.said("errors", quiet, now)))
        row.wrong = self.goods.said("wrong", quiet, now)
        row.lost = self.goods.said("lost", quiet, now)

    def _settle(self, row: Row, seconds: float) -> None:
        """Wait until memory and descriptors are back, for a limited time."""
        end = time.monotonic() + seconds
        while not self.daemon.dead:
            row.rss_after, row.descriptors_after = self.watch.now()
            if row.settled or time.monotonic() > end:
                return
            time.sleep(_SAMPLE_S)

    def _wait(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end and not self.daemon.dead:
            time.sleep(min(_SAMPLE_S, max(0.0, end - time.monotonic())))


def _deadline_s(name: str) -> float:
    url = UnixUrl(Path())
    return (url.lookup_ms if name == "lookup" else url.call_ms) / 1000


class _Door:
    """A gateway's address, and the tokens of tenants a and b.

    Args:
        folder: for the tokens.
    """

    def __init__(self, folder: Path) -> None:
        self.address = f"127.0.0.1:{free_port()}"
        self._folder = folder
        for tenant in ("a", "b"):
            token = new_token()
            add_token(folder / "tokens.yaml", Identity(tenant, tenant), token)
            self.token_file(tenant).write_text(token, encoding="utf-8")

    @property
    def settings(self) -> dict[str, object]:
        """Settings of the daemon."""
        return {"listen": self.address, "tokens_file": self._folder / "tokens.yaml"}

    @property
    def url(self) -> str:
        """URL of the good client."""
        return f"kvhearth://{self.address}?token_file={self.token_file('b')}"

    def token_file(self, tenant: str) -> Path:
        """Return the file with a tenant's token."""
        return self._folder / f"{tenant}.token"


@contextlib.contextmanager
def staged(users: Users, attack: Attack) -> Iterator[Stage]:
    """Provide a running stage; its directories and processes are gone at the end.

    Args:
        attack: an attack whose settings the daemon has.

    Raises:
        KVHearthError: the daemon or a good client does not work.
    """
    with contextlib.ExitStack() as undo:
        folder = Path(tempfile.mkdtemp(prefix="kvh-"))
        undo.callback(shutil.rmtree, folder, ignore_errors=True)
        folder.chmod(0o755)  # attackers of other users reach the sockets
        for name, mode in (("s", 0o755), ("x", 0o777)):
            (folder / name).mkdir()
            (folder / name).chmod(mode)
        own = {"http": "127.0.0.1:0", "hugepages": "off", "slab_bytes": "2MiB", **users.settings()}
        arena = None
        if attack.arena:
            arena = Path(tempfile.mkdtemp(prefix="kvh-", dir=_SHARED_MEMORY))
            undo.callback(shutil.rmtree, arena, ignore_errors=True)
        gateway = _Door(folder) if attack.gateway else None
        if gateway is not None:
            own |= gateway.settings
        daemon = Daemon(folder, arena, {**own, **attack.settings(folder)}, tied())
        undo.callback(daemon.kill)
        daemon.start()
        address = str(daemon.ready()["http"]).removeprefix("http://")
        watch = Watch(daemon, address, gateway=attack.gateway)
        undo.callback(watch.stop)
        url = f"kvhearth+unix://{daemon.socket_dir}" if gateway is None else gateway.url
        goods = Goods(url, users, folder)
        undo.callback(goods.end)
        goods.wait_ready()
        time.sleep(_WARM_S)
        yield Stage(
            daemon,
            watch,
            goods,
            Target(
                socket_dir=str(daemon.socket_dir),
                http=address,
                folder=str(folder / "x"),
                daemon_pid=daemon.pid,
                good_pid=goods.staying.process.pid,
                uid_a=users.a,
                uid_b=users.b,
                uid_nobody=users.nobody,
                page_bytes=PAGE_BYTES,
                gateway=gateway.address if gateway else "",
                token_file=str(gateway.token_file("a")) if gateway else "",
            ),
        )


def run(
    seconds: float,
    only: Sequence[str] = (),
    told: Told = lambda text: None,
    attacks: Mapping[str, type[Attack]] | None = None,
    users: Users | None = None,
) -> dict[str, Any]:
    """Run the attacks and return the object that the verb prints.

    Args:
        seconds: measured time of all attacks together; each has a least time.
        only: names of the attacks; empty for all.
        told: called with a line of progress.
        attacks: the table of attacks; by default all.
        users: users of the run; by default those that this process may have.

    Raises:
        KVHearthError: ``config_invalid``: no attack of such a name; or the daemon or a good client
            does not work without an attack.
    """
    known = table() if attacks is None else attacks
    unknown = [name for name in only if name not in known]
    if unknown:
        raise KVHearthError(
            Reason.CONFIG_INVALID, f"no attack {', '.join(unknown)}; there are {', '.join(known)}"
        )
    users = users or Users.here()
    chosen = [known[name]() for name in only or known]
    skipped = {
        attack.name: "; ".join(NEEDS[need] for need in sorted(attack.needs - users.holds))
        for attack in chosen
        if attack.needs - users.holds
    }
    todo = [attack for attack in chosen if attack.name not in skipped]
    rows: list[Row] = []
    for group in _groups(todo):
        rows += _run_group(group, users, seconds / max(1, len(todo)), told)
    return summary(rows, skipped)


def _groups(attacks: Sequence[Attack]) -> list[list[Attack]]:
    """Return the attacks of equal settings together, since they share a daemon."""
    groups: dict[str, list[Attack]] = {}
    for attack in attacks:
        settings = sorted(attack.settings(Path("/")).items())
        kind = repr((attack.arena, attack.gateway, settings))
        groups.setdefault(kind, []).append(attack)
    return list(groups.values())


def _run_group(group: list[Attack], users: Users, seconds: float, told: Told) -> Iterator[Row]:
    """Run attacks on one daemon; a dead one, or one that lost a good client, is replaced."""
    waiting = list(group)
    while waiting:
        with staged(users, waiting[0]) as stage:
            whole = True
            while waiting and whole:
                kind = type(waiting.pop(0))
                tries = [stage.measure(kind(), seconds)]
                while only_slow(tries[-1]) and len(tries) < REPEATS_MAX:
                    told(f"{_line(tries[-1])}; once more")
                    tries.append(stage.measure(kind(), seconds))
                row = least(tries)
                told(_line(row))
                yield row
                whole = not stage.daemon.dead and not stage.goods.failures()


def _line(row: Row) -> str:
    missed = row.missed()
    return (
        f"{row.name}: p99 {row.idle.p99_ms:g} -> {row.under.p99_ms:g} ms, x{row.factor:g}, "
        f"max {row.under.max_ms:g} ms, RSS +{row.growth_mib:g} MiB, {row.rounds:,} rounds"
        + (f", MISSED {', '.join(missed)}" if missed else "")
    )
