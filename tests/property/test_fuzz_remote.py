"""Arbitrary answers of a gateway: a client gets a value, a ``KVHearthError`` or failed blocks."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fuzz import Liar, changed, fuzz

from kvhearth.copiers.remote import RemoteCopier
from kvhearth.errors import KVHearthError, Reason
from kvhearth.model import EXTENT_DTYPE
from kvhearth.page_layout import PagedKV
from kvhearth.session.link import attach
from kvhearth.session.remote_arena import RemoteArena
from kvhearth.transports.data import DataLines
from kvhearth.transports.tcp import Dialer
from kvhearth.url import RemoteUrl
from kvhearth.wire.frames import encode_status
from kvhearth.wire.handshake import Hello, SegmentInfo, Welcome, encode_frame
from kvhearth.wire.remote import DATA_HEADER, DataKind, GatewayTerms, Outcome
from kvhearth_lab.harness import HUNG_S

BLOCK_BYTES = 512
BLOCKS = 3
WELCOME = Welcome("b", 1, "t", 1, "n", 1, 8, 9, 1 << 20, 9, [SegmentInfo(0, 1 << 16, 4096)])
GUARD = 0xA5


@pytest.fixture(scope="module")
def door() -> Iterator[tuple[Liar, int]]:
    """A liar, and its port."""
    listener = socket.create_server(("127.0.0.1", 0))
    with contextlib.closing(Liar(listener)) as liar:
        yield liar, listener.getsockname()[1]


def reported(decode: Callable[[], object]) -> object:
    """Return the value, or None if it was rejected. Any other exception is a failure."""
    with contextlib.suppress(KVHearthError):
        return decode()
    return None


def test_any_answer_to_an_attach(door: tuple[Liar, int]) -> None:
    liar, port = door
    terms = GatewayTerms(1 << 20, 4, 8, 5.0, 5.0).to_message()
    refusal = {"kind": "refused", "reason": "draining", "message": "m", "details": {"self": "x"}}

    @fuzz(150)
    @given(changed(terms), changed(WELCOME.to_message()) | changed(refusal), st.binary(max_size=9))
    def say(first: object, second: object, rest: bytes) -> None:
        with contextlib.suppress(KVHearthError, TypeError, ValueError):
            frames = [encode_frame(each) for each in (first, second) if isinstance(each, dict)]
            liar.says = [b"".join(frames) + rest]
        url = RemoteUrl("127.0.0.1", port, attach_ms=2000)
        session = reported(lambda: attach(url, Hello(1, "e", "{}")))
        if session is not None:
            session.close()  # type: ignore[attr-defined]

    before = len(os.listdir("/proc/self/fd"))
    say()
    assert len(os.listdir("/proc/self/fd")) <= before + 2


kinds = st.sampled_from([int(kind) for kind in DataKind]) | st.integers(0, 65535)
counts = st.sampled_from([0, 1, BLOCKS, 4096, 4097]) | st.integers(0, (1 << 32) - 1)
numbers = st.integers(1, 4) | st.integers(0, (1 << 64) - 1)
sizes = st.sampled_from([index * BLOCK_BYTES for index in range(BLOCKS + 1)])
lengths = sizes | st.integers(0, (1 << 64) - 1)
outcomes = st.lists(st.sampled_from([int(each) for each in Outcome] + [77]), max_size=2 * BLOCKS)
frames = st.builds(
    lambda kind, flags, count, number, size, more, tail: (
        DATA_HEADER.pack(kind, flags, count, number, size) + bytes(more) + bytes(tail)
    ),
    *(kinds, st.sampled_from([0, 0, 0, 1]), counts, numbers, lengths, outcomes, sizes),
)
refusals = st.sampled_from(list(Reason)).map(
    lambda reason: (
        DATA_HEADER.pack(
            DataKind.REFUSED, 0, 0, 0, len(status := encode_status(KVHearthError(reason, "m")))
        )
        + status
    )
)


@pytest.mark.parametrize("direct", [True, False])
def test_any_answer_on_a_data_connection(door: tuple[Liar, int], direct: bool) -> None:
    liar, port = door

    @fuzz(150)
    @given(st.lists(frames | refusals | st.binary(max_size=50), max_size=4), st.booleans())
    def say(parts: list[bytes], store: bool) -> None:
        liar.says = [b"".join(parts)]
        lines = DataLines(
            Dialer(RemoteUrl("127.0.0.1", port)),
            "token",
            1,
            window_bytes=1 << 20,
            connect_s=HUNG_S,
            alive=lambda: True,
        )
        remote = RemoteArena(WELCOME, lines, 1 << 20, lambda: True)
        pages = np.full((BLOCKS + 2, BLOCK_BYTES), GUARD, np.uint8)
        copier = RemoteCopier(PagedKV([pages]), remote, direct=direct)
        extents = np.zeros(BLOCKS, EXTENT_DTYPE)
        extents["slot"] = range(BLOCKS)
        extents["offset"] = np.arange(BLOCKS) * BLOCK_BYTES
        extents["length"] = BLOCK_BYTES
        numbers = np.arange(1, BLOCKS + 1)
        if store:
            ticket = copier.store("b", numbers, extents)
        else:
            ticket = copier.load("b", extents, numbers)
        assert ticket is not None
        done = copier.wait(ticket, HUNG_S)
        assert done is not None
        assert sum(done.reasons.values()) == np.count_nonzero(~done.ok)
        assert (pages[[0, -1]] == GUARD).all()
        assert (pages == GUARD).all() or not store
        assert copier.close(HUNG_S)
        remote.close()
        remote.staging.check_books()

    before = len(os.listdir("/proc/self/fd"))
    say()
    assert len(os.listdir("/proc/self/fd")) <= before + 2
