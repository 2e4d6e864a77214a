"""Requests to a mover, the helper process that moves blocks between the arena and one remote: their
shapes, and the frames between the daemon and the helper.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
)
from kvhearth_server.tiers.remote.record import record_bytes


@dataclass(frozen=True)
class Exists:
    """Keys of one space to look for: ``Done`` for present ones, ``Missing`` for absent ones.

    Attributes:
        space: the name of a namespace's KV group at the remote (``names.space_name``).
        family: properties of every block.
        keys: n keys of 1 to 64 bytes.
    """

    space: str
    family: BlockSpec
    keys: list[bytes]


@dataclass(frozen=True)
class Delete(Exists):
    """Keys of one space to remove: ``Done`` whether they were present or not."""


@dataclass(frozen=True)
class Get(Exists):
    """Blocks to load into slots; it ends at its first miss: later rows are ``Missing``.

    Attributes:
        places: ``ADDRESS_DTYPE`` (n, shards), as ``LoadBatch.places``.
    """

    places: Records


@dataclass(frozen=True)
class Put(Get):
    """Blocks to publish; their slots must not change before the final answer.

    Attributes:
        checksums: xxh3_128 of each shard, ``V16`` (n, shards).
        parents: key of the block that each one continues; empty for none.
    """

    checksums: Records
    parents: list[bytes]


@dataclass
class Answer:
    """Outcomes of a request's rows, as the helper collects them and the tier gets them.

    Attributes:
        ticket: return value of ``submit``.
        outcomes: one for each key.
        final: the slots belong to the caller again. An answer that is not final tells outcomes at
            the deadline, while the mover may still write to the slots.
        checksums: of a ``Get``: as read from the records, ``V16`` (n, shards), zero where not
            ``Done``; otherwise None.
        parents: of a ``Get``: keys of the blocks that these continue, empty for none; otherwise
            empty.
    """

    ticket: int
    outcomes: list[Outcome]
    final: bool = True
    checksums: Records | None = None
    parents: list[bytes] = field(default_factory=list)


# -- frames: a JSON head and a body of arrays ------------------------------------------------------

_SIZES = struct.Struct("<II")
FRAME_BYTES_MAX = 64 << 20
_PAGE_BYTES = 4096
_SUM = np.dtype(f"V{CHECKSUM_BYTES}")

OUTCOMES: tuple[Outcome, ...] = (
    Done(),
    Missing(),
    *(Corrupt(where) for where in ("source", "remote")),
    *(Failed(reason) for reason in Failure),
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

    def rows(self, dtype: np.dtype[Any], count: int, width: int) -> Records:
        """Read ``count`` rows of ``width`` items."""
        found = np.frombuffer(self._data, dtype, count * width, self._at).reshape(count, width)
        self._at += found.nbytes
        return found

    def take(self, count: int) -> bytes:
        """Read ``count`` bytes."""
        self._at += count
        return self._data[self._at - count : self._at]

    def texts(self, count: int) -> list[bytes]:
        """Read ``count`` byte strings."""
        return [self.take(length) for length in self.take(count)]


def _texts(values: Sequence[bytes]) -> bytes:
    return bytes(map(len, values)) + b"".join(values)


@dataclass
class Work:
    """A request between the daemon and its helper.

    Attributes:
        ticket: the daemon's number of it.
        deadline: ``time.monotonic()`` at which it is answered as timed out.
        staging: its place in staging memory, where its records lie one behind the other; 0 for
            requests without bytes.
        told: whether the daemon has told the caller that it missed its deadline.
    """

    ticket: int
    request: Exists
    deadline: float
    staging: int = 0
    told: bool = False

    def staged(self, row: int) -> slice:
        """Return the place of a row's record in staging memory."""
        size = record_bytes(self.request.family)
        start = self.staging + row * whole_pages(size)
        return slice(start, start + size)

    def failed(self, reason: Failure, *, final: bool = True) -> Answer:
        """Return the answer of a request that failed as a whole."""
        return Answer(self.ticket, [Failed(reason)] * len(self.request.keys), final)


def whole_pages(size: int) -> int:
    """Return the bytes of the pages that ``size`` bytes take."""
    return -(-size // _PAGE_BYTES) * _PAGE_BYTES


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
        "staging": work.staging,
    }
    body = [_texts(request.keys)]
    if isinstance(request, Get):
        body.append(request.places.tobytes())
    if isinstance(request, Put):
        body += [request.checksums.tobytes(), _texts(request.parents)]
    return encode(head, body)


def decode_work(head: Head, data: bytes) -> Work:
    """Return the request of a frame."""
    kind, count, body = _KINDS[head["kind"]], head["count"], _Body(data)
    family = BlockSpec(bytes.fromhex(head["namespace"]), *head["numbers"])
    fields: dict[str, Any] = {"space": head["space"], "family": family, "keys": body.texts(count)}
    if issubclass(kind, Get):
        fields["places"] = body.rows(ADDRESS_DTYPE, count, family.shards)
    if issubclass(kind, Put):
        fields["checksums"] = body.rows(_SUM, count, family.shards)
        fields["parents"] = body.texts(count)
    return Work(head["ticket"], kind(**fields), head["deadline"], head["staging"])


def encode_answer(answer: Answer, counts: Mapping[str, int]) -> bytes:
    """Return the frame of an answer.

    Args:
        counts: increases of the helper's counters.
    """
    head: Head = {
        "kind": "answer",
        "ticket": answer.ticket,
        "count": len(answer.outcomes),
        "counts": counts,
    }
    body = [bytes(_CODES[each] for each in answer.outcomes)]
    if answer.checksums is not None:
        head["shards"] = answer.checksums.shape[1]
        body += [answer.checksums.tobytes(), _texts(answer.parents)]
    return encode(head, body)


def decode_answer(head: Head, data: bytes) -> Answer:
    """Return the answer of a frame."""
    body, count = _Body(data), head["count"]
    answer = Answer(head["ticket"], [OUTCOMES[code] for code in body.take(count)])
    if "shards" in head:
        answer.checksums = body.rows(_SUM, count, head["shards"])
        answer.parents = body.texts(count)
    return answer
