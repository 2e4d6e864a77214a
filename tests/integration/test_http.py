"""HTTP of a real daemon: probes, scrapes, state, actions, and answers to bad requests."""

from __future__ import annotations

import json
import os
import re
import socket

import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.daemon import Daemon, running_daemon, stopped_daemon, until
from support.http_door import ANY_PORT, Answer, address_of, ask, scraped
from support.raw_door import PAGE_BYTES, goes_on, new_keys

from kvhearth_lab.harness.engine import Engine, contract_of, engine_of

MISSES = ("absent", "epoch", "not_summed")
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


def metrics(daemon: Daemon) -> dict[str, float]:
    """Samples by ``name{label values}``, in the order of the labels' names."""
    text = scraped(daemon)
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(value for _, value in sorted(sample.labels.items()))
            found[f"{sample.name.removeprefix('kvhearth_')}{{{labels}}}"] = sample.value
    return found


DAEMON = {"http": ANY_PORT}

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
    assert metrics(daemon)["leases{}"] == 1
    until(lambda: metrics(daemon)["oldest_lease_seconds{}"] > 0, "it grows old")
    neighbour.client.release(seen.lease)
    until(lambda: not ask(daemon, "/v1/leases", admin=True).json["groups"], "the lease ends")


# -- metrics -----------------------------------------------------------------------------------


def lookups(found: dict[str, float]) -> dict[str, float]:
    """Returns keys looked up by reason, the hits as ``dram``."""
    name = "lookup_blocks_total"
    values = {reason: found[f"{name}{{{reason},miss}}"] for reason in MISSES}
    return values | {"dram": found[f"{name}{{,dram}}"]}


def test_lookups_are_counted_by_why(daemon: Daemon, neighbour: Engine) -> None:
    stored, absent = new_keys(5), new_keys(3)
    assert len(neighbour.store(stored).bound) == 5
    before, asked = lookups(metrics(daemon)), daemon.counters()["lookup_keys"]
    neighbour.client.lookup({0: stored + absent}, lease=False)
    until(lambda: daemon.counters()["lookup_keys"] == asked + 8, "the lookup is posted")
    after = lookups(metrics(daemon))
    assert {name: after[name] - before[name] for name in after} == {
        "dram": 5,
        "absent": 3,
        "epoch": 0,
        "not_summed": 0,
    }
    assert sum(after.values()) - sum(before.values()) == daemon.counters()["lookup_keys"] - asked
    neighbour.client.bump_epoch()
    until(lambda: neighbour.client.lookup({0: stored}, lease=False).reason == "", "the new epoch")
    until(lambda: lookups(metrics(daemon))["epoch"] - after["epoch"] == 5, "it is posted, too")
    found = metrics(daemon)
    assert sum(lookups(found).values()) == daemon.counters()["lookup_keys"]


def test_calls_and_clients_are_measured(daemon: Daemon, neighbour: Engine) -> None:
    goes_on(neighbour)
    until(lambda: metrics(daemon).get("rpc_requests_total{OK,Lookup}"), "lookups are posted")
    found = metrics(daemon)
    assert found["rpc_seconds_count{Lookup}"] > 0
    assert found["store_bytes_total{}"] >= 4 * PAGE_BYTES
    assert found["leased_bytes_total{}"] >= 4 * PAGE_BYTES
    assert found["process_resident_memory_bytes{}"] > 0
    reported = until(lambda: ask(daemon, "/v1/stats").json["client_counters"], "a heartbeat")
    assert reported["attaches"] >= 1


def test_eviction_has_an_age(daemon: Daemon, neighbour: Engine) -> None:
    assert len(neighbour.store(new_keys(4)).bound) == 4
    space = ask(daemon, "/v1/namespaces", admin=True).json["namespaces"][0]["namespace"]
    before = metrics(daemon)
    answer = ask(daemon, f"/v1/namespaces/{space}:evict", "POST", admin=True)
    evicted = answer.json["evicted_blocks"]
    assert evicted >= 4
    after = metrics(daemon)
    name = "eviction_age_seconds_count{}"
    assert after[name] - before[name] == evicted
    assert after["evictions_total{asked}"] - before.get("evictions_total{asked}", 0) == evicted
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


@pytest.mark.parametrize(("method", "path"), ADMIN)
@pytest.mark.parametrize("given", ["", "Bearer", "Bearer wrong", "Basic eDp5", "Bearer \xe9"])
def test_admin_token(daemon: Daemon, method: str, path: str, given: str) -> None:
    headers = {"Authorization": given} if given else {}
    before = daemon.counters().get("refusals{not_admin}", 0)
    reported = problem(ask(daemon, path, method, **headers), 403, "not_admin")
    assert "admin.token" in reported
    assert daemon.counters()["refusals{not_admin}"] == before + 1
    assert ask(daemon, "/readyz").status == 200


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
        assert metrics(daemon)["ready{}"] == 0
        assert daemon.terminate() == 0


# -- bad requests ------------------------------------------------------------------------------

BAD_BODIES = (b"{", b"[]", b"7", b'"x"', b'{"keep_bytes": -1}', b'{"keep_bytes": "x"}', b"\xff")
BAD_BODIES += (b'{"keep_bytes": 1e99}', b'{"nothing": 1}', b"[" * 60_000)


@pytest.mark.parametrize("body", BAD_BODIES)
def test_bad_body(daemon: Daemon, body: bytes) -> None:
    before = daemon.counters().get("refusals{bad_message}", 0)
    answer = ask(daemon, f"/v1/namespaces/{UNKNOWN}:evict", "POST", body, admin=True)
    problem(answer, 400, "bad_message")
    assert daemon.counters()["refusals{bad_message}"] == before + 1


def test_a_body_has_a_bound(daemon: Daemon) -> None:
    answer = ask(daemon, "/v1/admin:drain", "POST", b"x" * 140_000, admin=True)
    assert "131072" in problem(answer, 413, "bad_message")
    with socket.create_connection(address_of(daemon), timeout=10) as line:
        line.sendall(b"POST /v1/admin:drain HTTP/1.1\r\nHost: localhost\r\n")
        line.sendall(b"Transfer-Encoding: chunked\r\n\r\n" + b"4000\r\n" + b"x" * 0x4000 + b"\r\n")
        for _ in range(8):
            line.sendall(b"4000\r\n" + b"x" * 0x4000 + b"\r\n")
        assert line.recv(4096).startswith(b"HTTP/1.1 413")


def test_another_hosts_name(daemon: Daemon) -> None:
    for name in ("evil.example", "evil.example:9460", "127.0.0.1.evil.example"):
        problem(ask(daemon, "/v1/sessions", Host=name), 421, "bad_message")
    for name in ("localhost:1", "127.0.0.1", "[::1]:9460"):
        assert ask(daemon, "/livez", Host=name).status == 200


def test_no_http(daemon: Daemon) -> None:
    with socket.create_connection(address_of(daemon), timeout=10) as line:
        line.sendall(b"\x16\x03\x01 this is no HTTP\r\n\r\n")
        assert line.recv(4096).startswith(b"HTTP/1.1 400")


def test_many_silent_connections_hurt_nobody(daemon: Daemon, neighbour: Engine) -> None:
    lines = [socket.create_connection(address_of(daemon), timeout=10) for _ in range(100)]
    try:
        assert ask(daemon, "/livez").status == 200
        goes_on(neighbour)
    finally:
        for line in lines:
            line.close()


# -- addresses ---------------------------------------------------------------------------------


def test_a_busy_port_is_said_before_anything_is_served() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with stopped_daemon(arena=False, command=True, http=address) as daemon:
            assert daemon.launch().wait(30) == 1
            assert f"cannot serve HTTP on {address}: Address already in use" in daemon.log_text()
            assert "--http off" in daemon.log_text()
            assert not (daemon.socket_dir / "admin.token").exists()


def test_other_machines_only_on_demand() -> None:
    with stopped_daemon(arena=False, command=True, http="0.0.0.0:0") as daemon:
        assert daemon.launch().wait(30) == 2
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
