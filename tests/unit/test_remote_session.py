"""Life lines to a gateway: redirections, refusals, resumption, TLS."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.certificates import Authority
from support.scripted_clock import ScriptedClock

from kvhearth.clock import REAL_TIME, Clock
from kvhearth.errors import KVHearthError, Reason
from kvhearth.session.link import RemoteSession, attach
from kvhearth.transports.tcp import Dialer
from kvhearth.url import RemoteUrl
from kvhearth.version import PROTOCOL_VERSION
from kvhearth.wire.handshake import FrameDecoder, Hello, Welcome, encode_frame, refused
from kvhearth.wire.remote import PREFACE, GatewayTerms, Purpose, purpose_of
from kvhearth_lab.harness import HUNG_S

WELCOME = Welcome("boot", 7, "token-of-7", 1, "00", 0, 4, 16, 1 << 20, 4)
HELLO = Hello(PROTOCOL_VERSION, "e1", "{}", map_arena=False)
Talk = Callable[["Peer"], None]


class Peer:
    """A connection at the scripted gateway's end."""

    def __init__(self, stream: socket.socket) -> None:
        self.stream = stream
        self._decoder = FrameDecoder()
        self._heard: list[dict[str, Any]] = []

    def hear(self) -> dict[str, Any]:
        """Return the next message."""
        while not self._heard:
            data = self.stream.recv(1 << 16)
            if not data:
                raise ConnectionResetError
            self._heard += self._decoder.feed(data)
        return self._heard.pop(0)

    def say(self, message: dict[str, Any]) -> None:
        """Send a message."""
        self.stream.sendall(encode_frame(message))

    def terms(self, resume_s: float = HUNG_S) -> None:
        """Send terms."""
        self.say(GatewayTerms(1 << 20, 4, 8, resume_s, 5.0).to_message())

    def wait_end(self) -> None:
        """Wait until the client closes."""
        with contextlib.suppress(OSError):
            while self.stream.recv(1 << 16):
                pass


class Script:
    """A gateway that runs one function after another, one a connection; then it refuses them."""

    def __init__(self, *talks: Talk, tls: ssl.SSLContext | None = None) -> None:
        self.errors: list[BaseException] = []
        self._tls = tls
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._run, args=(talks,), daemon=True)
        self._thread.start()

    def _run(self, talks: tuple[Talk, ...]) -> None:
        for index, talk in enumerate(talks):
            stream, _ = self._listener.accept()
            if index == len(talks) - 1:
                self._listener.close()
            try:
                if self._tls is not None:
                    stream = self._tls.wrap_socket(stream, server_side=True)
                with stream:
                    stream.settimeout(HUNG_S)
                    first = stream.recv(PREFACE.size, 0)
                    assert purpose_of(first) is Purpose.LIFE_LINE
                    talk(Peer(stream))
            except OSError:
                continue
            except BaseException as error:  # noqa: BLE001 - raised again by `end`
                self.errors.append(error)

    def end(self) -> None:
        """Wait for the script's end, and raise what failed in it."""
        self._thread.join(HUNG_S)
        assert not self._thread.is_alive()
        assert self.errors == []


def welcoming(peer: Peer) -> None:
    """Attach a client, and wait until it goes."""
    assert peer.hear() == {"kind": "identify", "secret": "", "resume": ""}
    assert peer.hear() == HELLO.to_message()
    peer.terms()
    peer.say(WELCOME.to_message())
    peer.wait_end()


def dropping(resume_s: float = HUNG_S) -> Talk:
    """Return a script that attaches a client, then breaks its life line."""

    def talk(peer: Peer) -> None:
        peer.hear(), peer.hear()
        peer.terms(resume_s=resume_s)
        peer.say(WELCOME.to_message())

    return talk


def saying(message: dict[str, Any]) -> Talk:
    """Return a script that says one thing and goes."""
    return lambda peer: peer.say(message)


def resuming(peer: Peer) -> None:
    """Resume the session."""
    assert peer.hear()["resume"] == "token-of-7"
    peer.say({"kind": "resumed"})
    peer.wait_end()


def attached(script: Script, clock: Clock = REAL_TIME, **options: Any) -> RemoteSession:
    """Attach to a scripted gateway."""
    session = attach(RemoteUrl("127.0.0.1", script.port, **options), HELLO, clock)
    assert isinstance(session, RemoteSession)
    return session


def refusal_of(script: Script, **options: Any) -> KVHearthError:
    with pytest.raises(KVHearthError) as caught:
        attached(script, **options)
    return caught.value


def test_attach_and_goodbye() -> None:
    heard: list[Any] = []

    def talk(peer: Peer) -> None:
        peer.hear(), peer.hear()
        peer.terms()
        peer.say(WELCOME.to_message())
        heard.append(peer.hear())

    script = Script(talk)
    session = attached(script)
    assert session.welcome == WELCOME
    assert session.alive()
    session.goodbye()
    assert not session.alive()
    script.end()
    assert heard == [{"kind": "bye"}]


def test_other_answers() -> None:
    cases: list[tuple[Talk, Reason]] = [
        (saying(refused(KVHearthError(each, "no"))), each)
        for each in (Reason.PEER_NOT_ALLOWED, Reason.TOO_MANY_SESSIONS)
    ]
    wrong = (WELCOME.to_message(), {"kind": "gateway", "resume_s": 1}, {})
    cases += [(saying(message), Reason.BAD_MESSAGE) for message in wrong]
    cases.append((lambda peer: None, Reason.DAEMON_AWAY))
    found = [refusal_of(Script(talk)).reason for talk, _ in cases]
    assert found == [reason for _, reason in cases]


def test_nobody_answers() -> None:
    script = Script(Peer.wait_end)
    assert refusal_of(script, attach_ms=50).reason is Reason.DEADLINE
    script.end()
    assert refusal_of(script).reason is Reason.DAEMON_AWAY


def test_the_secret_goes_to_the_gateway_and_into_no_message(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("hunter2")
    heard: list[Any] = []

    def talk(peer: Peer) -> None:
        heard.append(peer.hear()["secret"])
        peer.say(refused(KVHearthError(Reason.PEER_NOT_ALLOWED, "unknown token")))

    error = refusal_of(Script(talk), token_file=str(tmp_path / "token"))
    assert heard == ["hunter2"]
    assert "hunter2" not in str(error)


def test_a_broken_life_line_is_resumed() -> None:
    script = Script(dropping(), dropping_resumed, resuming)
    session = attached(script)
    for _ in range(2):
        assert readable(session, HUNG_S)
        assert session.alive()
        session.mend()
        assert session.alive()
    assert not readable(session)
    session.goodbye()
    script.end()


def dropping_resumed(peer: Peer) -> None:
    """Resume the session, then break the life line again."""
    assert peer.hear()["resume"] == "token-of-7"
    peer.say({"kind": "resumed"})


def readable(session: RemoteSession, wait_s: float = 0.0) -> bool:
    """Whether the life line has something to read, as after its end; waits for that."""
    events = session._events
    return events is not None and bool(events.poll(wait_s * 1000))


def test_a_refused_resumption_ends_the_session() -> None:
    gone = refused(KVHearthError(Reason.UNKNOWN_TOKEN, "no session has this token"))
    script = Script(dropping(), saying(gone))
    session = attached(script)
    retired: list[int] = []
    session.on_retired = lambda: retired.append(1)
    assert readable(session, HUNG_S)
    session.mend()
    assert not session.alive()
    assert retired
    session.close()
    script.end()


def test_a_gateway_that_is_gone_ends_the_session() -> None:
    script = Script(dropping())
    session = attached(script)
    assert readable(session, HUNG_S)
    script.end()
    session.mend()
    assert not session.alive()
    session.close()


def test_a_resumption_that_fails_is_tried_until_its_time_is_over(clock: ScriptedClock) -> None:
    script = Script(dropping(5.0), lambda peer: None, lambda peer: None)
    session = attached(script, clock)
    assert readable(session, HUNG_S)
    session.mend()
    clock.pass_time(4.9)
    session.mend()
    assert session.alive()
    clock.pass_time(0.2)
    assert not session.alive()
    session.close()
    script.end()


# -- TLS -------------------------------------------------------------------------------------------


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture
def context(authority: Authority) -> ssl.SSLContext:
    made = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    made.load_cert_chain(*authority.issue("gateway"))
    return made


def test_a_life_line_over_tls(authority: Authority, context: ssl.SSLContext) -> None:
    script = Script(dropping(), resuming, tls=context)
    session = attached(script, tls=True, ca=str(authority.path))
    assert readable(session, HUNG_S)
    session.mend()
    assert session.alive()
    assert not readable(session)
    session.goodbye()
    script.end()


def test_tickets_of_tls_do_not_end_a_life_line(
    authority: Authority, context: ssl.SSLContext
) -> None:
    """The server sends them at the end of its handshake, before anything is said."""
    url = RemoteUrl("127.0.0.1", 1)  # nobody listens there: a line that is resumed is lost
    client = ssl.create_default_context(cafile=str(authority.path))
    client.check_hostname = False
    ours, theirs = socket.socketpair()
    with ThreadPoolExecutor(1) as threads:
        accepted = threads.submit(context.wrap_socket, theirs, server_side=True)
        line = client.wrap_socket(ours)
        server = accepted.result(HUNG_S)
    line.setblocking(False)
    terms = GatewayTerms(1 << 20, 4, 8, HUNG_S, 5.0)
    session = RemoteSession(WELCOME, line, url, terms, Dialer(url), REAL_TIME)
    assert readable(session)
    session.mend()
    assert session.alive()
    assert not readable(session)
    server.close()
    session.mend()
    assert not session.alive()
    session.close()


def test_a_certificate_that_is_not_trusted(tmp_path: Path, context: ssl.SSLContext) -> None:
    foreign = Authority(tmp_path, "foreign")
    script = Script(welcoming, tls=context)
    error = refusal_of(script, tls=True, ca=str(foreign.path))
    assert error.reason is Reason.PEER_NOT_ALLOWED
    assert "ca=" in error.message
    script.end()


def test_a_client_without_tls_and_one_with_it_at_a_plain_gateway(
    authority: Authority, context: ssl.SSLContext
) -> None:
    assert refusal_of(Script(welcoming, tls=context)).reason is Reason.DAEMON_AWAY
    plain = Script(welcoming)
    refusal_of(plain, tls=True, ca=str(authority.path), attach_ms=500)
