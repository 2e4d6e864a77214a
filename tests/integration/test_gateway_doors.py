"""The gateway's guarded door: TLS, tokens, certificates and roles, by raw sockets."""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import signal
import socket
import ssl
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from support.certificates import Authority
from support.daemon import Daemon, running_daemon, until
from support.remote_raw import (
    PAGE_BYTES,
    RawSession,
    close_all,
    connect,
    hello_of,
    keys_of,
    refusal_of,
)

from kvhearth.errors import KVHearthError
from kvhearth.wire import frames
from kvhearth.wire.remote import DataFrame, DataKind, Outcome
from kvhearth_server.gateway.tokens import Bounds, Identity, Role, add_token

TOKENS = {name: f"kvh_{name}_" + name * 40 for name in ("a", "b", "small")}


@dataclass
class Guarded:
    """A daemon whose gateway wants TLS and a token."""

    daemon: Daemon
    port: int
    authority: Authority
    tokens: Path
    numbers: Iterator[int] = field(default_factory=itertools.count)

    def context(self, **files: tuple[Path, Path]) -> ssl.SSLContext:
        """Return a client's context, with a certificate of its own if one is given."""
        context = ssl.create_default_context(cafile=str(self.authority.path))
        if "shown" in files:
            context.load_cert_chain(*files["shown"])
        return context

    def session(self, name: str, **fields: object) -> RawSession:
        """Return the session of a token, by default as another engine than all before."""
        hello = hello_of(**{"engine_id": f"engine-{next(self.numbers)}", **fields})
        return RawSession(self.port, hello, secret=TOKENS[name], tls=self.context())


def said(connection: socket.socket) -> bytes:
    """Return all that the peer says until it closes the connection."""
    found = b""
    with contextlib.suppress(ConnectionError):
        while more := connection.recv(4096):
            found += more
    return found


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    folder = tmp_path_factory.mktemp("doors")
    authority = Authority(folder)
    cert, key = authority.issue("gateway")
    tokens = folder / "tokens.yaml"
    for identity in (
        Identity("a", "a"),
        Identity("b", "b"),
        Identity("small", "a", Role.ENGINE, Bounds(sessions=1, connections=4, held_blocks=2)),
    ):
        add_token(tokens, identity, TOKENS[identity.name])
    with running_daemon(
        listen="127.0.0.1:0",
        tenants=["a=:8MiB", "b=:8MiB"],
        tls_cert=cert,
        tls_key=key,
        tokens_file=tokens,
    ) as daemon:
        until(lambda: daemon.events("gateway.serving"), "the gateway serves")
        port = int(str(daemon.events("gateway.serving")[0]["port"]))
        yield Guarded(daemon, port, authority, tokens)
        text = daemon.log_text()
    assert "Traceback" not in text
    assert not any(token in text for token in TOKENS.values())


@pytest.fixture(autouse=True)
def _no_connection_stays() -> Iterator[None]:
    yield
    close_all()


def test_blocks_travel_encrypted(guarded: Guarded) -> None:
    far = guarded.session("a")
    keys = keys_of(20)
    payload = far.store(keys)
    _, extents = far.look_up(keys)
    before, found, after = far.get(extents)
    assert set(before + after) == {Outcome.OK}
    assert found == payload
    bad = far.reserve(1)
    bad["flags"] = 1
    assert far.put(bad, bytes(PAGE_BYTES)) == [Outcome.CHECKSUM_MISMATCH]
    far.bye()
    guarded.daemon.wait_quiet()
    (line, *_) = guarded.daemon.events("engine.attached")
    assert (line["tenant"], line["identity"]) == ("a", "a")


def test_the_identity_decides_the_tenant(guarded: Guarded) -> None:
    of_a, of_b = guarded.session("a", tenant="b"), guarded.session("b", engine_id="other")
    keys = keys_of(1)
    of_a.store(keys)
    assert len(of_a.look_up(keys)[1]) == 1
    _, extents = of_b.look_up(keys)
    assert len(extents) == 0
    _, of_the_other = of_a.look_up(keys)
    assert of_b.get(of_the_other)[0] == [Outcome.FOREIGN_EXTENT]
    of_a.bye()
    of_b.bye()


def test_strangers_are_refused(guarded: Guarded) -> None:
    def attach(secret: str) -> RawSession:
        return RawSession(guarded.port, secret=secret, tls=guarded.context())

    assert refusal_of(lambda: attach("")) == "peer_not_allowed"
    assert refusal_of(lambda: attach("kvh_wrong")) == "peer_not_allowed"
    session = guarded.session("a")
    with pytest.raises(KVHearthError) as refused:
        RawSession(
            guarded.port,
            secret=TOKENS["b"],
            resume=session.welcome.token,
            tls=guarded.context(),
        )
    assert str(refused.value.reason) == "unknown_token", "another identity's session"
    session.bye()


def test_plain_tcp_gets_nothing(guarded: Guarded) -> None:
    with connect(guarded.port) as plain:
        plain.sendall(b"KVHG\1\0\1\0" + bytes(64))
        assert b"KVHG" not in said(plain)
    with connect(guarded.port) as slow:
        slow.sendall(b"\x16\x03\x01\x02")  # the beginning of a handshake that never ends
        said(slow)


def test_an_identity_has_bounds(guarded: Guarded) -> None:
    small = guarded.session("small")
    second = lambda: guarded.session("small", engine_id="second")  # noqa: E731
    assert refusal_of(second) == "too_many_sessions"
    data = small.open_data(small.welcome.token)
    for each in (small.data, data):  # their opening is not answered; a get of nothing is
        each.sendall(DataFrame(DataKind.GET, 0, 5, 0).pack())
        assert [small.answer(each)[0] for _ in range(2)] == [DataKind.BYTES, DataKind.COPIED]
    third = lambda: small.open_calls(small.welcome.token)  # noqa: E731
    assert refusal_of(third) == "too_many_sessions"
    assert refusal_of(lambda: small.reserve(3)) == "held_cap"
    extents = small.reserve(2)
    assert refusal_of(lambda: small.reserve(1)) == "held_cap"
    small.abort(extents)
    assert len(small.reserve(1)) == 1
    data.close()
    small.bye()
    guarded.daemon.wait_quiet()
    until(lambda: guarded.daemon.counters().get("gateway_bounds_met{held_blocks}"), "counted")

    def back() -> bool:
        try:
            guarded.session("small").bye()
        except KVHearthError:
            return False  # the last session's connections end a moment after it
        return True

    until(back, "the connections are counted out")


def test_bodies_that_drip_in_hold_nobody_up(guarded: Guarded) -> None:
    """Each had a place, of which all identities together had 32."""
    slow, good = guarded.session("a"), guarded.session("b")
    header = frames.HEADER.pack(256 << 10, frames.METHODS["Commit"], 1)
    lines = [
        slow.calls,
        *(slow.open_calls(slow.welcome.token) for _ in range(slow.terms.calls_connections - 1)),
    ]
    for line in lines:
        line.sendall(header + bytes(10))
    assert len(good.look_up(keys_of(8000))[1]) == 0, "a call of 250 KiB is answered"
    assert select.select([lines[-1]], [], [], 0)[0] == [], "meanwhile: none has been ended"
    slow.bye()
    good.bye()


def test_parts_are_counted_before_a_body_is_parsed(guarded: Guarded) -> None:
    session = guarded.session("a")
    for name in ("Commit", "Release", "Lookup"):
        calls = session.open_calls(session.welcome.token)
        body = b"\x12\x00" * (64 << 10)
        calls.sendall(frames.HEADER.pack(len(body), frames.METHODS[name], 7) + body)
        _, status = session.reply(calls)
        refusal = frames.decode_status(status)
        assert str(refusal.reason) == "bad_group"
        assert "more than 64 groups" in refusal.message
        assert said(calls) == b"", "the connection ends"
    session.store(keys_of(1))
    session.bye()


def test_a_token_is_added_and_taken_away_while_connections_live(guarded: Guarded) -> None:
    session = guarded.session("a")
    old = guarded.tokens.read_text()
    TOKENS["new"] = "kvh_new_" + "n" * 40
    add_token(guarded.tokens, Identity("new", "b"), TOKENS["new"])
    assert refusal_of(lambda: guarded.session("new")) == "peer_not_allowed"
    os.kill(guarded.daemon.pid, signal.SIGHUP)

    def welcome() -> bool:
        try:
            guarded.session("new").bye()
        except KVHearthError:
            return False
        return True

    until(welcome, "the token is read")
    session.store(keys_of(1))
    guarded.tokens.write_text(old)
    os.kill(guarded.daemon.pid, signal.SIGHUP)
    until(lambda: not welcome(), "the token is gone")
    session.store(keys_of(1))
    session.bye()


def test_certificates_are_identities(tmp_path: Path) -> None:
    authority, foreign = Authority(tmp_path), Authority(tmp_path, "foreign")
    cert, key = authority.issue("gateway")
    with running_daemon(
        listen="127.0.0.1:0", tls_cert=cert, tls_key=key, client_ca=authority.path
    ) as daemon:
        until(lambda: daemon.events("gateway.serving"), "the gateway serves")
        port = int(str(daemon.events("gateway.serving")[0]["port"]))

        def attach(shown: tuple[Path, Path] | None) -> RawSession:
            context = ssl.create_default_context(cafile=str(authority.path))
            if shown is not None:
                context.load_cert_chain(*shown)
            return RawSession(port, tls=context)

        far = attach(authority.issue("rack7"))
        keys = keys_of(1)
        far.store(keys)
        far.bye()
        for shown in (
            None,
            foreign.issue("rack8"),
            authority.issue("rack9", days=-1),
        ):
            with pytest.raises((ssl.SSLError, OSError)):
                attach(shown)
        until(lambda: daemon.counters().get("gateway_refusals{peer_not_allowed}", 0) >= 3, "counts")
        assert daemon.events("engine.attached")[0]["identity"] == "rack7"
