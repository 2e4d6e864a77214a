"""Excess of every kind at the attach socket of a real daemon, and isolation between users."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
from support.daemon import Daemon, running_daemon, until
from support.raw_door import (
    PAGE_BYTES,
    RawSession,
    attach_path,
    drop,
    end_well,
    fat_contract,
    goes_on,
    half_open,
    new_keys,
    raw_contract,
    raw_hello,
    refusals,
    refused,
    say,
    seats,
)

from kvhearth.errors import Reason
from kvhearth.wire.handshake import encode_frame
from kvhearth_lab.harness.engine import contract_of, engine_of

TIMEOUT_S = 1.5
"""Handshake timeout of the daemon in ``hasty``."""


DAEMON: dict[str, object] = {}
pytestmark = pytest.mark.usefixtures("unhurt_neighbour")


@pytest.fixture
def hasty() -> Iterator[Daemon]:
    """A daemon with the handshake timeout ``TIMEOUT_S`` and an engine at work."""
    with running_daemon(arena=False, attach_timeout_s=TIMEOUT_S) as daemon:
        with engine_of(daemon.url(), contract_of(PAGE_BYTES), "neighbour") as engine:
            goes_on(engine)
            yield daemon
            until(lambda: engine.ready, "the engine is attached")
            goes_on(engine)
        end_well(daemon)


def test_hundreds_of_silent_connections(hasty: Daemon) -> None:
    count = hasty.descriptor_count()
    before = refusals(hasty, Reason.DEADLINE)
    with half_open(attach_path(hasty), 300) as lines:
        RawSession(hasty).close()
        assert hasty.descriptor_count() - count < 150
        assert all(line.refusal().reason is Reason.DEADLINE for line in lines)
    assert refusals(hasty, Reason.DEADLINE) == before + 300
    until(lambda: hasty.descriptor_count() <= count, "all descriptors are closed")


def test_out_of_descriptors_and_back(hasty: Daemon) -> None:
    count = hasty.descriptor_count()
    assert hasty.process is not None
    pid, what = hasty.process.pid, resource.RLIMIT_NOFILE
    old = resource.prlimit(pid, what)
    resource.prlimit(pid, what, (count + 20, old[1]))
    try:
        with half_open(attach_path(hasty), 60):
            RawSession(hasty).close()
    finally:
        resource.prlimit(pid, what, old)
    until(lambda: hasty.descriptor_count() <= count, "all descriptors are closed")
    assert "attach.cannot_accept" in hasty.log_text()


def test_sessions_are_bounded() -> None:
    with running_daemon(arena=False, sessions_max=3) as daemon:
        held = [RawSession(daemon) for _ in range(3)]
        for _ in range(3):
            with refused(daemon, Reason.TOO_MANY_SESSIONS):
                say(daemon, encode_frame(raw_hello()))
        held.pop().close()
        until(lambda: daemon.stats().sessions == 2, "one left")
        held.append(RawSession(daemon))
        for session in held:
            session.close()
        end_well(daemon)


def test_namespaces_are_bounded() -> None:
    def name(number: int) -> dict[str, Any]:
        return {"contract": raw_contract(model=f"m{number}").to_json()}

    with running_daemon(arena=False, namespaces_max=2) as daemon:
        full, empty = RawSession(daemon, **name(0)), RawSession(daemon, **name(1), map_arena=True)
        full.store(2)
        with refused(daemon, Reason.TOO_MANY_NAMESPACES):
            say(daemon, encode_frame(raw_hello(**name(2))))
        full.close()
        empty.line.close()
        until(lambda: daemon.stats().sessions == 0, "both left")
        # An empty namespace gives way, even if a member of its last group may still write
        # somewhere.
        with RawSession(daemon, **name(2)):
            assert len(seats(daemon)) == 2
            with refused(daemon, Reason.TOO_MANY_NAMESPACES):
                say(daemon, encode_frame(raw_hello(**name(3))))
        with RawSession(daemon, **name(0)) as again:
            assert again.welcome["namespace"] == full.welcome["namespace"]
        drop(daemon, empty)
        end_well(daemon)


def long_contract(number: int) -> str:
    # An umlaut takes six bytes in the canonical form: 50 KiB of at most 64.
    return json.dumps(fat_contract(number, "\u00fc"))


def test_the_texts_of_all_contracts_are_bounded() -> None:
    """Long contracts use up the room for namespaces long before their maximum number is reached."""
    with running_daemon(arena=False) as daemon, contextlib.ExitStack() as held:
        with refused(daemon, Reason.TOO_MANY_NAMESPACES):
            for number in range(200):
                held.enter_context(RawSession(daemon, contract=long_contract(number)))
        known = RawSession(daemon, contract=long_contract(0), engine_id="another")
        held.close()
        until(lambda: daemon.stats().sessions == 1, "all left")
        RawSession(daemon, contract=long_contract(200)).close()
        known.close()
        end_well(daemon)


def test_long_contracts_outlive_a_restart() -> None:
    with running_daemon(arena=True) as daemon:
        with engine_of(daemon.url(), contract_of(PAGE_BYTES), "ordinary") as engine:
            held = [RawSession(daemon, contract=long_contract(number)) for number in range(6)]
            daemon.restart()
            for session in held:
                session.close()
            with RawSession(daemon, contract=long_contract(0)) as again:
                assert again.welcome["namespace"] == held[0].welcome["namespace"]
            boot_id = daemon.stats().boot_id
            until(lambda: engine.client.boot_id == boot_id and engine.ready, "attached again")
            goes_on(engine)
        end_well(daemon)


# -- tenants ------------------------------------------------------------------------------------

ANONYMOUS = 65534
as_root = pytest.mark.skipif(os.getuid() != 0, reason="needs root to run a process as another user")

ATTACH_AS_ANOTHER_USER = """
import json, mmap, os, socket, struct, sys

folder, hello = sys.argv[1:]
for name in ("grpc.sock", "admin.sock"):
    with socket.socket(socket.AF_UNIX) as other:
        try:
            other.connect(folder + "/" + name)
            sys.exit(name + " is open to others")
        except PermissionError:
            pass
line = socket.socket(socket.AF_UNIX)
line.connect(folder + "/attach.sock")
line.sendall(struct.pack("<I", len(hello)) + hello.encode())
data, descriptors, _, _ = socket.recv_fds(line, 65536, 8)
answer = json.loads(data[4:])
answer["files"] = [[os.fstat(one).st_dev, os.fstat(one).st_ino] for one in descriptors]
if descriptors:
    size = os.fstat(descriptors[0]).st_size
    with mmap.mmap(descriptors[0], size, prot=mmap.PROT_READ) as seen:
        answer["clean"] = not seen[:].strip(bytes(1))
print(json.dumps(answer), flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def another_user(daemon: Daemon, **changes: Any) -> Iterator[dict[str, Any]]:
    """Yields the daemon's answer to another user's hello; the session ends with the block."""
    # Access to the socket is controlled by its directory.
    daemon.folder.chmod(0o755)
    daemon.socket_dir.chmod(0o755)
    words = [str(daemon.socket_dir), json.dumps(raw_hello(**changes))]
    with subprocess.Popen(
        ["/usr/bin/env", "python3", "-c", ATTACH_AS_ANOTHER_USER, *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        user=ANONYMOUS,
        group=ANONYMOUS,
        extra_groups=[],
        cwd="/",
    ) as process:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())
        process.communicate()


@as_root
def test_a_user_of_no_tenant(daemon: Daemon) -> None:
    before = refusals(daemon, Reason.PEER_NOT_ALLOWED)
    with another_user(daemon) as answer:
        assert (answer["kind"], answer["reason"]) == ("refused", "peer_not_allowed")
        assert f"user id {ANONYMOUS}" in answer["message"]
        assert "allow_uids" in answer["message"]
        assert answer["files"] == []
    assert refusals(daemon, Reason.PEER_NOT_ALLOWED) == before + 1


@as_root
def test_tenants_share_nothing() -> None:
    """The same contract, engine id and keys under another user: a miss, and separate memory."""
    tenants = f"a=0:8MiB b={ANONYMOUS}:8MiB"
    contract = contract_of(PAGE_BYTES)
    with running_daemon(arena=False, tenants=tenants) as daemon:
        with engine_of(daemon.url(), contract, "same") as engine:
            goes_on(engine)
            keys = new_keys(3)
            assert len(engine.store(keys).bound) == 3
            hello = {"engine_id": "same", "contract": contract.to_json(), "map_arena": True}
            with (
                RawSession(daemon, **{**hello, "engine_id": "mine"}) as mine,
                another_user(daemon, **hello) as theirs,
            ):
                check_apart(daemon, mine, theirs, keys)
            goes_on(engine)
        end_well(daemon)


def check_apart(
    daemon: Daemon, mine: RawSession, theirs: dict[str, Any], keys: list[bytes]
) -> None:
    assert theirs["kind"] == "welcome", theirs
    assert theirs["namespace"] != mine.welcome["namespace"]
    facts = [os.fstat(one) for one in mine.line.descriptors]
    assert [theirs["files"][0]] != [[facts[0].st_dev, facts[0].st_ino]]
    assert theirs["clean"], "another tenant's segment holds bytes of ours"
    assert mine.lookup(keys).groups[0].present == b"\x07"
    extents = mine.reserve(2)
    token, mine.token = mine.token, theirs["token"]
    try:
        found = mine.lookup(keys, lease_id=7)
        assert (found.groups[0].present, found.hit_tokens, found.lease_id) == (b"\0", 0, 0)
        with refused(daemon, Reason.FOREIGN_EXTENT):
            mine.commit(new_keys(2), extents)
        with refused(daemon, Reason.FOREIGN_EXTENT):
            mine.abort(extents)
    finally:
        mine.token = token
    assert mine.abort(extents).freed_slots == 2
