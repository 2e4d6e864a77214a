"""HTTP on an address that others reach: TLS and a token for everything but the probes; roles."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.certificates import Authority
from support.daemon import Daemon, running_daemon, stopped_daemon, until
from support.http_door import ANY_PORT, address_of, ask

from kvhearth_lab.harness import HUNG_S
from kvhearth_server.gateway.tokens import Identity, Role, add_token, new_token

TOKENS = {role: new_token() for role in Role}
READ = new_token()


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def tokens_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokens") / "tokens.yaml"
    for role, token in TOKENS.items():
        add_token(path, Identity(f"my-{role}", "default", role), token)
    return path


@pytest.fixture(scope="module")
def guarded(authority: Authority, tokens_file: Path) -> Iterator[Daemon]:
    """A daemon whose HTTP others reach."""
    cert, key = authority.issue("localhost")
    read = tokens_file.with_name("read.token")
    read.touch(mode=0o600)
    read.write_text(READ)
    files = {"tls_cert": cert, "tls_key": key, "tokens_file": tokens_file, "read_token_file": read}
    with running_daemon(arena=False, http="0.0.0.0:0", **files) as daemon:
        yield daemon


def get(daemon: Daemon, ca: Path, path: str, token: str = "") -> tuple[int, str]:
    """Ask over TLS."""
    _, port = address_of(daemon)
    context = ssl.create_default_context(cafile=str(ca))
    connection = http.client.HTTPSConnection("localhost", port, timeout=HUNG_S, context=context)
    try:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        connection.request("GET", path, headers=headers)
        response = connection.getresponse()
        return response.status, response.read().decode()
    finally:
        connection.close()


SUMS = ("/metrics", "/version", "/v1/stats", "/v1/guide")
ALLOWED = {
    "": [],
    TOKENS[Role.ENGINE]: [],
    "x" * 43: [],
    READ: [*SUMS, "/v1/sessions"],
    TOKENS[Role.OPERATOR]: [*SUMS, "/v1/sessions", "/v1/config"],
}


def test_roles_over_https(guarded: Daemon, authority: Authority) -> None:
    for token, allowed in ALLOWED.items():
        for path in ("/livez", "/readyz", "/", "/docs"):
            assert get(guarded, authority.path, path, token)[0] == 200
        assert "memory of" not in get(guarded, authority.path, "/readyz?verbose=1", token)[1]
        for path in (*SUMS, "/v1/sessions", "/v1/config"):
            status, body = get(guarded, authority.path, path, token)
            assert status == (200 if path in allowed else 403), path
            assert not token or token not in body
        if not allowed:
            assert get(guarded, authority.path, "/v1/events", token)[0] == 403


def test_plain_http_is_no_way_in(guarded: Daemon) -> None:
    with (
        socket.create_connection(("127.0.0.1", address_of(guarded)[1]), timeout=HUNG_S) as line,
        line.makefile("rb") as answer,
    ):
        line.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b"200" not in answer.read()


def test_half_open_handshakes_do_not_shut_the_door(guarded: Daemon, authority: Authority) -> None:
    lines = [
        socket.create_connection(("127.0.0.1", address_of(guarded)[1]), timeout=HUNG_S)
        for _ in range(100)
    ]
    assert get(guarded, authority.path, "/livez")[0] == 200
    for line in lines:
        line.close()


def test_an_address_that_others_reach_needs_both(authority: Authority, tokens_file: Path) -> None:
    cert, key = authority.issue("localhost", file="again")
    for files in ({"tls_cert": cert, "tls_key": key}, {"tokens_file": tokens_file}):
        with stopped_daemon(arena=False, command=True, http="0.0.0.0:0", **files) as daemon:
            assert daemon.launch().wait(HUNG_S) == 2
            assert "tls_cert, tls_key and tokens_file, or say http_insecure" in daemon.log_text()


def test_loopback_stays_open_and_knows_operators(tokens_file: Path) -> None:
    """Sums need no token there; an operator's does what admin.token does, and is in the log."""
    with running_daemon(arena=False, http=ANY_PORT, tokens_file=tokens_file) as daemon:
        for path in (*SUMS, "/livez", "/readyz"):
            assert ask(daemon, path).status == 200
        bearer = {role: {"Authorization": f"Bearer {token}"} for role, token in TOKENS.items()}
        assert ask(daemon, "/v1/sessions", **bearer[Role.ENGINE]).status == 403
        assert ask(daemon, "/v1/sessions", **bearer[Role.OPERATOR]).status == 200
        assert daemon.stats().boot_id  # the unix socket needs no token
        new = new_token()
        add_token(tokens_file, Identity("late", "default", Role.OPERATOR), new)
        os.kill(daemon.pid, signal.SIGHUP)
        late = {"Authorization": f"Bearer {new}"}
        until(lambda: ask(daemon, "/v1/sessions", **late).status == 200, "the new token is known")
        assert ask(daemon, "/v1/admin:drain", "POST", **late).status == 200
        (line,) = [json.loads(each) for each in daemon.own_lines() if "admin.drain" in each]
        assert line["identity"] == "late"
        assert new not in daemon.log_text()
        assert TOKENS[Role.OPERATOR] not in daemon.log_text()
