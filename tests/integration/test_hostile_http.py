"""Floods of HTTP requests beside a good engine, and who may read the lists of all tenants."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.daemon import Daemon, stopped_daemon
from support.http_door import ANY_PORT, address_of, ask
from support.raw_door import end_well, goes_on

from kvhearth_lab.harness.engine import Engine
from kvhearth_server.config.rlimit import HTTP_MAX

READ_TOKEN = "a-token-of-monitoring"
LISTS = ("sessions", "namespaces", "leases")
ANSWER_S = 20.0
HALF = (
    b"POST /v1/admin:drain HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\n"
    b"Expect: 100-continue\r\n\r\n"
)
REQUEST = b"GET %b HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.fixture(scope="module")
def token_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("token") / "read.token"
    path.write_text(f"{READ_TOKEN}\n")
    path.chmod(0o600)
    return path


@pytest.fixture(scope="module")
def daemon(token_file: Path) -> Iterator[Daemon]:
    with stopped_daemon(arena=False, http=ANY_PORT, read_token_file=token_file) as daemon:
        daemon.fresh_s = 1.0
        daemon.start()
        yield daemon
        end_well(daemon)


class Flood:
    """Many connections that each have one request under way."""

    def __init__(self, daemon: Daemon, path: bytes, count: int) -> None:
        self._stack = contextlib.ExitStack()
        self.lines = [
            self._stack.enter_context(
                socket.create_connection(address_of(daemon), timeout=ANSWER_S)
            )
            for _ in range(count)
        ]
        self._request = REQUEST % path

    def __enter__(self) -> Flood:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def ask(self) -> None:
        """Send one request on every connection."""
        for line in self.lines:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                line.sendall(self._request)

    def answers(self) -> list[tuple[int, bytes]]:
        """Return status and body of each answer; 0 for a connection that was closed without one."""
        return [_answer(line) for line in self.lines]


def _answer(line: socket.socket) -> tuple[int, bytes]:
    try:
        with line.makefile("rb") as file:
            status = file.readline().split()
            if not status:
                return 0, b""
            headers = dict(one.split(b": ", 1) for one in iter(file.readline, b"\r\n") if one)
            body = file.read(int(headers.get(b"content-length", b"0")))
    except (ConnectionResetError, ValueError):
        return 0, b""
    return int(status[1]), body


# -- floods ------------------------------------------------------------------------------------


def test_a_flood_of_scrapes_shares_renderings(daemon: Daemon, neighbour: Engine) -> None:
    rounds, started = 4, time.monotonic()
    bodies = set()
    with Flood(daemon, b"/metrics", 100) as flood:
        for _ in range(rounds):
            flood.ask()
            goes_on(neighbour)
            found = flood.answers()
            assert {status for status, _ in found} == {200}
            bodies |= {body for _, body in found}
    assert len(bodies) <= time.monotonic() - started + 1


def test_a_new_connection_takes_the_place_of_an_idle_one(daemon: Daemon) -> None:
    with contextlib.ExitStack() as stack:
        for sent in (b"", b"GET /metr", REQUEST % b"/livez"):
            for _ in range(HTTP_MAX):
                line = socket.create_connection(address_of(daemon), timeout=ANSWER_S)
                stack.enter_context(line)
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    line.sendall(sent)
            assert ask(daemon, "/livez").status == 200
        assert daemon.stats().boot_id  # operators have places of their own
    assert daemon.counters()["connections_refused{http}"] > 0


def test_half_a_request_ends(daemon: Daemon) -> None:
    with socket.create_connection(address_of(daemon), timeout=ANSWER_S) as line:
        line.sendall(HALF)
        assert line.recv(4096).startswith(b"HTTP/1.1 100")
        assert _answer(line)[0] == 408


def test_pipelined_requests_are_answered(daemon: Daemon, neighbour: Engine) -> None:
    count = 200
    with socket.create_connection(address_of(daemon), timeout=ANSWER_S) as line:
        line.sendall(REQUEST % b"/version" * count)
        assert ask(daemon, "/livez").status == 200
        goes_on(neighbour)
        with line.makefile("rb") as file:
            for _ in range(count):
                assert file.readline().split()[1] == b"200"
                headers = dict(one.split(b": ", 1) for one in iter(file.readline, b"\r\n"))
                file.read(int(headers[b"content-length"]))


# -- who may read ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LISTS)
def test_lists_need_a_token(daemon: Daemon, neighbour: Engine, name: str) -> None:
    assert neighbour.wait_ready()
    path = f"/v1/{name}"
    for given in ("", "Bearer", "Bearer wrong", f"Bearer {READ_TOKEN}x", "Bearer \xe9"):
        before = daemon.counters().get("refusals{not_admin}", 0)
        answer = ask(daemon, path, **({"Authorization": given} if given else {}))
        assert (answer.status, answer.json["reason"]) == (403, "not_admin")
        assert b"neighbour" not in answer.body
        assert daemon.counters()["refusals{not_admin}"] == before + 1
    reader = ask(daemon, path, Authorization=f"Bearer {READ_TOKEN}")
    assert (reader.status, reader.json.keys()) == (200, ask(daemon, path, admin=True).json.keys())


def test_the_read_token_only_reads(daemon: Daemon) -> None:
    for method, path in (("GET", "/v1/config"), ("POST", "/v1/admin:drain")):
        answer = ask(daemon, path, method, Authorization=f"Bearer {READ_TOKEN}")
        assert (answer.status, answer.json["reason"]) == (403, "not_admin")
    assert ask(daemon, "/readyz").status == 200


def test_without_a_token_no_process_and_no_whole_namespace_is_named(
    daemon: Daemon, neighbour: Engine
) -> None:
    assert neighbour.wait_ready()
    (session,) = [
        one
        for one in ask(daemon, "/v1/sessions", admin=True).json["sessions"]
        if one["engine_id"] == "neighbour"
    ]
    for path in ("/metrics", "/v1/stats", "/readyz?verbose", "/version", "/livez"):
        assert session["namespace"].encode() not in ask(daemon, path).body, path
    for path in ("/readyz?verbose", "/version", "/livez"):
        assert b"neighbour" not in ask(daemon, path).body, path
    told = json.dumps(ask(daemon, "/v1/stats").json)
    assert not {"pid", "uid", "contract", "identity"} & set(re.findall(r'"(\w+)":', told))


@pytest.mark.parametrize(
    ("text", "mode", "message"),
    [
        ("short", 0o600, "characters"),
        ("x" * 2000, 0o600, "characters"),
        ("two lines of text\nand more of it", 0o600, "characters"),
        (READ_TOKEN, 0o666, "lets others write"),
        (None, 0o600, "No such file"),
    ],
)
def test_a_bad_token_file(tmp_path: Path, text: str | None, mode: int, message: str) -> None:
    path = tmp_path / "read.token"
    if text is not None:
        path.write_text(text)
        path.chmod(mode)
    with stopped_daemon(arena=False, command=True, http=ANY_PORT, read_token_file=path) as daemon:
        assert daemon.launch().wait(30) == 2
        assert "read_token_file" in daemon.log_text()
        assert message in daemon.log_text()
