"""The gateway with a real daemon, and a client of raw sockets."""

from __future__ import annotations

import itertools
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.daemon import Daemon, running_daemon, until
from support.remote_raw import (
    PAGE_BYTES,
    GatewayProcess,
    RawSession,
    close_all,
    connect,
    gateway,
    hello_of,
    keys_of,
    message,
    refusal_of,
    summed,
)

from kvhearth.errors import KVHearthError
from kvhearth.model import Records
from kvhearth.proto.v1 import cache_pb2 as pb
from kvhearth.wire import frames
from kvhearth.wire.handshake import encode_frame
from kvhearth.wire.remote import DataFrame, DataKind, Identify, Outcome, Purpose, preface
from kvhearth_lab.harness.engine import contract_of

OK, FOREIGN = Outcome.OK, Outcome.FOREIGN_EXTENT


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Daemon, GatewayProcess]]:
    with running_daemon(arena=False) as daemon, gateway(daemon.socket_dir) as served:
        yield daemon, served


@pytest.fixture(autouse=True)
def _no_connection_stays() -> Iterator[None]:
    yield
    close_all()


@pytest.fixture
def far(pair: tuple[Daemon, GatewayProcess]) -> Iterator[RawSession]:
    daemon, served = pair
    session = RawSession(served.port)
    yield session
    session.bye()
    daemon.wait_quiet()


def ended(connection: socket.socket) -> bool:
    """Return whether the peer closes the connection, whatever it says before."""
    try:
        while connection.recv(1 << 16):
            pass
    except ConnectionError:
        pass
    return True


def test_blocks_are_stored_and_loaded(far: RawSession) -> None:
    keys = keys_of(4)
    payload = far.store(keys)
    lease, extents = far.look_up(keys)
    before, found, after = far.get(extents)
    assert set(before + after) == {OK}
    assert found == payload
    assert len(found) == 4 * PAGE_BYTES
    far.release(lease)
    assert set(far.get(extents)[0]) == {FOREIGN}


def test_requests_are_pipelined_in_order(far: RawSession) -> None:
    extents = far.reserve(3)
    payload = os.urandom(3 * PAGE_BYTES)
    summed(extents, payload)
    puts = [
        far.put_frame(extents[at : at + 1], payload[at * PAGE_BYTES :][:PAGE_BYTES])
        for at in range(3)
    ]
    far.data.sendall(b"".join(puts))
    assert [far.answer()[:2] for _ in puts] == [(DataKind.STORED, [OK])] * 3
    keys = keys_of(3)
    far.commit(keys, extents)
    _, leased = far.look_up(keys)
    assert far.get(leased)[1] == payload


def test_only_granted_extents_are_written(far: RawSession) -> None:
    extents = far.reserve(2)
    payload = os.urandom(PAGE_BYTES)
    good = extents[:1]
    for name, wrong in (("slot", 1), ("segment", 1), ("offset", PAGE_BYTES), ("generation", 1)):
        bad = good.copy()
        bad[name] += wrong
        if name == "slot":
            bad[name] = 10**6
        assert far.put(bad, payload) == [FOREIGN], name
    assert far.put(extents, 2 * payload) == [OK, OK]
    far.commit(keys_of(1), good)
    assert far.put(extents, 2 * payload) == [FOREIGN, OK], "a committed slot is written no more"
    far.abort(extents[1:])
    assert far.put(extents[1:], payload) == [FOREIGN], "nor is an aborted one"


def test_bytes_are_verified_as_they_come(far: RawSession) -> None:
    extents = far.reserve(3)
    payload = os.urandom(3 * PAGE_BYTES)
    summed(extents, payload)
    extents["checksum"][1] = extents["checksum"][0]
    assert far.put(extents, payload) == [OK, Outcome.CHECKSUM_MISMATCH, OK]


def test_another_engine_s_extents_are_foreign(
    far: RawSession, pair: tuple[Daemon, GatewayProcess]
) -> None:
    keys = keys_of(1)
    far.store(keys)
    _, leased = far.look_up(keys)
    reserved = far.reserve(1)
    other = RawSession(pair[1].port, hello_of(engine_id="other"))
    assert other.get(leased)[0] == [FOREIGN]
    assert other.put(reserved, bytes(PAGE_BYTES)) == [FOREIGN]
    other.bye()


def test_wrong_tokens_are_refused(far: RawSession, pair: tuple[Daemon, GatewayProcess]) -> None:
    assert refusal_of(lambda: far.open_calls("x" * 40)) == "unknown_token"
    stranger = far.open_data("x" * 40)
    assert refusal_of(lambda: far.answer(stranger)) == "unknown_token"
    assert refusal_of(lambda: RawSession(pair[1].port, resume="x" * 40)) == "unknown_token"
    stranger.close()
    # The daemon's own token never left the gateway.
    assert "x" * 40 not in pair[1].log.read_text()


def begin_put(far: RawSession, extents: Records, rest: int) -> socket.socket:
    """Send a put of three slots but for its last ``rest`` bytes; return its connection when it has
    begun. Whether it has is asked by puts into two of these slots in turn, since one that comes
    at the same moment has its slot instead; the first slot it certainly has.
    """
    begun = far.data
    begun.sendall(far.put_frame(extents, bytes(3 * PAGE_BYTES))[:-rest])
    far.data = far.open_data(far.welcome.token)
    turns = itertools.cycle([extents[1:2], extents[2:]])
    until(lambda: far.put(next(turns), bytes(PAGE_BYTES)) != [OK], "the put has begun")
    return begun


def test_another_connection_puts_after_a_break(far: RawSession) -> None:
    three = far.reserve(3)
    extents, payload = three[:1], os.urandom(PAGE_BYTES)
    begin_put(far, three, PAGE_BYTES // 2).close()
    until(lambda: far.put(extents, payload) == [OK], "the cut put has ended")
    keys = keys_of(1)
    far.commit(keys, summed(extents, payload))
    _, leased = far.look_up(keys)
    assert far.get(leased)[1] == payload


def test_a_commit_waits_for_no_dripping_put(far: RawSession) -> None:
    extents = far.reserve(3)
    dripping = begin_put(far, extents, 100)
    committed = summed(extents[:1], bytes(PAGE_BYTES))
    assert refusal_of(lambda: far.commit(keys_of(1), committed)) == "not_reserved"
    assert far.abort(extents).freed_slots == 3, "an abort ends the put"
    assert ended(dripping)
    dripping.close()


def test_a_put_that_goes_on_ends_with_its_session(pair: tuple[Daemon, GatewayProcess]) -> None:
    daemon, served = pair
    session = RawSession(served.port)
    extents = session.reserve(1)
    session.data.sendall(session.put_frame(extents, bytes(PAGE_BYTES))[:-100])
    session.line.sendall(encode_frame({"kind": "bye"}))
    assert ended(session.data)
    assert daemon.quarantined_bytes() == 0
    session.close()
    daemon.wait_quiet()


BAD_DATA = (
    DataFrame(DataKind.PUT, 1, 1, 1 << 40).pack() + bytes(8 << 20),  # goes on sending
    DataFrame(DataKind.PUT, 1, 1, 5).pack() + bytes(45),
    DataFrame(DataKind.GET, 0, 1, 7).pack() + bytes(7),
    DataFrame(DataKind.STORED, 1, 1, 0).pack() + b"\0",
    DataFrame(DataKind.OPEN, 0, 0, 0).pack(),
    b"\x09\0" + DataFrame(DataKind.OPEN, 0, 0, 0).pack()[2:],
    DataFrame(DataKind.GET, 5000, 1, 0).pack(),
    b"\xff" * 64,
)
BAD_CALLS = (
    frames.HEADER.pack(1 << 30, 2, 1),
    frames.HEADER.pack(0, 99, 1),
    frames.HEADER.pack(0, 0, 1),
    frames.HEADER.pack(1 << 20, 11, 1),
)
BAD_OPENINGS = (
    b"GET / HTTP/1.1\r\n\r\n",
    preface(Purpose.LIFE_LINE) + b"\xff\xff\xff\xff",
    preface(Purpose.LIFE_LINE) + encode_frame({"kind": "hello"}),
    preface(Purpose.LIFE_LINE) + encode_frame(Identify().to_message()) + b"\xff\xff\xff\x7f",
    preface(Purpose.CALLS) + frames.HEADER.pack(4000, 0, 0),
    preface(Purpose.CALLS) + frames.HEADER.pack(3, 1, 0) + b"abc",
    preface(Purpose.DATA) + DataFrame(DataKind.OPEN, 0, 0, 1 << 30).pack(),
    preface(Purpose.DATA) + DataFrame(DataKind.GET, 1, 0, 0).pack() + bytes(40),
)


def test_malformed_data_frames_end_the_connection(far: RawSession) -> None:
    for data in BAD_DATA:
        far.data = far.open_data(far.welcome.token)
        far.data.sendall(data)
        assert refusal_of(far.answer) == "bad_message", data[:40]
        assert ended(far.data)


def test_malformed_calls_end_the_connection(far: RawSession) -> None:
    for data in BAD_CALLS:
        calls = far.open_calls(far.welcome.token)
        calls.sendall(data)
        kind, body = far.reply(calls)
        assert kind == frames.REFUSED
        assert str(frames.decode_status(body).reason) in ("bad_message", "protocol_version")
        assert ended(calls)


def test_strangers_are_refused_at_once(pair: tuple[Daemon, GatewayProcess]) -> None:
    for data in BAD_OPENINGS:
        with connect(pair[1].port) as stranger:
            stranger.sendall(data)
            assert ended(stranger)


def test_a_body_that_is_no_message_is_refused(far: RawSession) -> None:
    far.calls.sendall(frames.encode(frames.METHODS["Lookup"], 3, b"\xff" * 40, 1 << 20))
    kind, body = far.reply(far.calls)
    assert kind == frames.REFUSED
    assert str(frames.decode_status(body).reason) == "bad_message"
    assert far.call("Heartbeat", pb.HeartbeatRequest()).boot_id == far.welcome.boot_id


def test_a_silent_stranger_is_closed(pair: tuple[Daemon, GatewayProcess]) -> None:
    with connect(pair[1].port) as silent, connect(pair[1].port) as dripping:
        dripping.sendall(preface(Purpose.LIFE_LINE)[:5])
        assert ended(silent)
        assert ended(dripping)


def test_a_broken_life_line_is_resumed(pair: tuple[Daemon, GatewayProcess]) -> None:
    daemon, served = pair
    session = RawSession(served.port)
    keys = keys_of(2)
    payload = session.store(keys)
    session.line.close()
    second = RawSession(served.port, resume=session.welcome.token)
    half_open, session.line = (
        second.line,
        RawSession(served.port, resume=session.welcome.token).line,
    )
    assert ended(half_open), "a half-open line is closed by the next one"
    _, leased = session.look_up(keys)
    assert session.get(leased)[1] == payload
    session.bye()
    daemon.wait_quiet()


def test_an_engine_that_attaches_again_ends_its_earlier_session(
    pair: tuple[Daemon, GatewayProcess],
) -> None:
    daemon, served = pair
    first = RawSession(served.port)
    first.reserve(2)
    second = RawSession(
        served.port,
        hello_of(
            previous_boot=first.welcome.boot_id,
            previous_session=first.welcome.session,
        ),
    )
    assert ended(first.line)
    assert daemon.stats().sessions == 1
    first.close()
    second.bye()
    daemon.wait_quiet()


def test_an_engine_that_died_makes_way_for_its_next_process(
    pair: tuple[Daemon, GatewayProcess],
) -> None:
    daemon, served = pair
    dead, other = RawSession(served.port), RawSession(served.port, hello_of(engine_id="other"))
    dead.reserve(2)
    assert refusal_of(lambda: RawSession(served.port)) == "rank_taken"
    for each in (dead, other):
        each.line.close()

    def attaches() -> bool:
        try:
            RawSession(served.port).bye()
        except KVHearthError:  # its end was not noticed yet
            return False
        return True

    until(attaches, "the next process attaches")
    other.line = RawSession(served.port, resume=other.welcome.token).line
    other.bye()
    daemon.wait_quiet()


def test_a_connection_that_speaks_on_its_life_line_is_cut(
    pair: tuple[Daemon, GatewayProcess],
) -> None:
    session = RawSession(pair[1].port)
    session.line.sendall(encode_frame({"kind": "hello"}))
    assert message(session.line)["reason"] == "bad_message"
    resumed = RawSession(pair[1].port, resume=session.welcome.token)
    session.line = resumed.line
    session.bye()
    pair[0].wait_quiet()


def test_replies_beyond_the_buffer_are_relayed() -> None:
    with (
        running_daemon(arena=False, memory="64MiB") as daemon,
        gateway(daemon.socket_dir) as served,
    ):
        session = RawSession(served.port, hello_of(contract_of(4096)))
        keys = keys_of(2000)
        for half in (keys[:1000], keys[1000:]):
            session.commit(half, session.reserve(1000), sums=False)
        until(lambda: daemon.counters()["summed_blocks"] == 2000, "sums")
        for count in (2000, 10, 2000):
            lease, leased = session.look_up(keys[:count])
            assert len(leased) == count
            assert set(session.get(leased[:2])[0]) == {OK}
            session.release(lease)
        assert refusal_of(lambda: session.look_up(keys_of(8200))) == "too_many_keys"
        session.bye()
        daemon.wait_quiet()


def test_a_killed_gateway_leaves_nothing_behind() -> None:
    with running_daemon(arena=False) as daemon, gateway(daemon.socket_dir) as served:
        session = RawSession(served.port)
        keys = keys_of(2)
        payload = session.store(keys)
        extents = session.reserve(2)
        session.data.sendall(session.put_frame(extents, bytes(2 * PAGE_BYTES))[:-100])
        os.kill(served.child, signal.SIGKILL)
        assert ended(session.line)
        daemon.wait_quiet()
        session = RawSession(served.port)
        _, leased = session.look_up(keys)
        assert session.get(leased)[1] == payload
        session.bye()
        assert served.events("gateway.ended")[0]["code"] == -signal.SIGKILL
        os.kill(served.process.pid, signal.SIGKILL)
        until(lambda: not alive(served.child), "the process ends with its parent")


def test_a_daemon_that_ends_ends_its_connections_at_once() -> None:
    with running_daemon() as daemon, gateway(daemon.socket_dir) as served:
        session = RawSession(served.port)
        keys = keys_of(2)
        payload = session.store(keys)
        idle = session.open_data(session.welcome.token)
        session.data.sendall(session.put_frame(session.reserve(1), bytes(PAGE_BYTES))[:-100])
        daemon.kill()
        for each in (session.line, session.calls, session.data, idle):
            assert ended(each)
        assert refusal_of(lambda: RawSession(served.port)) == "daemon_away"
        daemon.start()
        until(lambda: _attaches(served.port), "the daemon is back")
        session = RawSession(served.port)
        _, leased = session.look_up(keys)
        assert session.get(leased)[1] == payload
        session.bye()
        daemon.wait_quiet()


def alive(pid: int) -> bool:
    """Return whether a process runs."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def _attaches(port: int) -> bool:
    try:
        RawSession(port, hello_of(engine_id="probe")).bye()
    except KVHearthError:
        return False
    return True


def test_ranks_write_what_their_scheduler_reserves(pair: tuple[Daemon, GatewayProcess]) -> None:
    daemon, served = pair
    contract = contract_of(PAGE_BYTES, shards=2)
    first = RawSession(served.port, hello_of(contract))
    second = RawSession(served.port, hello_of(contract, scheduler=False, rank=1))
    keys = keys_of(1)
    extents = first.reserve(1)
    payload = os.urandom(2 * PAGE_BYTES)
    summed(extents, payload)
    assert first.put(extents[:1], payload[:PAGE_BYTES]) == [OK]
    assert second.put(extents[1:], payload[PAGE_BYTES:]) == [OK]
    first.commit(keys, extents)
    _, leased = first.look_up(keys)
    assert second.get(leased[1:])[1] == payload[PAGE_BYTES:]
    more = first.reserve(1)
    first.bye()
    assert ended(second.line), "a group ends with its scheduler"
    second.close()
    daemon.wait_quiet()
    assert len(more) == 2


def test_an_abort_of_a_whole_engine_in_doubt_frees_its_slots(far: RawSession) -> None:
    extents = far.reserve(1)
    reply = far.abort(extents, in_doubt=True)
    assert (reply.freed_slots, reply.quarantined_slots) == (1, 0)
