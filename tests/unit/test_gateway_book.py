"""The gateway's book of what remote processes may write and read, and its log of puts."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from kvhearth.model import EXTENT_DTYPE, Records
from kvhearth.wire.remote import Outcome
from kvhearth_server.gateway.book import Book, Put, places
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
        stream = Stream(accepted, 15.0)
        yield stream, peer
        stream.close()


@pytest.fixture
def put(pair: tuple[Stream, socket.socket]) -> Put:
    return Put(pair[0])


def extents(*slots: int, generation: int = 1) -> Records:
    found = np.zeros(len(slots), EXTENT_DTYPE)
    found["slot"], found["length"], found["generation"] = slots, 4096, generation
    found["offset"] = found["slot"].astype(np.uint64) * 4096
    return found


def granted(*slots: int, reservation: int = 1) -> Book:
    book = Book()
    book.reserve(reservation)
    book.reserved(reservation, [extents(*slots).tobytes()])
    return book


def begin(book: Book, put: Put, *slots: int, generation: int = 1) -> list[Outcome]:
    return book.begin_put(put, places(extents(*slots, generation=generation).tobytes()))


def now(seconds: float = 0.0) -> float:
    return time.monotonic() + seconds


def test_what_was_reserved_is_written_until_it_is_retired(put: Put) -> None:
    book = granted(1, 2)
    assert begin(book, put, 1, 3) == [OK, FOREIGN]
    assert begin(book, put, 2, generation=9) == [FOREIGN]
    assert begin(book, Put(put.stream), 1) == [FOREIGN], "one put at a time"
    book.end_put(put)
    assert book.held() == (2, 2 * 4096)
    assert book.retire([1], now())
    assert begin(book, put, 1, 2) == [FOREIGN, OK]
    assert book.held() == (1, 4096)


def test_a_retirement_waits_for_the_put(put: Put) -> None:
    book = granted(1)
    begin(book, put, 1)
    assert not book.retire([1], now(0.05))
    threading.Timer(0.1, book.end_put, [put]).start()
    assert book.retire([1], now(20))


def test_a_retirement_that_must_not_wait_ends_the_connection(
    put: Put, pair: tuple[Stream, socket.socket]
) -> None:
    book = granted(1)
    begin(book, put, 1)

    def write() -> None:
        with pytest.raises(Ended):
            pair[0].read(4096, now(20))
        book.end_put(put)

    writer = threading.Thread(target=write)
    writer.start()
    assert book.retire([1], now(), break_s=20)
    writer.join()


def test_slots_named_while_a_reservation_is_under_way_are_not_granted(put: Put) -> None:
    book = Book()
    book.reserve(5)
    book.retire([1], now())
    book.reserved(5, [extents(1, 2).tobytes()])
    assert begin(book, put, 1, 2) == [FOREIGN, OK]


def test_a_reservation_aborted_under_way_grants_nothing(put: Put) -> None:
    book = Book()
    book.reserve(5)
    book.retire([], now(), reservations=[5])
    book.reserved(5, [extents(1).tobytes()])
    assert begin(book, put, 1) == [FOREIGN]


def test_a_second_answer_grants_nothing_again(put: Put) -> None:
    book = granted(1, 2, reservation=7)
    book.retire([1], now())
    book.reserve(7)
    book.reserved(7, [extents(1, 2).tobytes()])
    assert begin(book, put, 1, 2) == [FOREIGN, OK]


def test_an_abort_of_a_reservation_takes_what_is_left_of_it(put: Put) -> None:
    book = granted(1, 2, reservation=7)
    book.retire([1], now())
    book.reserve(8)
    book.reserved(8, [extents(1, generation=2).tobytes()])
    book.retire([], now(), reservations=[7])
    assert begin(book, put, 2) == [FOREIGN]
    assert begin(book, put, 1, generation=2) == [OK], "it is another reservation's by now"


def test_leases_are_read_until_the_last_one_ends() -> None:
    book = Book()
    for lease in (1, 2):
        book.look_up(lease)
        book.leased(lease, [extents(4, 5).tobytes()])
    wanted = places(extents(4, 6).tobytes())
    assert book.readable(wanted) == [True, False]
    book.release([1])
    assert book.readable(wanted) == [True, False]
    assert book.held() == (2, 2 * 4096)
    book.release([2, 3])
    assert book.readable(wanted) == [False, False]
    assert book.held() == (0, 0)


def test_a_lease_released_under_way_is_not_read() -> None:
    book = Book()
    book.look_up(1)
    book.release([1])
    book.leased(1, [extents(4).tobytes()])
    assert book.readable(places(extents(4).tobytes())) == [False]


def test_a_closed_book_grants_nothing(put: Put) -> None:
    book = granted(1)
    book.look_up(1)
    book.leased(1, [extents(1).tobytes()])
    book.reserve(2)
    assert book.close(now())
    book.reserved(2, [extents(2).tobytes()])
    assert begin(book, put, 1, 2) == [FOREIGN, FOREIGN]
    assert book.readable(places(extents(1).tobytes())) == [False]


def test_a_frame_that_drips_ends_at_its_deadline(pair: tuple[Stream, socket.socket]) -> None:
    stream, peer = pair
    stopping = threading.Event()

    def drip() -> None:
        while not stopping.wait(0.05):
            peer.sendall(b"x")

    dripping = threading.Thread(target=drip)
    dripping.start()
    began = now()
    with pytest.raises(TimeoutError):
        stream.read(1 << 20, now(0.2))
    stopping.set()
    dripping.join()
    assert now() - began < 10


def test_a_peer_that_reads_nothing_ends_a_send(pair: tuple[Stream, socket.socket]) -> None:
    with pytest.raises(TimeoutError):
        pair[0].send([bytes(64 << 20)], now(0.1))


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
    sender = threading.Thread(target=peer.sendall, args=(data,))
    sender.start()
    stream.fill(parts, now(20))
    sender.join()
    assert b"".join(parts) == data
    sender = threading.Thread(target=stream.send, args=([data[:9], b"", data[9:]], now(20)))
    sender.start()
    found = b""
    while len(found) < len(data):
        found += peer.recv(1 << 20)
    sender.join()
    assert found == data
