"""Invariants that must hold after every fault and at a world's end."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import signal
import time
import urllib.request
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from kvhearth.errors import KVHearthError
from kvhearth_lab.harness import HUNG_S
from kvhearth_lab.harness.client_process import ANSWER_S, Client
from kvhearth_lab.harness.engine import key_of
from kvhearth_lab.torture import damage
from kvhearth_lab.torture.faults.connections import STAGES, CutHandshake
from kvhearth_lab.torture.oracle import failures, look_at_drive
from kvhearth_lab.torture.report import CRASH, LEAK, LOST, OVER, STALL
from kvhearth_lab.torture.scene import WORLD_ENVIRONMENT_NAME, CapacityWatch
from kvhearth_lab.torture.world import UselessError, World
from kvhearth_lab.torture.world_config import ROOMY
from kvhearth_server.engine.snapshot import Stats

Report = TypeVar("Report")

DRIVE_S = 10.0
END_S = 5.0
"""Time for processes to follow their daemon."""
DESCRIPTORS_MORE = 1
"""Allowance for a connection of the kit's own calls that may be closing."""
_SHOWN = 8
_STAGED = re.compile(r'staging_bytes{.*?state="used"} 0(\.0)?(,|$)')
_REMOTE = re.compile(r'^kvhearth_remote_|remote="[^"]*",?')
_POLL_S = 0.05


def check(world: World) -> None:
    """Check all invariants between two faults.

    Raises:
        UselessError: the daemon is gone, so that this world can show nothing more.
    """
    _alive(world)
    with world.paused():
        _await_server(world)
        _blocks(world)
        found = _stats(world)
        if error := _books_error(world):
            world.report.find(LEAK, f"the books do not balance: {error}", world.where)
        failures(world, found)
        _acknowledged(world, found.counters.get("demoted_blocks", 0))
        look_at_drive(world)
    _alive(world)
    world.judge_slow()


def capacity(world: World, watch: CapacityWatch) -> None:
    """Check that the drive's directory never exceeded its capacity."""
    over = watch.look() - world.shape.ssd_bytes
    if world.shape.ssd_bytes and over > 0:
        text = f"{over} bytes more than the capacity of {world.shape.ssd_bytes}"
        world.report.find(OVER, text, world.where, over)


def _alive(world: World) -> None:
    """Check that daemon and clients run, unless the kit ended them."""
    for client in list(world.clients):
        if not client.alive and not client.expected_end:
            text = f"client {client.name} ended with {client.process.poll()}: {client.log_tail()}"
            world.report.find(CRASH, text, world.where)
            world.replace(client, kill=True)
        for text in client.new_failures():
            world.report.find(CRASH, f"client {client.name}: {text}", world.where)
    for text in world.daemon.new_failures():
        world.report.find(CRASH, f"the daemon: {text}", world.where)
    if world.daemon.dead:
        status = world.daemon.exit_code
        text = f"the daemon ended with {status}: {world.daemon.complaints()}"
        world.report.find(CRASH, text, world.where)
        world.kill_daemon()
        world.start_daemon()


def _await_server(world: World) -> None:
    """Decide which blocks the remote must give back; faults have started it again.

    Raises:
        UselessError: it does not come up, which is not the daemon's fault.
    """
    try:
        world.excuse_unless_at_the_remote()
    except (KVHearthError, OSError):
        world.report.figures["remote_servers_that_failed"] += 1
        raise UselessError from None


def _stats(world: World) -> Stats:
    return _told(world, world.daemon.operator().stats)


def _books_error(world: World) -> str:
    """Return what does not balance in the books; empty if everything does."""
    return _told(world, world.daemon.operator().books).error


def _told(world: World, ask: Callable[[], Report]) -> Report:
    try:
        return ask()
    except KVHearthError as error:
        world.report.find(STALL, f"the daemon tells nothing: {error.message}", world.where)
        raise UselessError from None


def _acknowledged(world: World, demoted: int) -> None:
    """Check that blocks reported as written are on the drive.

    This holds only where memory has room for all: a block that left memory and is stored again
    counts again, and so does a damaged one.
    """
    roomy = world.shape.kind == ROOMY and world.shape.ssd_bytes
    if not roomy or not world.drive_is_good or world.damaged:
        return
    there = len(damage.blocks_on_disk(world.ssd_dir))
    world.report.figures["demotions_found_on_the_drive"] += demoted
    if there < demoted:
        text = f"{demoted} blocks were acknowledged to be on the drive, {there} are"
        world.report.find(LOST, text, world.where, demoted - there)


# -- blocks ----------------------------------------------------------------------------------------


def _blocks(world: World) -> None:
    """Check that every sealed block is served with the right bytes."""
    asked: list[tuple[Client, int, int]] = []
    for model, client in {each.model: each for each in world.clients}.items():
        epoch, numbers = world.oracle.sealed(model)
        suspects = world.oracle.suspects(model)
        number = client.say(
            "check", numbers=numbers, suspects=suspects, deadline_s=world.patience_s
        )
        asked.append((client, epoch, number))
    for client, epoch, number in asked:
        said = client.answer(number, ANSWER_S + world.patience_s)
        if said is None:
            _hang(world, client, "a check")
        elif not said["ready"]:
            text = f"{client.name} does not attach in {world.patience_s} s: {said['refusal']}"
            world.report.find(STALL, text, world.where)
        else:
            if said["epoch"] != epoch and said["epoch"] >= 0:
                world.oracle.tried(client.model, said["epoch"], [])
            _missing(world, client, said)
    if world.oracle.vanished:
        text = "sealed blocks are void: the weights epoch rose by itself"
        world.report.find(LOST, text, world.where, world.oracle.vanished)
        world.oracle.vanished = 0


def _missing(world: World, client: Client, said: dict[str, object]) -> None:
    left = said["left"]
    assert isinstance(left, list)
    if not left or not world.oracle.keeps or world.oracle.sealed(client.model)[0] != said["epoch"]:
        return
    daemon = _stats(world)
    refused = {k: v for k, v in daemon.counters.items() if k.startswith("promotion_failed")}
    text = (
        f"{client.model}: {len(left)} sealed blocks are not served within {world.patience_s} s, "
        f"such as {left[:_SHOWN]} ({_where_they_are(world, client.model, left[:_SHOWN])}); "
        f"{_described(said, ('absent', 'below', 'reason', 'failed'))}; "
        f"clients hold {_holds(daemon)}; {refused}"
    )
    if world.server is not None:
        text += f"; {_remote_figures(world)}; {world.daemon.complaints(4)}"
    world.report.find(LOST, text, world.where, len(left))
    # Report each lost block once.
    world.oracle.excuse(client.model, left, "lost")


def _where_they_are(world: World, model: str, numbers: Iterable[int]) -> str:
    arena = {each.key for each in damage.in_arena(world.arena_dir, world.shape.memory_bytes)}
    drive, epoch = damage.blocks_on_disk(world.ssd_dir), world.oracle.epoch(model)
    keys = [key_of(model, number) for number in numbers]
    written = sum((key, epoch) in drive for key in keys)
    return f"{sum(key in arena for key in keys)} in the arena, {written} on disk"


def _described(said: dict[str, object], names: Iterable[str]) -> str:
    parts = []
    for name in names:
        value = said[name]
        shown = f"{len(value)} ({value[:_SHOWN]})" if isinstance(value, list) else value
        if value:
            parts.append(f"{name}: {shown}")
    return ", ".join(parts)


def _hang(world: World, client: Client, what: str) -> None:
    client.signal(signal.SIGUSR1)
    time.sleep(0.3)
    doing, since = client.doing
    text = f"{client.name}: {what} does not end; at {doing!r} for {time.monotonic() - since:.1f} s"
    world.report.find(STALL, f"{text}: {client.log_tail()}", world.where)
    world.replace(client, kill=True)


# -- the end ---------------------------------------------------------------------------------------


def finish(world: World) -> None:
    """Start a last daemon without faults, check everything, and close it.

    Raises:
        UselessError: the daemon is gone.
    """
    with world.paused():
        world.terminate_daemon()
        world.start_daemon()
    world.traffic(0.3)
    world.replace(world.clients[0], kill=True)
    world.traffic(0.2)
    check(world)
    copy_state(world)
    nothing_is_left(world)
    world.terminate_daemon()
    _files(world)
    no_process_is_left(world)


def nothing_is_left(world: World) -> None:
    """End the clients and check that the daemon holds nothing of theirs.

    Raises:
        UselessError: the daemon is gone.
    """
    with world.paused():
        pass  # collects the clients' reports
    _end_clients(world)
    _quiet(world)
    _stats(world)
    time.sleep(_POLL_S)
    _descriptors_again(world, _descriptor_counts(world))
    if described := _until(lambda: _processes(world), world.patience_s):
        world.report.find(LEAK, described, world.where)


def _processes(world: World) -> str:
    """Describe the daemon's processes; empty if they are those that it should have."""
    children, gateways, movers = world.daemon.children(), world.daemon.gateways(), world.movers()
    wanted = (bool(world.shape.remote), bool(world.shape.tier))
    if sorted(children) == sorted(gateways + movers) and (len(gateways), len(movers)) == wanted:
        return ""
    return f"processes of the daemon: {children}; gateways: {gateways}, of a remote: {movers}"


def copy_state(world: World) -> None:
    """Check that all sealed blocks reach the drive soon, if no fault has hit it in this daemon's
    life.
    """
    shape = world.shape
    if not shape.ssd_bytes or not world.oracle.keeps or world.drive_is_suspect:
        return
    if shape.kind == ROOMY and world.damaged:
        return  # damaged records have not been noticed yet: memory has all blocks
    with world.paused():
        end = time.monotonic() + DRIVE_S
        while True:
            above = sum(map(len, world.not_on_disk(sealed=True).values()))
            if not above or time.monotonic() > end:
                break
            time.sleep(_POLL_S)
    if above:
        text = f"{above} sealed blocks are not on the drive after {DRIVE_S} s"
        world.report.find(LOST, text, world.where, above)


def _end_clients(world: World) -> None:
    for client in world.clients:
        status = client.end()
        if status is None:
            text = f"{client.name} does not end: {client.log_tail(80)}"
            world.report.find(STALL, text, world.where)
        elif status:
            text = f"{client.name} ended with {status}: {client.log_tail()}"
            world.report.find(CRASH, text, world.where)


def _until(condition: Callable[[], str], timeout_s: float) -> str:
    """Poll until ``condition()`` returns an empty text, and return its last result."""
    end = time.monotonic() + timeout_s
    while (described := condition()) and time.monotonic() < end:
        time.sleep(_POLL_S)
    return described


def _quiet(world: World) -> None:
    """Check that everything that clients held is released."""

    def held() -> str:
        return _books_error(world) or _holds(_stats(world)) or _staged(world)

    if described := _until(held, world.patience_s):
        text = f"after all clients have ended: {described}; {world.daemon.members()}"
        world.report.find(LEAK, text, world.where)


def _staged(world: World) -> str:
    """Describe the remote's staging memory that is in use; empty if that is none."""
    if world.server is None:
        return ""
    found = _remote_figures(world)
    return "" if _STAGED.search(found) else f"staging memory is in use: {found}"


def _remote_figures(world: World) -> str:
    """Return the daemon's metrics of its remote that are not zero, in one line."""
    try:
        address = world.daemon.ready()["http"]
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=HUNG_S) as answer:
            lines = answer.read().decode().splitlines()
    except (OSError, KVHearthError) as error:
        return f"the daemon's metrics are not told: {error}"
    told = (_REMOTE.sub("", line) for line in lines if line.startswith("kvhearth_remote_"))
    return ", ".join(line for line in told if not line.endswith(" 0") or "staging" in line)


def _holds(found: Stats) -> str:
    """Describe what clients hold; empty if that is nothing."""
    facts = {"sessions": found.sessions, "groups": found.groups, "leases": found.leases}
    for part in found.segments:
        facts["reserved bytes"] = part.reserved_bytes
        facts["quarantined bytes"] = part.quarantined_bytes
        facts["held bytes"] = part.held_bytes
    return ", ".join(f"{count} {name}" for name, count in facts.items() if count)


def _descriptor_counts(world: World) -> list[int]:
    """Return the number of descriptors of the daemon, and of each gateway."""
    gateways = [len(os.listdir(f"/proc/{pid}/fd")) for pid in world.daemon.gateways()]
    return [world.daemon.descriptor_count(segments=False), *gateways]


def _descriptors_again(world: World, first: list[int]) -> None:
    """Check for leaked descriptors after attaches break off, a client comes and goes, and another
    is killed.
    """
    CutHandshake().run(world, {"stages": [*STAGES, *STAGES], "cuts": [0.5] * 2 * len(STAGES)})
    indexes = {0, *world.shape.remote[-1:]}
    for kill, index in itertools.product((False, True), sorted(indexes)):
        client = world.add_client(index)
        said = client.ask("check", numbers=[], suspects=[], deadline_s=world.patience_s)
        if said is None or not said["ready"]:
            _hang(world, client, "an attach")
        if kill:
            client.kill()
        else:
            client.end()
    _quiet(world)

    def more() -> str:
        now = _descriptor_counts(world)
        grown = any(b > a + DESCRIPTORS_MORE for a, b in zip(first, now, strict=True))
        return f"{now} descriptors (daemon, gateways), {first} before" if grown else ""

    if described := _until(more, world.patience_s):
        names = []
        for name in os.listdir(f"/proc/{world.daemon.pid}/fd"):
            with contextlib.suppress(OSError):
                names.append(os.readlink(f"/proc/{world.daemon.pid}/fd/{name}"))
        world.report.find(LEAK, f"{described}: {sorted(names)}", world.where)


def _files(world: World) -> None:
    """Check that an orderly end leaves no useless file."""
    left = [path.name for path in world.daemon.socket_dir.iterdir()]
    left += [path.name for path in world.ssd_dir.glob("*.new")]
    left += [path.name for path in world.arena_dir.glob("*.new")]
    if left:
        world.report.find(LEAK, f"files are left: {sorted(left)}", world.where)


def no_process_is_left(world: World) -> None:
    """Check that no process of any of the world's daemons outlives it."""
    mark = f"{WORLD_ENVIRONMENT_NAME}={world.places.folder}\0".encode()

    def left() -> str:
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if mark in path.read_bytes():
                    command = (path.parent / "cmdline").read_bytes().replace(b"\0", b" ")
                    found.append(f"{path.parent.name} ({command.decode(errors='replace')})")
        return ", ".join(found)

    if described := _until(left, END_S):
        world.report.find(LEAK, f"processes outlive the daemon: {described}", world.where)
