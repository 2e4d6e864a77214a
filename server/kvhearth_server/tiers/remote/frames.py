"""Frames between the daemon and a mover's helper process: a JSON head and a body of arrays."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvhearth.model import CHECKSUM_BYTES, Records
from kvhearth_server.tiers.base import (
    ADDRESS_DTYPE,
    BlockSpec,
    Corrupt,
    Done,
    Failed,
    Failure,
    Missing,
    Outcome,
    Refusal,
    Throttled,
)
from kvhearth_server.tiers.remote.mover import Delete, Exists, Get, Put

_SIZES = struct.Struct("<II")
FRAME_BYTES_MAX = 64 << 20
_SUM = np.dtype(f"V{CHECKSUM_BYTES}")
_OFFSET = np.dtype("<u8")

OUTCOMES: tuple[Outcome, ...] = (
    Done(),
    Missing(),
    *(Corrupt(where) for where in ("source", "tier", "remote")),
    *(Failed(reason) for reason in Failure),
    *(Throttled(reason) for reason in Refusal),
)
_CODES = {outcome: code for code, outcome in enumerate(OUTCOMES)}
_KINDS: dict[str, type[Exists]] = {"exists": Exists, "delete": Delete, "get": Get, "put": Put}
_NAMES = {kind: name for name, kind in _KINDS.items()}

Head = dict[str, Any]


def encode(head: Head, body: Iterable[bytes] = ()) -> bytes:
    """Return a frame."""
    text = json.dumps(head, separators=(",", ":")).encode()
    whole = b"".join(body)
    return _SIZES.pack(len(text), len(whole)) + text + whole


class FrameReader:
    """Takes apart a stream of frames."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[Head, bytes]]:
        """Add received bytes; return the frames that are complete.

        Raises:
            ValueError: the stream is damaged.
        """
        self._data += data
        while len(self._data) >= _SIZES.size:
            head_bytes, body_bytes = _SIZES.unpack_from(self._data)
            end = _SIZES.size + head_bytes + body_bytes
            if end > FRAME_BYTES_MAX:
                raise ValueError(f"a frame of {end} bytes")
            if len(self._data) < end:
                return
            start = _SIZES.size + head_bytes
            head = json.loads(self._data[_SIZES.size : start])
            body = bytes(self._data[start:end])
            del self._data[:end]
            yield head, body


class _Body:
    """Reads arrays from a frame's body, in the order in which they were written."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def array(self, dtype: np.dtype[Any], count: int) -> Records:
        """Read ``count`` items."""
        found = np.frombuffer(self._data, dtype, count, self._at)
        self._at += found.nbytes
        return found

    def texts(self, count: int) -> list[bytes]:
        """Read ``count`` byte strings."""
        found = []
        for length in self.array(np.dtype("u1"), count).tolist():
            found.append(self._data[self._at : self._at + length])
            self._at += length
        return found


def _texts(values: Sequence[bytes]) -> bytes:
    return bytes(map(len, values)) + b"".join(values)


@dataclass(frozen=True)
class Work:
    """A request as the helper gets it.

    Attributes:
        ticket: the daemon's number of it.
        deadline: ``time.monotonic()`` at which it is answered as timed out.
        seconds: the whole time that it had at first.
        offsets: place of each row's record in staging memory; empty for requests without bytes.
    """

    ticket: int
    request: Exists
    deadline: float
    seconds: float
    offsets: list[int] = field(default_factory=list)


def encode_work(work: Work) -> bytes:
    """Return the frame of a request."""
    request = work.request
    family = request.family
    head: Head = {
        "kind": _NAMES[type(request)],
        "ticket": work.ticket,
        "space": request.space,
        "namespace": family.namespace.hex(),
        "numbers": [family.group, family.epoch, family.length, family.shards],
        "count": len(request.keys),
        "deadline": work.deadline,
        "seconds": work.seconds,
    }
    body = [_texts(request.keys)]
    if isinstance(request, Get):
        body += [np.array(work.offsets, _OFFSET).tobytes(), request.places.tobytes()]
    if isinstance(request, Put):
        body += [request.checksums.tobytes(), _texts(request.parents)]
        head["replace"] = request.replace
    return encode(head, body)


def decode_work(head: Head, data: bytes) -> Work:
    """Return the request of a frame."""
    kind, count, body = _KINDS[head["kind"]], head["count"], _Body(data)
    family = BlockSpec(bytes.fromhex(head["namespace"]), *head["numbers"])
    fields: dict[str, Any] = {"space": head["space"], "family": family, "keys": body.texts(count)}
    offsets: list[int] = []
    shape = (count, family.shards)
    if issubclass(kind, Get):
        offsets = body.array(_OFFSET, count).tolist()
        fields["places"] = body.array(ADDRESS_DTYPE, count * family.shards).reshape(shape)
    if issubclass(kind, Put):
        fields["checksums"] = body.array(_SUM, count * family.shards).reshape(shape)
        fields["parents"] = body.texts(count)
        fields["replace"] = head["replace"]
    request = kind(**fields)
    return Work(head["ticket"], request, head["deadline"], head["seconds"], offsets)


@dataclass
class Results:
    """Results of a request's rows, as the helper collects them.

    Attributes:
        outcomes: one for each key.
        checksums: of a ``Get``, ``V16`` (n, shards).
        parents: of a ``Get``, one for each key.
    """

    outcomes: list[Outcome]
    checksums: Records | None = None
    parents: list[bytes] = field(default_factory=list)


def encode_results(ticket: int, results: Results, counts: dict[str, int]) -> bytes:
    """Return the frame of a request's results.

    Args:
        counts: increases of the helper's counters.
    """
    head: Head = {
        "kind": "answer",
        "ticket": ticket,
        "count": len(results.outcomes),
        "counts": counts,
    }
    body = [bytes(_CODES[each] for each in results.outcomes)]
    if results.checksums is not None:
        head["shards"] = results.checksums.shape[1]
        body += [results.checksums.tobytes(), _texts(results.parents)]
    return encode(head, body)


def decode_results(head: Head, data: bytes) -> Results:
    """Return the results of a frame."""
    body, count = _Body(data), head["count"]
    outcomes = [OUTCOMES[code] for code in body.array(np.dtype("u1"), count).tolist()]
    if "shards" not in head:
        return Results(outcomes)
    shards = head["shards"]
    sums = body.array(_SUM, count * shards).reshape(count, shards)
    return Results(outcomes, sums, body.texts(count))
