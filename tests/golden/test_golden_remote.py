"""Golden tests of the wire between hosts: it must not change."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvhearth.errors import KVHearthError, Reason
from kvhearth.model import EXTENT_RECORD, FLAG_SUMMED, checksum_of
from kvhearth.wire.handshake import FrameDecoder, encode_frame
from kvhearth.wire.remote import (
    RECORD_BYTES,
    DataFrame,
    DataKind,
    GatewayTerms,
    Identify,
    Outcome,
    Purpose,
    preface,
    purpose_of,
)

IDENTIFY = Identify("kvh_secret", "")
TERMS = GatewayTerms(64 << 20, 32, 32, 10.0, 15.0)
EXTENT = EXTENT_RECORD.pack(7, 1, FLAG_SUMMED, 1 << 20, 5, 3, checksum_of(b"bytes"))
FRAMES = {
    "life line": preface(Purpose.LIFE_LINE),
    "calls": preface(Purpose.CALLS),
    "data": preface(Purpose.DATA),
    "identify": encode_frame(IDENTIFY.to_message()),
    "gateway": encode_frame(TERMS.to_message()),
    "open": DataFrame(DataKind.OPEN, 0, 0, 5).pack() + b"token",
    "put": DataFrame(DataKind.PUT, 1, 1, 5).pack() + EXTENT + b"bytes",
    "get": DataFrame(DataKind.GET, 1, 2, 0).pack() + EXTENT,
    "stored": DataFrame(DataKind.STORED, 1, 1, 0).pack() + bytes([Outcome.OK]),
    "bytes": DataFrame(DataKind.BYTES, 1, 2, 5).pack() + bytes([Outcome.OK]) + b"bytes",
    "copied": DataFrame(DataKind.COPIED, 1, 2, 0).pack() + bytes([Outcome.STALE_GENERATION]),
}


def test_frames_between_hosts() -> None:
    lines = (Path(__file__).parent / "remote.hex").read_text().splitlines()
    assert {name: data.hex() for name, data in FRAMES.items()} == dict(
        line.split(": ") for line in lines
    )


def test_frames_are_read_as_they_are_written() -> None:
    assert purpose_of(FRAMES["data"]) is Purpose.DATA
    (identify,) = FrameDecoder().feed(FRAMES["identify"])
    assert Identify.from_message(identify) == IDENTIFY
    (terms,) = FrameDecoder().feed(FRAMES["gateway"])
    assert GatewayTerms.from_message(terms) == TERMS
    frame = DataFrame.unpack(FRAMES["put"][:24])
    assert frame == DataFrame(DataKind.PUT, 1, 1, 5)
    assert RECORD_BYTES[frame.kind] * frame.count == len(EXTENT)


def test_the_numbers_of_outcomes_stay() -> None:
    assert [each.name for each in Outcome] == [
        *("OK", "STALE_GENERATION", "CHECKSUM_MISMATCH", "FOREIGN_EXTENT", "NO_MEMORY")
    ]
    assert [each.value for each in Outcome] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"KVHG\2\0\1\0", Reason.PROTOCOL_VERSION),
        (b"KVHG\1\0\4\0", Reason.BAD_MESSAGE),
        (b"GET / HT", Reason.BAD_MESSAGE),
    ],
)
def test_other_first_bytes_are_refused(data: bytes, reason: Reason) -> None:
    with pytest.raises(KVHearthError) as refused:
        purpose_of(data)
    assert refused.value.reason is reason
