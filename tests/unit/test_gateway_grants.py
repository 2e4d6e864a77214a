"""The gateway's grants of memory to remote processes, and its connections to them."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest

from kvhearth.model import EXTENT_DTYPE, Records
from kvhearth.wire.remote import Outcome
from kvhearth_server.gateway.grants import Grants, extents_of
from kvhearth_server.gateway.streams import Ended, Stream

OK, FOREIGN = Outcome.OK, Outcome.FOREIGN_EXTENT


@pytest.fixture
def pair() -> Iterator[tuple[Stream, socket.socket]]:
    """A stream, and the peer's end of its connection."""
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as peer,
    ):
        accepted, _ = listener.accept()
        stream = Stream(accepted)
        yield stream, peer
        stream.close()


@pytest.fixture
def stream(pair: tuple[Stream, socket.socket]) -> Stream:
    return pair[0]


def extents(*slots: int, generation: int = 1) -> Records:
    found = np.zeros(len(slots), EXTENT_DTYPE)
    found["slot"], found["length"], found["generation"] = slots, 4096, generation
    found["offset"] = found["slot"].astype(np.uint64) * 4096
    return found


def reserve(grants: Grants, reservation: int, *slots: int, generation: int = 1) -> None:
    with grants.reserving(reservation) as blobs:
        blobs.append(extents(*slots, generation=generation).tobytes())


def look_up(grants: Grants, lease: int, *slots: int) -> None:
    with grants.leasing(lease) as blobs:
        blobs.append(extents(*slots).tobytes())


def reserved(*slots: int, reservation: int = 1) -> Grants:
    grants = Grants()
    reserve(grants, reservation, *slots)
    return grants


def written(grants: Grants, stream: Stream, *slots: int, generation: int = 1) -> list[int]:
    """Return the outcomes of a put that ends at once."""
    found = extents_of(extents(*slots, generation=generation).tobytes())
    with grants.put(stream, found) as outcomes:
        return outcomes


@contextlib.contextmanager
def writing(grants: Grants, stream: Stream, slot: int) -> Iterator[None]:
    """A put meanwhile."""
    with grants.put(stream, extents_of(extents(slot).tobytes())) as outcomes:
        assert outcomes == [OK]
        yield


def now(seconds: float = 0.0) -> float:
    return time.monotonic() + seconds


def test_reserved_slots_are_written_until_they_are_retired(stream: Stream) -> None:
    grants = reserved(1, 2)
    with grants.put(stream, extents_of(extents(1, 3, 1).tobytes())) as outcomes:
        assert outcomes == [OK, FOREIGN, FOREIGN], "one put at a time"
        assert written(grants, stream, 2, generation=9) == [FOREIGN]
        assert written(grants, stream, 1) == [FOREIGN]
    assert grants.held() == (2, 2 * 4096)
    assert grants.retire([1], now())
    assert written(grants, stream, 1, 2) == [FOREIGN, OK]
    assert grants.held() == (1, 4096)


def test_a_retirement_waits_for_the_put(stream: Stream) -> None:
    grants = reserved(1)
    with ThreadPoolExecutor(1) as threads:
        with writing(grants, stream, 1):
            assert not grants.retire([1], now())
            retired = threads.submit(grants.retire, [1], now(20))
        assert retired.result()


def test_a_retirement_that_must_not_wait_ends_the_connection(stream: Stream) -> None:
    grants = reserved(1)
    with ThreadPoolExecutor(1) as threads:
        with writing(grants, stream, 1):
            retired = threads.submit(grants.retire, [1], now(), break_s=20)
            with pytest.raises(Ended):
                stream.read(4096, now(20))
        assert retired.result()


def test_slots_named_while_a_reservation_is_under_way_are_not_granted(stream: Stream) -> None:
    grants = Grants()
    with grants.reserving(5) as blobs:
        grants.retire([1], now())
        blobs.append(extents(1, 2).tobytes())
    assert written(grants, stream, 1, 2) == [FOREIGN, OK]


def test_a_reservation_aborted_under_way_grants_nothing(stream: Stream) -> None:
    grants = Grants()
    with grants.reserving(5) as blobs:
        grants.retire([], now(), reservations=[5])
        blobs.append(extents(1).tobytes())
    assert written(grants, stream, 1) == [FOREIGN]


def test_a_call_that_fails_grants_nothing(stream: Stream) -> None:
    grants = Grants()
    with contextlib.suppress(OSError), grants.reserving(5):
        raise OSError
    with contextlib.suppress(OSError), grants.leasing(5):
        raise OSError
    assert grants.held() == (0, 0)


def test_a_second_answer_grants_nothing_again(stream: Stream) -> None:
    grants = reserved(1, 2, reservation=7)
    grants.retire([1], now())
    reserve(grants, 7, 1, 2)
    assert written(grants, stream, 1, 2) == [FOREIGN, OK]


def test_an_abort_of_a_reservation_takes_what_is_left_of_it(stream: Stream) -> None:
    grants = reserved(1, 2, reservation=7)
    grants.retire([1], now())
    reserve(grants, 8, 1, generation=2)
    grants.retire([], now(), reservations=[7])
    assert written(grants, stream, 2) == [FOREIGN]
    assert written(grants, stream, 1, generation=2) == [OK], "it is another reservation's by now"


def test_leases_are_read_until_the_last_one_ends() -> None:
    grants = Grants()
    for lease in (1, 2):
        look_up(grants, lease, 4, 5)
    wanted = extents_of(extents(4, 6).tobytes())
    assert grants.readable(wanted) == [OK, FOREIGN]
    grants.release([1])
    assert grants.readable(wanted) == [OK, FOREIGN]
    assert grants.held() == (2, 2 * 4096)
    grants.release([2, 3])
    assert grants.readable(wanted) == [FOREIGN, FOREIGN]
    assert grants.held() == (0, 0)


def test_a_lease_released_under_way_is_not_read() -> None:
    grants = Grants()
    with grants.leasing(1) as blobs:
        grants.release([1])
        blobs.append(extents(4).tobytes())
    assert grants.readable(extents_of(extents(4).tobytes())) == [FOREIGN]


def test_closed_grants_stay_empty(stream: Stream) -> None:
    grants = reserved(1)
    look_up(grants, 1, 1)
    with grants.reserving(2) as blobs:
        grants.close(now())
        blobs.append(extents(2).tobytes())
    assert written(grants, stream, 1, 2) == [FOREIGN, FOREIGN]
    assert grants.readable(extents_of(extents(1).tobytes())) == [FOREIGN]


def test_a_frame_that_drips_ends_at_its_deadline(
    stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "socket", SimpleNamespace(recv_into=lambda *_: 1))
    assert stream.read(100, now(20)) == bytes(100)
    with pytest.raises(TimeoutError):
        stream.read(100, now())


def test_a_peer_that_reads_nothing_ends_a_send(stream: Stream) -> None:
    with pytest.raises(TimeoutError):
        stream.send([bytes(64 << 20)], now())


def test_a_silent_peer_is_looked_after(pair: tuple[Stream, socket.socket]) -> None:
    connection = pair[0].socket
    assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 15
    assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 30_000
    assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_parts_are_filled_and_sent_in_order(pair: tuple[Stream, socket.socket]) -> None:
    stream, peer = pair
    parts = [memoryview(bytearray(size)) for size in (0, 3, 70_000, 5)]
    data = np.random.default_rng(1).bytes(70_008)
    with ThreadPoolExecutor(1) as threads:
        threads.submit(peer.sendall, data)
        stream.fill(parts, now(20))
        assert b"".join(parts) == data
        threads.submit(stream.send, [data[:9], b"", data[9:]], now(20))
        with peer.makefile("rb") as received:
            assert received.read(len(data)) == data
