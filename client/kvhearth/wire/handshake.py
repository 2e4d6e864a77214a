"""Frames of the attach socket: a 4-byte little-endian length, then a JSON object of that length.

The first frame of a connection is the client's ``hello``; the daemon answers ``welcome`` (with
descriptors) or ``refused``. From then on the connection stands for the session: the client may send
``bye``, and closing the connection ends the session. Nothing here is unpickled, and a length is
checked before memory is allocated for it.

A first frame ``{"kind": "health"}`` is answered with ``{"kind": "health", "serving": bool,
"degraded": [str, ...], "doors_shut": [str, ...]}``, and the connection ends.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from itertools import pairwise
from typing import Any

from kvhearth.errors import KVHearthError, Reason
from kvhearth.native.table import NAMESPACES, Shape

FRAME_BYTES_MAX = 256 * 1024
HELLO_PARTS_MAX = 4096
"""Commas and opening brackets in a client's frame, its texts included. A hello with a contract of
all its groups has a few hundred. A frame of brackets alone would take 10 ms to parse.
"""
HEALTH_QUESTION = {"kind": "health"}
HEALTH_BYTES_MAX = 64
_LENGTH = struct.Struct("<I")
FRAME_HEADER_BYTES = _LENGTH.size
SEGMENTS_MAX = 1 << 16
"""Bound of segment numbers: an extent names its segment in 16 bits."""
_I32_MAX = (1 << 31) - 1
_TYPES = {"int": int, "str": str, "bool": bool, "list[int]": list}
_WELCOME_RANGES = (
    ("generation_count", 0, (1 << 32) - 1),  # an extent names its slot in 32 bits
    ("keys_max", 1, _I32_MAX),
    ("message_bytes_max", 1, _I32_MAX),
    ("leases_max", 1, _I32_MAX),
)


def encode_frame(message: dict[str, Any]) -> bytes:
    """Encode one frame.

    Raises:
        KVHearthError: ``bad_message`` if the message is larger than a frame may be.
    """
    body = json.dumps(message, separators=(",", ":")).encode()
    if len(body) > FRAME_BYTES_MAX:
        raise KVHearthError(
            Reason.BAD_MESSAGE, f"frame of {len(body)} bytes, at most {FRAME_BYTES_MAX}"
        )
    return _LENGTH.pack(len(body)) + body


class FrameDecoder:
    """Cuts a byte stream into messages; holds at most one frame.

    Args:
        bytes_max: bound of a frame.
        parts_max: bound of the commas and opening brackets in a frame, which bounds the time of
            parsing it; by default none.
    """

    def __init__(self, bytes_max: int = FRAME_BYTES_MAX, parts_max: int | None = None) -> None:
        self._bytes_max = bytes_max
        self._parts_max = parts_max
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[dict[str, Any]]:
        """Add received bytes, return the messages that are complete now.

        Raises:
            KVHearthError: ``bad_message`` for an oversized or malformed frame; the stream is then
                unusable.
        """
        self._buffer += data
        messages = []
        while len(self._buffer) >= FRAME_HEADER_BYTES:
            (size,) = _LENGTH.unpack_from(self._buffer)
            if size > self._bytes_max:
                raise KVHearthError(
                    Reason.BAD_MESSAGE, f"frame of {size} bytes, at most {self._bytes_max}"
                )
            end = FRAME_HEADER_BYTES + size
            if len(self._buffer) < end:
                break
            messages.append(self._parse(bytes(self._buffer[FRAME_HEADER_BYTES:end])))
            del self._buffer[:end]
        return messages

    def _parse(self, body: bytes) -> dict[str, Any]:
        if self._parts_max is not None:
            check_json_parts(body, self._parts_max)
        return _parse(body)


def check_json_parts(body: bytes | bytearray, parts_max: int) -> None:
    """Refuse JSON that would take long to parse, by its commas and opening brackets.

    Raises:
        KVHearthError: ``bad_message``.
    """
    parts = sum(map(body.count, (b",", b"{", b"[")))
    if parts > parts_max:
        raise KVHearthError(
            Reason.BAD_MESSAGE, f"{parts} commas and brackets in one message, at most {parts_max}"
        )


def _parse(body: bytes) -> dict[str, Any]:
    try:
        message = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise KVHearthError(Reason.BAD_MESSAGE, f"frame is not JSON: {error}") from None
    if not isinstance(message, dict):
        raise KVHearthError(Reason.BAD_MESSAGE, "frame is not a JSON object")
    return message


@dataclass(frozen=True)
class Run:
    """One run of an engine, beside its name.

    Attributes:
        process_group: name of the processes that run as this engine, equal in all of them and in no
            others. A process of another group is refused, so that two engines under one
            ``engine_id`` do not mix. "" if the ``engine_id`` is such a name.
        model_name: name of a local model's directory, which the daemon shows to people; "" if the
            contract names the model.
    """

    process_group: str = ""
    model_name: str = ""


NAMELESS = Run()


@dataclass(frozen=True)
class Hello:
    """The client's first frame.

    Attributes:
        protocol: version of this handshake.
        engine_id: the engine's name; the same in the scheduler and all ranks.
        contract: canonical JSON of the contract.
        scheduler: whether this process takes the engine's decisions.
        rank: this process's rank, or -1 if it moves no bytes.
        incarnation: incarnation of the group to join; 0 joins the open one or makes a new one.
        map_arena: whether to send the arena's descriptors.
        pid: process id as the client sees it, for people.
        previous_boot, previous_session: the session that this process held before.
        previous_drained: whether all copies under that session have finished.
        numa_node: NUMA node of this rank's GPU, or that it copies from; -1 if it is unknown.
        shared_index: whether to send the descriptors of the generations and of the shared index.
        tenant: tenant that a gateway speaks for; "" is the tenant of this process's user.
        identity: name of the remote peer that a gateway speaks for, for the daemon's log.
        process_group, model_name: as in ``Run``.
    """

    protocol: int
    engine_id: str
    contract: str
    scheduler: bool = True
    rank: int = 0
    incarnation: int = 0
    map_arena: bool = True
    pid: int = 0
    previous_boot: str = ""
    previous_session: int = 0
    previous_drained: bool = False
    numa_node: int = -1
    shared_index: bool = False
    tenant: str = ""
    identity: str = ""
    process_group: str = ""
    model_name: str = ""

    def to_message(self) -> dict[str, Any]:
        """Return the hello as a frame's message."""
        return {"kind": "hello", **asdict(self)}

    @classmethod
    def from_message(cls, message: dict[str, Any]) -> Hello:
        """Parse and check a frame's message.

        Raises:
            KVHearthError: ``bad_message`` naming the field.
        """
        values: Hello = _read(cls, message, "hello")
        return values


@dataclass(frozen=True)
class SegmentInfo:
    """One segment whose descriptor comes with the welcome, in the order of the descriptors.

    ``unpopulated`` has the begin and the end, in bytes, of each range that has no pages yet,
    ascending. Heartbeats tell how they shrink. To touch such a range may be a SIGBUS: whoever
    copies into one has the kernel populate it first.
    """

    segment: int
    bytes: int
    page_bytes: int
    unpopulated: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Welcome:
    """The daemon's answer to a valid hello.

    Its descriptors are one per segment, the generations' memfd, and one per table.

    Attributes:
        boot_id: id of this run of the daemon.
        session: number of the session.
        token: secret that authenticates the session's calls.
        incarnation: incarnation of the group.
        namespace: hex digest.
        epoch: current weights epoch.
        generation_count: number of slots whose generations the memfd holds, as u32.
        keys_max: most keys in one call.
        message_bytes_max: most bytes in one message.
        leases_max: most leases that the group may hold.
        segments: segments to map.
        lineage: random id of the cold start that this run descends from; the same after a warm
            restart. Empty if the daemon does not send one.
        tables: shapes of the shared index's tables; none unless the hello asked for them.
        namespace_number: the namespace's place in a table.
        memory_only: no tier lies below memory: a block that no table has is nowhere.
    """

    boot_id: str
    session: int
    token: str
    incarnation: int
    namespace: str
    epoch: int
    generation_count: int
    keys_max: int
    message_bytes_max: int
    leases_max: int
    segments: list[SegmentInfo] = field(default_factory=list)
    lineage: str = ""
    tables: list[Shape] = field(default_factory=list)
    namespace_number: int = 0
    memory_only: bool = False

    @cached_property
    def rooms(self) -> dict[int, int]:
        """Bytes of each segment."""
        return {info.segment: info.bytes for info in self.segments}

    def to_message(self) -> dict[str, Any]:
        """Return the welcome as a frame's message; a client that asked for no tables knows all."""
        message = {"kind": "welcome", **asdict(self)}
        if not self.tables:
            for name in ("tables", "namespace_number", "memory_only"):
                del message[name]
        return message

    @classmethod
    def from_message(cls, message: dict[str, Any]) -> Welcome:
        """Parse and check a frame's message.

        Raises:
            KVHearthError: ``bad_message`` naming the field.
        """
        lists = {
            "segments": _read_list(message.get("segments"), SegmentInfo, "segment"),
            "tables": _read_list(message.get("tables", []), Shape, "table"),
        }
        values: Welcome = _read(cls, {**message, **lists}, "welcome")
        _check_numbers(values)
        _check_tables(values)
        return values


def _read_list(found: object, kind: type[Any], word: str) -> list[Any]:
    if not isinstance(found, list):
        raise KVHearthError(Reason.BAD_MESSAGE, f"welcome: '{word}s' must be a list")
    if not all(isinstance(item, dict) for item in found):
        raise KVHearthError(Reason.BAD_MESSAGE, f"welcome: a {word} must be an object")
    return [_read(kind, {"kind": "s", **item}, "s") for item in found]


def _check_numbers(welcome: Welcome) -> None:
    """Check the numbers by which a client indexes arrays, cuts keys and maps memory."""
    for name, least, most in _WELCOME_RANGES:
        if not least <= getattr(welcome, name) <= most:
            raise KVHearthError(Reason.BAD_MESSAGE, f"welcome: {name!r} is not in {least}..{most}")
    numbers = [info.segment for info in welcome.segments]
    if len(set(numbers)) < len(numbers):
        raise KVHearthError(Reason.BAD_MESSAGE, "welcome: a segment is there twice")
    for info in welcome.segments:
        if not 0 <= info.segment < SEGMENTS_MAX or min(info.bytes, info.page_bytes) < 1:
            raise KVHearthError(
                Reason.BAD_MESSAGE, f"welcome: segment {info.segment} is out of range or empty"
            )
        if not ranges_in(info.unpopulated, info.bytes):
            raise KVHearthError(
                Reason.BAD_MESSAGE, f"welcome: 'unpopulated' of segment {info.segment} is no ranges"
            )


def ranges_in(bounds: Sequence[object], size_bytes: int) -> bool:
    """Whether ``bounds`` are begin and end of ranges within ``size_bytes``, ascending, apart."""
    numbers = [each for each in bounds if type(each) is int]
    rising = all(low < high for low, high in pairwise([-1, *numbers, size_bytes + 1]))
    return rising and len(numbers) == len(bounds) and len(bounds) % 2 == 0


def _check_tables(welcome: Welcome) -> None:
    """Check the numbers by which the native module accesses memory."""
    for shape in welcome.tables:
        sizes = (shape.slot_count, shape.stride, shape.slab_bytes, shape.slot_bytes_min)
        if (
            min(sizes) < 1
            or min(shape.first_slot, shape.seed) < 0
            or shape.first_slot + shape.slot_count > welcome.generation_count
            or shape.segment_bytes != welcome.rooms.get(shape.segment, shape.segment_bytes)
            or not 0 <= shape.segment < SEGMENTS_MAX
            or shape.segment_bytes < 1
            or not 0 <= welcome.namespace_number < NAMESPACES
        ):
            raise KVHearthError(
                Reason.BAD_MESSAGE, f"welcome: the table of segment {shape.segment} is impossible"
            )


def refused(error: KVHearthError) -> dict[str, Any]:
    """Return the frame's message for a refusal."""
    return {
        "kind": "refused",
        "reason": str(error.reason),
        "message": error.message,
        "details": error.details,
    }


def _read(kind: type[Any], message: dict[str, Any], word: str) -> Any:
    if message.get("kind") != word:
        raise KVHearthError(Reason.BAD_MESSAGE, f"expected a {word!r} frame")
    known = {item.name: item for item in fields(kind)}
    values = {name: value for name, value in message.items() if name != "kind"}
    for name, value in values.items():
        if name not in known:
            raise KVHearthError(Reason.BAD_MESSAGE, f"{word}: unknown field {name[:64]!r}")
        wanted = _TYPES.get(str(known[name].type))
        wrong = wanted is not None and type(value) is not wanted
        if wrong or (wanted is int and not -(1 << 63) <= value < 1 << 63):
            raise KVHearthError(
                Reason.BAD_MESSAGE, f"{word}: {name!r} must be a {known[name].type}"
            )
    try:
        return kind(**values)
    except TypeError as error:
        raise KVHearthError(Reason.BAD_MESSAGE, f"{word}: {error}") from None
