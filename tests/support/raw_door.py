"""Raw access to the daemon's sockets: frames, and calls without a client."""

from __future__ import annotations

import array
import contextlib
import dataclasses
import hashlib
import itertools
import json
import os
import secrets
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from kvhearth.contract import Contract, GroupKind, GroupSpec
from kvhearth.errors import KVHearthError, Reason
from kvhearth.model import EXTENT_DTYPE, Records
from kvhearth.proto.v1 import cache_pb2 as pb
from kvhearth.proto.v1.types_pb2 import GroupCount
from kvhearth.url import ATTACH_SOCKET, GRPC_SOCKET
from kvhearth.version import PROTOCOL_VERSION
from kvhearth.wire.frames import STATUS_DETAILS_KEY, TOKEN_KEY, Stub, decode_status, rebuild_error
from kvhearth.wire.handshake import FrameDecoder, encode_frame
from kvhearth_lab.harness import HUNG_S
from kvhearth_lab.harness.engine import Engine
from support.daemon import Daemon, until

_numbers = itertools.count()
PAGE_BYTES = 16 * 1024


def raw_contract(**changes: Any) -> Contract:
    """Return a contract of one group and one rank."""
    groups = (GroupSpec(GroupKind.FULL, 16, PAGE_BYTES),)
    return Contract(
        **{"model": "m", "revision": "r", "kv_dtype": "uint8", "groups": groups, **changes}
    )


def raw_hello(**changes: Any) -> dict[str, Any]:
    """Return a valid hello message with some changes; a change to ``...`` leaves a field out."""
    message = {
        "kind": "hello",
        "protocol": PROTOCOL_VERSION,
        "engine_id": f"e-{secrets.token_hex(4)}",
        "contract": raw_contract().to_json(),
        "scheduler": True,
        "rank": 0,
        "map_arena": False,
    }
    return {name: value for name, value in {**message, **changes}.items() if value is not ...}


class RawLine:
    """A connection to the attach socket."""

    def __init__(self, path: Path, timeout_s: float = HUNG_S) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        # A connect with a timeout would fail at once while the daemon's backlog is full.
        self._socket.connect(str(path))
        self._socket.settimeout(timeout_s)
        self.descriptors: list[int] = []

    def __enter__(self) -> RawLine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection and the received descriptors."""
        self._socket.close()
        for descriptor in self.descriptors:
            os.close(descriptor)
        self.descriptors = []

    def send(self, data: bytes, descriptors: list[int] | None = None) -> None:
        """Send bytes unchanged; a daemon that has closed the connection is no failure here."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            if descriptors:
                sent = socket.send_fds(self._socket, [data], descriptors)
                data = data[sent:]
            self._socket.sendall(data)

    def half_close(self) -> None:
        """Close the sending direction."""
        self._socket.shutdown(socket.SHUT_WR)

    def answer(self) -> dict[str, Any]:
        """Return the next frame."""
        decoder = FrameDecoder()
        while True:
            data, ancillary, _, _ = self._socket.recvmsg(1 << 16, socket.CMSG_SPACE(64))
            for _, _, payload in ancillary:
                numbers = array.array("i")
                numbers.frombytes(payload)
                self.descriptors += numbers
            assert data, "the daemon hung up without a word"
            if messages := decoder.feed(data):
                return messages[0]

    def refusal(self) -> KVHearthError:
        """Return the daemon's refusal, after which it must close the connection."""
        answer = self.answer()
        assert answer["kind"] == "refused", answer
        assert self.ended(), "it refused, but keeps the connection"
        return _refusal(answer)

    def ended(self) -> bool:
        """Whether the daemon closes the connection before the timeout."""
        try:
            while self._socket.recv(1 << 16):
                pass
        except ConnectionResetError:
            return True
        except TimeoutError:
            return False
        return True


def _refusal(answer: dict[str, Any]) -> KVHearthError:
    assert answer["message"]
    return rebuild_error(answer["reason"], answer["message"], answer["details"])


def attach_path(daemon: Daemon) -> Path:
    """Return the path of the daemon's attach socket."""
    return daemon.socket_dir / ATTACH_SOCKET


class RawSession:
    """An attached session: its attach socket, and calls with its token.

    Raises:
        KVHearthError: the refusal.
    """

    def __init__(self, daemon: Daemon, **changes: Any) -> None:
        self.line = RawLine(attach_path(daemon))
        self.line.send(encode_frame(raw_hello(**changes)))
        self.welcome = self.line.answer()
        if self.welcome["kind"] == "refused":
            self.line.close()
            raise _refusal(self.welcome)
        self.token = str(self.welcome["token"])
        self.epoch = int(self.welcome["epoch"])
        self.boot_id = str(self.welcome["boot_id"])
        self.channel = _channel(daemon.socket_dir / GRPC_SOCKET)
        self._stub = Stub(self.channel, pb)

    def __enter__(self) -> RawSession:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self, *, bye: bool = True) -> None:
        """End the session, with a goodbye or without."""
        if bye:
            self.line.send(encode_frame({"kind": "bye"}))
        self.line.close()
        self.channel.close()

    def call(self, method: str, request: Any, *, token: str | None = None) -> Any:
        """Make one call; ``token``: replaces the session's token, empty for none.

        Raises:
            KVHearthError: the refusal.
        """
        token = self.token if token is None else token
        metadata = ((TOKEN_KEY, token),) if token else ()
        try:
            return getattr(self._stub, method)(request, timeout=HUNG_S, metadata=metadata)
        except grpc.RpcError as error:
            raise refusal_of(error) from None

    def send_bytes(self, path: str, data: bytes, metadata: Any = ()) -> bytes:
        """Send bytes as the request of the method ``/service/name`` and return the answer's bytes.

        Raises:
            KVHearthError: the refusal.
        """
        call = self.channel.unary_unary(path)
        try:
            reply: bytes = call(data, timeout=HUNG_S, metadata=metadata or self.metadata)
        except grpc.RpcError as error:
            raise refusal_of(error) from None
        return reply

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Metadata of this session's calls."""
        return ((TOKEN_KEY, self.token),)

    def reserve(self, count: int, *, group: int = 0) -> Records:
        """Reserve ``count`` blocks and return their extents, flat."""
        wants = [GroupCount(group=group, count=count)]
        request = pb.ReserveRequest(reservation_id=new_id(), epoch=self.epoch, groups=wants)
        return np.frombuffer(self.call("Reserve", request).groups[0].extents, EXTENT_DTYPE)

    def commit(self, keys: list[bytes], extents: Records, /, **changes: Any) -> pb.CommitResponse:
        """Bind keys to reserved extents with zero checksums."""
        groups = [commit_group(keys, extents, **changes)]
        reply: pb.CommitResponse = self.call(
            "Commit", pb.CommitRequest(epoch=self.epoch, groups=groups)
        )
        return reply

    def lookup(self, keys: list[bytes], **changes: Any) -> pb.LookupResponse:
        """Look up keys of group 0."""
        fields = {"epoch": self.epoch, "groups": [{"group": 0, "keys": b"".join(keys)}], **changes}
        reply: pb.LookupResponse = self.call("Lookup", pb.LookupRequest(**fields))
        return reply

    def store(self, count: int) -> tuple[list[bytes], Records]:
        """Commit new blocks whose bytes were never written."""
        keys, extents = new_keys(count), self.reserve(count)
        self.commit(keys, extents)
        return keys, extents

    def abort(self, extents: Records) -> pb.AbortResponse:
        """Give reserved extents back."""
        reply: pb.AbortResponse = self.call("Abort", pb.AbortRequest(groups=[slots_of(extents)]))
        return reply


def _channel(path: Path) -> grpc.Channel:
    return grpc.insecure_channel(f"unix:{path}", [("grpc.use_local_subchannel_pool", 1)])


def commit_group(keys: list[bytes], extents: Records, /, **changes: Any) -> pb.GroupCommit:
    """Return one group of a commit."""
    fields = {
        "keys": b"".join(keys),
        "slots": extents["slot"].tobytes(),
        "generations": extents["generation"].tobytes(),
        "checksums": bytes(16 * len(extents)),
        **changes,
    }
    return pb.GroupCommit(**fields)


def slots_of(extents: Records) -> dict[str, Any]:
    """Return slots and generations, as in a ``GroupSlots``."""
    slots, generations = extents["slot"].tobytes(), extents["generation"].tobytes()
    return {"group": 0, "slots": slots, "generations": generations}


def refusal_of(error: grpc.RpcError) -> KVHearthError:
    """Return the refusal that a failed call carries; the code on the wire must match its reason."""
    call: Any = error
    for key, value in call.trailing_metadata() or ():
        if key == STATUS_DETAILS_KEY:
            refusal = decode_status(value)
            assert call.code().value[0] == int(refusal.status.code)
            assert call.details()
            return refusal
    raise AssertionError(f"a status without a reason: {call.code()} {call.details()}")


def new_id() -> int:
    """Return a number for a lease, a reservation or a pin."""
    return 1 + secrets.randbelow((1 << 63) - 2)


def new_keys(count: int, key_bytes: int = 32) -> list[bytes]:
    """Return keys that this process has not made before: random bits, the same in each run."""
    numbers = itertools.islice(_numbers, count)
    return [hashlib.shake_256(b"%d" % number).digest(key_bytes) for number in numbers]


def say(daemon: Daemon, data: bytes) -> None:
    """Send bytes to the daemon and raise its refusal."""
    with RawLine(attach_path(daemon)) as line:
        line.send(data)
        raise line.refusal()


@dataclasses.dataclass(frozen=True)
class Seat:
    """One line of ``kvhearth sessions``."""

    session: int
    attached: bool


def seats(daemon: Daemon) -> list[Seat]:
    """Return the members of all groups."""
    found = daemon.operator().sessions().sessions
    return [Seat(one.session, one.state == "attached") for one in found]


def drop(daemon: Daemon, session: RawSession) -> None:
    """End a session without a goodbye and report its copies as done in a new hello: this process
    lives on, so nothing else would drain it.
    """
    number, boot_id = session.welcome["session"], session.boot_id
    session.close(bye=False)
    said = {"previous_session": number, "previous_boot": boot_id, "previous_drained": True}
    RawSession(daemon, **said).close()
    until(lambda: number not in [seat.session for seat in seats(daemon)], "it is drained")


def fat_contract(number: int, letter: str = "\U0001f525") -> dict[str, Any]:
    """Return a valid contract as long as its fields allow."""
    names = ("model", "revision", "layout", "model_dtype", "quantization")
    names += ("hash_algorithm", "hash_seed", "rope_digest")
    good = json.loads(raw_contract().to_json())
    return {**good, **dict.fromkeys(names, letter * 1024), "draft_model": str(number)}


@contextlib.contextmanager
def half_open(path: Path, count: int) -> Iterator[list[RawLine]]:
    """Yield connections that send nothing."""
    with contextlib.ExitStack() as lines:
        yield [lines.enter_context(RawLine(path)) for _ in range(count)]


def refusals(daemon: Daemon, reason: Reason) -> int:
    """Return how often the daemon has refused something for ``reason``."""
    return daemon.counters().get(f"refusals{{{reason}}}", 0)


@contextlib.contextmanager
def refused(daemon: Daemon, reason: Reason) -> Iterator[pytest.ExceptionInfo[KVHearthError]]:
    """Check that the block raises a refusal with this reason, which is counted once, and that the
    books balance.
    """
    before = refusals(daemon, reason)
    with pytest.raises(KVHearthError) as caught:
        yield caught
    assert caught.value.reason is reason, caught.value
    assert refusals(daemon, reason) == before + 1
    daemon.stats(check_books=True)


def goes_on(engine: Engine) -> None:
    """Check that a well-behaved engine stores new blocks and loads its own bytes."""
    keys = new_keys(4)
    assert len(engine.store(keys).bound) == 4
    seen = engine.check(keys)
    assert (seen.right, seen.bad) == (keys, []), seen


def end_well(daemon: Daemon) -> None:
    """Check that nothing is held any more, that no task and no call ended in a bug, and that the
    daemon exits with 0.
    """
    daemon.wait_quiet()
    counters = daemon.counters()
    assert not [name for name in counters if name.startswith("task_failures{")], daemon.log_tail()
    assert "refusals{internal}" not in counters, daemon.log_tail()
    assert daemon.terminate() == 0, daemon.log_tail()
    for sign in ("Traceback", "never retrieved"):
        assert sign not in daemon.log_text(), daemon.log_tail()


OTHER_UID = 65534
"""User id of another tenant, or of none."""
as_root = pytest.mark.skipif(os.getuid() != 0, reason="needs root to attach as another user")


@contextlib.contextmanager
def as_user(daemon: Daemon, uid: int = OTHER_UID) -> Iterator[None]:
    """Connect as another user within the block: the kernel tells the daemon the effective one."""
    # Access to the socket is controlled by its directory.
    daemon.folder.chmod(0o755)
    daemon.socket_dir.chmod(0o755)
    os.seteuid(uid)
    try:
        yield
    finally:
        os.seteuid(0)
