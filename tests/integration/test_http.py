"""HTTP of a real daemon: probes, scrapes, state, actions, and answers to bad requests."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.daemon import Daemon, running_daemon, stopped_daemon, until
from support.http_door import ANY_PORT, Answer, Scrape, address_of, ask
from support.raw_door import PAGE_BYTES, end_well, goes_on, new_keys

from kvhearth.errors import KVHearthError
from kvhearth_lab.harness import HUNG_S
from kvhearth_lab.harness.engine import Engine, contract_of, engine_of
from kvhearth_server.config.model import Settings
from kvhearth_server.config.rlimit import HTTP_MAX
from kvhearth_server.preflight import read_token
from kvhearth_server.transport.web.bounds import BODY_BYTES_MAX
from kvhearth_server.transport.web.page import VIEWERS_MAX

PAGE_BYTES_MAX = 80 << 10
UNKNOWN = "a" * 64


def problem(answer: Answer, status: int, reason: str) -> str:
    """Returns a rejection's detail; fails unless the answer is a rejection of this kind."""
    assert answer.status == status, answer
    assert answer.headers["content-type"] == "application/problem+json"
    found = answer.json
    assert (found["status"], found["reason"]) == (status, reason)
    assert found["type"] == f"urn:kvhearth:reason:{reason}"
    assert found["title"]
    return str(found["detail"])


GET = b"GET %b HTTP/1.1\r\nHost: localhost\r\n\r\n"
READ_TOKEN = "a-token-of-monitoring"


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    path = tmp_path_factory.mktemp("token") / "read.token"
    path.touch(mode=0o600)
    path.write_text(f"{READ_TOKEN}\n")
    with running_daemon(arena=False, http=ANY_PORT, read_token_file=path) as daemon:
        yield daemon
        end_well(daemon)


def opened(daemon: Daemon) -> socket.socket:
    """Open a connection to the daemon's HTTP server."""
    return socket.create_connection(address_of(daemon), timeout=HUNG_S)


# -- probes and state --------------------------------------------------------------------------


def test_probes(daemon: Daemon) -> None:
    for path in ("/livez", "/readyz", "/healthz"):
        assert (ask(daemon, path).status, ask(daemon, path).body) == (200, b"ok\n")
    first, second, memory, last = ask(daemon, "/readyz?verbose").body.splitlines()
    assert (first, second, last) == (b"[+]arena", b"[+]not-draining", b"ok")
    said = rb"\[i\]memory of default: 16777216 bytes on [\w-]+ pages, \d+ populated"
    assert re.fullmatch(said, memory)


def test_heads_without_bodies(daemon: Daemon) -> None:
    """Load balancers and `curl -I` send HEAD: the same headers as GET, not a rejection."""
    before = daemon.counters().get("refusals{bad_message}", 0)
    for path in ("/livez", "/readyz", "/version", "/openapi.json"):
        head, whole = ask(daemon, path, "HEAD"), ask(daemon, path)
        assert (head.status, head.body) == (200, b"")
        assert head.headers["content-length"] == str(len(whole.body))
    assert daemon.counters().get("refusals{bad_message}", 0) == before
    assert ask(daemon, "/v1/config", "HEAD").status == 403
    assert ask(daemon, "/v1/admin:drain", "HEAD", admin=True).status == 405


def test_version_and_stats(daemon: Daemon) -> None:
    boot_id = daemon.stats().boot_id
    assert ask(daemon, "/version").json["boot_id"] == boot_id
    found = ask(daemon, "/v1/stats").json
    assert (found["boot_id"], found["draining"]) == (boot_id, False)
    (segment,) = found["segments"]
    assert segment["capacity_bytes"] == 16 << 20
    assert segment["page_kind"] == "4KiB"


def test_paths_that_are_not_there(daemon: Daemon) -> None:
    for path in ("/redoc", "/nothing", "/docs/"):
        problem(ask(daemon, path), 404, "no_such_path")


def test_state_of_a_working_engine(daemon: Daemon, neighbour: Engine) -> None:
    keys = new_keys(4)
    assert len(neighbour.store(keys).bound) == 4
    (session,) = ask(daemon, "/v1/sessions", admin=True).json["sessions"]
    assert (session["engine_id"], session["state"], session["pid"]) == (
        "neighbour",
        "attached",
        os.getpid(),
    )
    (space,) = ask(daemon, "/v1/namespaces", admin=True).json["namespaces"]
    assert space["namespace"] == session["namespace"]
    assert space["blocks"] >= 4
    assert space["contract"]["model"] == "m"
    seen = neighbour.client.lookup({0: keys})
    assert seen.lease is not None
    (holder,) = until(lambda: ask(daemon, "/v1/leases", admin=True).json["groups"], "it is told")
    assert (holder["engine_id"], holder["leases"], holder["slots"]) == ("neighbour", 1, 4)
    assert Scrape(daemon).of("leases") == 1
    until(lambda: Scrape(daemon).of("oldest_lease_seconds") > 0, "it grows old")
    neighbour.client.release(seen.lease)
    until(lambda: not ask(daemon, "/v1/leases", admin=True).json["groups"], "the lease ends")


# -- metrics -----------------------------------------------------------------------------------


def test_eviction_has_an_age(daemon: Daemon, neighbour: Engine) -> None:
    assert len(neighbour.store(new_keys(4)).bound) == 4
    space = ask(daemon, "/v1/namespaces", admin=True).json["namespaces"][0]["namespace"]
    before = Scrape(daemon)
    answer = ask(daemon, f"/v1/namespaces/{space}:evict", "POST", admin=True)
    evicted = answer.json["evicted_blocks"]
    assert evicted >= 4
    after = Scrape(daemon)
    for name in ("eviction_age_seconds_count", "evictions_total"):
        assert after.of(name) - before.of(name) == evicted
    assert after.of("evictions_total", reason="asked") >= evicted
    assert ask(daemon, "/debug/books", admin=True).json == {
        "boot_id": answer.json["boot_id"],
        "balanced": True,
        "error": "",
    }


# -- actions -----------------------------------------------------------------------------------

ADMIN = (
    ("GET", "/v1/config"),
    ("GET", "/v1/sessions"),
    ("GET", "/v1/namespaces"),
    ("GET", "/v1/leases"),
    ("GET", "/debug/books"),
    ("GET", "/debug/stacks"),
    ("POST", "/v1/admin:drain"),
    ("POST", f"/v1/namespaces/{UNKNOWN}:evict"),
    ("POST", f"/v1/namespaces/{UNKNOWN}:bump-epoch"),
)


def test_actions_and_lists_need_a_token(daemon: Daemon, neighbour: Engine) -> None:
    assert neighbour.wait_ready()
    wrong = ("", "Bearer", "Bearer wrong", f"Bearer {READ_TOKEN}x", "Basic eDp5", "Bearer \xe9")
    before = daemon.counters().get("refusals{not_admin}", 0)
    for method, path in ADMIN:
        for given in wrong:
            answer = ask(daemon, path, method, **({"Authorization": given} if given else {}))
            assert "admin.token" in problem(answer, 403, "not_admin")
            assert b"neighbour" not in answer.body
    assert daemon.counters()["refusals{not_admin}"] == before + len(ADMIN) * len(wrong)
    assert ask(daemon, "/readyz").status == 200


def test_the_read_token_only_reads(daemon: Daemon) -> None:
    reader = {"Authorization": f"Bearer {READ_TOKEN}"}
    for name in ("sessions", "namespaces", "leases"):
        path = f"/v1/{name}"
        found = ask(daemon, path, **reader)
        assert (found.status, found.json.keys()) == (200, ask(daemon, path, admin=True).json.keys())
    for method, path in (("GET", "/v1/config"), ("POST", "/v1/admin:drain")):
        problem(ask(daemon, path, method, **reader), 403, "not_admin")
    assert ask(daemon, "/readyz").status == 200


def test_without_a_token_no_process_and_no_whole_namespace_is_named(
    daemon: Daemon, neighbour: Engine
) -> None:
    assert neighbour.wait_ready()
    (session,) = ask(daemon, "/v1/sessions", admin=True).json["sessions"]
    for path in ("/metrics", "/v1/stats", "/readyz?verbose", "/version", "/livez"):
        assert session["namespace"].encode() not in ask(daemon, path).body, path
    for path in ("/readyz?verbose", "/version", "/livez"):
        assert b"neighbour" not in ask(daemon, path).body, path
    told = json.dumps(ask(daemon, "/v1/stats").json)
    assert not {"pid", "uid", "contract", "identity"} & set(re.findall(r'"(\w+)":', told))


def test_bad_token_files(tmp_path: Path) -> None:
    for number, (text, mode, message) in enumerate(
        (
            ("short", 0o600, "characters"),
            ("x" * 2000, 0o600, "characters"),
            ("two lines of text\nand more of it", 0o600, "characters"),
            (READ_TOKEN, 0o666, "lets others write"),
            (None, 0o600, "No such file"),
        )
    ):
        path = tmp_path / str(number)
        if text is not None:
            path.write_text(text)
            path.chmod(mode)
        with pytest.raises(KVHearthError, match=message) as caught:
            read_token(Settings(read_token_file=path))
        assert "read_token_file" in caught.value.message


def test_config_and_stacks(daemon: Daemon) -> None:
    found = ask(daemon, "/v1/config", admin=True).json["settings"]
    assert (found["http"], found["memory"]) == (ANY_PORT, 16 << 20)
    assert b"task http" in ask(daemon, "/debug/stacks", admin=True).body


def test_bump_epoch(daemon: Daemon) -> None:
    contract = contract_of(PAGE_BYTES, model="bumped")
    with engine_of(daemon.url(), contract, "old") as engine:
        assert engine.wait_ready()
        spaces = ask(daemon, "/v1/namespaces", admin=True).json["namespaces"]
        (space,) = [one for one in spaces if one["contract"]["model"] == "bumped"]
        path = f"/v1/namespaces/{space['namespace']}:bump-epoch"
        stale = json.dumps({"expected_epoch": space["epoch"] + 7}).encode()
        reported = problem(ask(daemon, path, "POST", stale, admin=True), 409, "stale_epoch")
        assert str(space["epoch"]) in reported
        right = json.dumps({"expected_epoch": space["epoch"]}).encode()
        assert ask(daemon, path, "POST", right, admin=True).json["epoch"] == space["epoch"] + 1
        assert ask(daemon, path, "POST", admin=True).json["epoch"] == space["epoch"] + 2
        bad = json.dumps({"label": "two\nlines"}).encode()
        problem(ask(daemon, path, "POST", bad, admin=True), 400, "bad_message")
        # The engine keeps its weights, and must not pass them off as the new ones.
        assert engine.client.lookup({0: new_keys(1)}).reason == "stale_epoch"
    with engine_of(daemon.url(), contract, "new") as engine:
        assert engine.wait_ready()
        goes_on(engine)


def test_unknown_namespace(daemon: Daemon) -> None:
    for action in ("evict", "bump-epoch"):
        path = f"/v1/namespaces/{UNKNOWN}:{action}"
        problem(ask(daemon, path, "POST", admin=True), 404, "unknown_namespace")


def test_drain() -> None:
    with running_daemon(arena=False, http=ANY_PORT) as daemon:
        assert ask(daemon, "/v1/admin:drain", "POST", admin=True).json["draining"]
        answer = ask(daemon, "/readyz")
        assert (answer.status, answer.body) == (503, b"[+]arena\n[-]not-draining\nnot ready\n")
        assert ask(daemon, "/livez").status == 200
        assert Scrape(daemon).of("ready") == 0
        assert daemon.terminate() == 0


# -- bad requests ------------------------------------------------------------------------------

BAD_BODIES = (b"{", b"[]", b"7", b'"x"', b'{"keep_bytes": -1}', b'{"keep_bytes": "x"}', b"\xff")
BAD_BODIES += (b'{"keep_bytes": 1e99}', b'{"nothing": 1}', b"[" * 60_000)


def test_bad_bodies(daemon: Daemon) -> None:
    before = daemon.counters().get("refusals{bad_message}", 0)
    for body in BAD_BODIES:
        answer = ask(daemon, f"/v1/namespaces/{UNKNOWN}:evict", "POST", body, admin=True)
        problem(answer, 400, "bad_message")
    assert daemon.counters()["refusals{bad_message}"] == before + len(BAD_BODIES)


SCORE = "/v1/prefixes:score"
COSTLY = {
    "objects": b'{"namespace":"%b","keys":[%b]}' % (b"0" * 64, b",".join([b"{}"] * 330_000)),
    "lists": b"[" + b",".join([b"[]"] * 300_000) + b"]",
    "depth": b"[" * 900_000,
    "numbers": b"[" + b"1," * 500_000 + b"1]",
    "fields": b"{" + b",".join(b'"%d":1' % i for i in range(30_000)) + b"}",
    "wrong keys": b'{"namespace":"%b","keys":[%b]}' % (b"0" * 64, b",".join([b"1"] * 30_000)),
    "wrong groups": b'{"namespace":"%b","keys":{%b}}'
    % (b"0" * 64, b",".join(b'"%d":1' % i for i in range(30_000))),
}


@pytest.mark.parametrize("name", COSTLY)
def test_what_is_wrong_with_a_body_is_told_once(daemon: Daemon, name: str) -> None:
    answer = ask(daemon, SCORE, "POST", COSTLY[name], admin=True)
    reported = problem(answer, 400, "bad_message")
    assert len(reported) < 500
    assert reported.count(";") < 2, "one error, however many are wrong"


def test_a_body_of_nobody_is_not_read(daemon: Daemon) -> None:
    """The refusal comes while the body is still to come, and also to who sends all of it first."""
    for path in (SCORE, f"/v1/namespaces/{UNKNOWN}:evict", "/v1/admin:drain"):
        with opened(daemon) as line:
            line.sendall(b"POST %b HTTP/1.1\r\nHost: localhost\r\n" % path.encode())
            line.sendall(b"Content-Length: 900000\r\n\r\n[")
            assert line.recv(4096).startswith(b"HTTP/1.1 403")
        problem(ask(daemon, path, "POST", COSTLY["depth"]), 403, "not_admin")
        closing = {"Connection": "close"}
        problem(ask(daemon, path, "POST", COSTLY["depth"], **closing), 403, "not_admin")


def authorized(daemon: Daemon, path: bytes) -> bytes:
    """Return the beginning of an operator's POST."""
    token = (daemon.socket_dir / "admin.token").read_bytes()
    head = b"POST %b HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return head % path + b"Authorization: Bearer %b\r\n" % token


def test_a_body_has_a_bound(daemon: Daemon) -> None:
    answer = ask(daemon, "/v1/admin:drain", "POST", b"x" * TOO_LONG, admin=True)
    assert str(BODY_BYTES_MAX) in problem(answer, 413, "bad_message")
    with opened(daemon) as line:
        line.sendall(authorized(daemon, b"/v1/admin:drain") + CHUNKS)
        for _ in range(BODY_BYTES_MAX // 0x4000 + 1):
            line.sendall(b"4000\r\n" + b"x" * 0x4000 + b"\r\n")
        assert line.recv(4096).startswith(b"HTTP/1.1 413")


def test_another_hosts_name(daemon: Daemon) -> None:
    for name in ("evil.example", "evil.example:9460", "127.0.0.1.evil.example"):
        problem(ask(daemon, "/v1/sessions", Host=name), 421, "bad_message")
    for name in ("localhost:1", "127.0.0.1", "[::1]:9460"):
        assert ask(daemon, "/livez", Host=name).status == 200


def test_no_http(daemon: Daemon) -> None:
    with opened(daemon) as line:
        line.sendall(b"\x16\x03\x01 this is no HTTP\r\n\r\n")
        assert line.recv(4096).startswith(b"HTTP/1.1 400")


TOO_LONG = BODY_BYTES_MAX + 1
HEADS = (
    b"Host: localhost\r\nTransfer-Encoding: chunked\r\n\r\nno chunk\r\n\r\n",
    b"Host: elsewhere\r\n\r\n",
    b"Host: localhost\r\nContent-Length: %d\r\n\r\n" % TOO_LONG + bytes(TOO_LONG),
    b"Host: localhost\r\nContent-Length: x\r\n\r\n",
)


def test_a_refused_head_is_no_failure(daemon: Daemon) -> None:
    """The answer to HEAD has no body: sending one raised, and each wrote a traceback."""
    for rest in HEADS:
        with opened(daemon) as line:
            line.sendall(b"HEAD /livez HTTP/1.1\r\n" + rest)
            answer = line.recv(1000)
            assert answer.startswith(b"HTTP/1.1 ") or not answer
    assert "Traceback" not in daemon.log_text()


@pytest.mark.parametrize("host", [b"localhost", b"elsewhere"])
def test_a_chunk_that_is_none_is_no_failure(daemon: Daemon, host: bytes) -> None:
    """Its request is refused beside it; each wrote a traceback of 40 lines."""
    refusals = lambda: daemon.counters().get("refusals{internal}", 0)  # noqa: E731
    before = refusals()
    request = b"POST /v1/admin:drain HTTP/1.1\r\nHost: %b\r\n" % host
    for chunk in (b"0;" + b"x" * 20_000, b"ffffffffff\r\n", b"5\r\nhello\r\n0\r\n\r\n["):
        for _ in range(20):
            with opened(daemon) as line:
                line.sendall(request + CHUNKS + chunk)
                line.recv(4096)
    until(lambda: "http.bad_bytes" in daemon.log_text(), "it is told")
    assert refusals() == before
    assert "Traceback" not in daemon.log_text()


def test_good_requests_before_a_bad_one_are_answered(daemon: Daemon, neighbour: Engine) -> None:
    with opened(daemon) as line, line.makefile("rb") as file:
        line.sendall(GET % b"/version" * 200 + b"what?\r\n\r\n" + GET % b"/version")
        goes_on(neighbour)
        found = re.findall(rb"HTTP/1\.1 (\d+)", file.read())
    assert found == [b"200"] * 200 + [b"400"]


SIZED, CHUNKS = b"Content-Length: 18\r\n\r\n", b"Transfer-Encoding: chunked\r\n\r\n"


def test_half_a_body_does_nothing(daemon: Daemon) -> None:
    """Without its body the action would evict everything that is not held."""
    with engine_of(daemon.url(), contract_of(PAGE_BYTES, model="halved"), "halved") as engine:
        keys = new_keys(4)
        assert engine.store(keys).bound == keys
        spaces = ask(daemon, "/v1/namespaces", admin=True).json["namespaces"]
        (space,) = [each for each in spaces if each["contract"]["model"] == "halved"]
        path = f"/v1/namespaces/{space['namespace']}:evict"
        for sent in (SIZED, SIZED + b'{"keep_bytes"', CHUNKS, CHUNKS + b"zz\r\n"):
            before = daemon.counters().get("refusals{bad_message}", 0)
            with opened(daemon) as line:
                line.sendall(authorized(daemon, path.encode()) + sent)
                line.shutdown(socket.SHUT_WR)
            told = lambda n=before: daemon.counters().get("refusals{bad_message}", 0) == n + 1  # noqa: E731
            until(told, "it is counted")
        assert engine.check(keys).right == keys
        assert ask(daemon, path, "POST", b"{}", admin=True).json["evicted_blocks"] == 4


# -- too many, too slow ------------------------------------------------------------------------


def test_a_new_connection_takes_the_place_of_an_idle_one(daemon: Daemon, neighbour: Engine) -> None:
    before = daemon.descriptor_count()
    with contextlib.ExitStack() as stack:
        body = authorized(daemon, SCORE.encode()) + b"Content-Length: 1000\r\n\r\n["
        refused = b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n["
        for sent in (b"", b"GET /metr", GET % b"/livez", body, refused):
            for _ in range(HTTP_MAX):
                line = stack.enter_context(opened(daemon))
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    line.sendall(sent)
            assert ask(daemon, "/livez").status == 200
            goes_on(neighbour)
        assert daemon.descriptor_count() <= before + HTTP_MAX + 20
        assert daemon.stats().boot_id  # operators have places of their own
    assert daemon.counters()["connections_refused{http}"] > 0


def test_scrapes_share_a_rendering() -> None:
    with stopped_daemon(arena=False, http=ANY_PORT) as daemon:
        daemon.fresh_s = 600
        daemon.start()
        assert len({ask(daemon, "/metrics").body for _ in range(3)}) == 1


SLOW = {
    "a head": (b"GET /livez HTTP/1.1\r\n", b"A: b\r\n"),
    "a second head": (GET % b"/livez" + b"GET", b"A"),
    "a body": (CHUNKS, b"1\r\nx\r\n"),
    "nothing": (b"", b""),
    "nothing more": (GET % b"/livez", b""),
}


@pytest.mark.slow
def test_slow_senders_are_ended(daemon: Daemon) -> None:
    answers: dict[str, bytes] = {}
    with contextlib.ExitStack() as stack:
        lines = {name: stack.enter_context(opened(daemon)) for name in SLOW}
        for name, line in lines.items():
            head = authorized(daemon, b"/v1/admin:drain") if name == "a body" else b""
            line.sendall(head + SLOW[name][0])
            line.settimeout(0.2)

        def ended() -> bool:
            for name, line in list(lines.items()):
                try:
                    line.sendall(SLOW[name][1])
                    more = line.recv(4096)
                except TimeoutError:
                    continue
                except ConnectionError:
                    more = b""
                answers[name] = answers.get(name, b"") + more
                if not more:
                    del lines[name]
            return not lines

        until(ended, "each is ended")
    assert answers["a body"].startswith(b"HTTP/1.1 408")


@pytest.mark.slow
def test_a_peer_that_reads_nothing_is_ended(daemon: Daemon) -> None:
    before = daemon.descriptor_count()
    with opened(daemon) as line:
        line.settimeout(1.0)
        with contextlib.suppress(TimeoutError, ConnectionResetError, BrokenPipeError):
            for _ in range(1000):
                line.sendall(GET % b"/openapi.json" * 100)
        until(lambda: daemon.descriptor_count() <= before, "it is ended")


# -- the page --------------------------------------------------------------------------------


def test_pages_are_small_and_run_nothing_else(daemon: Daemon) -> None:
    for path in ("/", "/docs"):
        answer = ask(daemon, path)
        assert answer.status == 200
        assert answer.headers["content-type"] == "text/html; charset=utf-8"
        assert len(answer.body) <= PAGE_BYTES_MAX
        policy = answer.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'sha256-")
        assert "unsafe" not in policy
        assert b"http://" not in answer.body.replace(b"http://www.w3.org/2000/svg", b"")
        assert b"https://" not in answer.body


def test_viewers_are_bounded(daemon: Daemon) -> None:
    host, _, port = str(daemon.ready()["http"]).rpartition(":")
    viewers = [
        http.client.HTTPConnection(host, int(port), timeout=HUNG_S) for _ in range(VIEWERS_MAX)
    ]
    try:
        for each in viewers:
            each.request("GET", "/v1/events")
            first = each.getresponse()
            assert first.status == 200
            assert first.readline() == b"event: history\n"
        assert ask(daemon, "/v1/events").status == 503
        assert ask(daemon, "/livez").status == 200
    finally:
        for each in viewers:
            each.close()


def test_a_path_that_is_not_there_counts_as_nothing(daemon: Daemon) -> None:
    before = daemon.counters()
    answer = ask(daemon, "/favicon.ico")
    assert (answer.status, answer.json["reason"]) == (404, "no_such_path")
    after = daemon.counters()
    assert {n: c for n, c in after.items() if n.startswith("refusals")} == {
        n: c for n, c in before.items() if n.startswith("refusals")
    }


# -- addresses ---------------------------------------------------------------------------------


def test_a_busy_port_is_said_before_anything_is_served() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with stopped_daemon(arena=False, command=True, http=address) as daemon:
            assert daemon.launch().wait(HUNG_S) == 1
            assert f"cannot serve HTTP on {address}: Address already in use" in daemon.log_text()
            assert "--http off" in daemon.log_text()
            assert not (daemon.socket_dir / "admin.token").exists()


def test_other_machines_only_on_demand() -> None:
    with stopped_daemon(arena=False, command=True, http="0.0.0.0:0") as daemon:
        assert daemon.launch().wait(HUNG_S) == 2
        assert "other machines may reach 0.0.0.0:0" in daemon.log_text()
    with running_daemon(arena=False, http="0.0.0.0:0", http_insecure=True) as daemon:
        assert ask(daemon, "/livez", Host="anything.example").status == 200
        assert daemon.terminate() == 0


def test_a_restarted_daemon_takes_its_port_again() -> None:
    with running_daemon(arena=False, http=ANY_PORT) as daemon:
        host, port = address_of(daemon)
        daemon.settings["http"] = f"{host}:{port}"
        ask(daemon, "/livez")
        daemon.restart()
        assert address_of(daemon) == (host, port)
        assert ask(daemon, "/livez").status == 200


def test_off() -> None:
    with running_daemon(arena=False) as daemon:
        until(lambda: '"http": "off"' in daemon.log_text(), "the ready line")
