"""Contract tests of the remote tier's drivers, through a mover, on real servers."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from support.certificates import Authority
from support.movers import MoverDesk, kinds, mover_desk
from support.remote_servers import (
    ACCESS,
    PASSWORD,
    Endpoint,
    Server,
    mooncake,
    rclone,
    redis_binary,
    resp,
    running,
    seaweed,
    secret_file,
    valkey,
    valkey_cluster,
)
from support.tiers import family, keys_of

from kvhearth_lab.harness import HUNG_S
from kvhearth_server.tiers.remote.names import LAYOUT

OF = family(length=200_000, shards=2)
KINDS = [
    "file",
    "rclone",
    "seaweed",
    "valkey",
    "valkey-acl",
    "valkey-cluster",
    "redis-tls",
    "mooncake",
]


@dataclass
class Remote:
    """A remote's URL, its servers, and what the suite may expect of it."""

    kind: str
    url: str
    servers: list[Server] = field(default_factory=list)
    folder: Path | None = None

    @property
    def durable(self) -> bool:
        """Whether values survive a restart of the server."""
        return self.kind in ("file", "rclone", "seaweed")

    def stop(self) -> None:
        """Kill all servers; a directory goes away."""
        if self.folder is not None:
            self.folder.rename(f"{self.folder}.away")
        for each in self.servers:
            each.stop()

    def start(self) -> None:
        """Start them again."""
        if self.folder is not None:
            Path(f"{self.folder}.away").rename(self.folder)
        for each in self.servers:
            each.start()


@contextlib.contextmanager
def serve(kind: str, folder: Path) -> Iterator[Remote]:
    """Run a remote of a kind."""
    if kind == "file":
        (folder / "remote").mkdir()
        yield Remote(kind, f"file://{folder}/remote", folder=folder / "remote")
    elif kind in ("rclone", "seaweed"):
        server = (rclone if kind == "rclone" else seaweed)(folder)
        with running(server):
            yield Remote(kind, f"{server.url}&{secret_file(folder, *ACCESS)}", [server])
    elif kind == "valkey-cluster":
        with valkey_cluster(folder) as nodes:
            yield Remote(kind, nodes[0].url, nodes)
    elif kind == "redis-tls":
        with running(server := redis_tls(folder)):
            yield Remote(kind, server.url, [server])
    elif kind == "mooncake":
        with mooncake(folder) as servers:
            yield Remote(kind, servers[0].url, servers)
    else:
        server = valkey(folder)
        with running(server):
            if kind == "valkey-acl":
                user = ("ACL", "SETUSER", "kv", "on", f">{PASSWORD}", "~kv/*", "+@all")
                assert resp(server.port, *user) == b"+OK\r\n"
                assert resp(server.port, "ACL", "SETUSER", "default", "off") == b"+OK\r\n"
                server.url += f"?user=kv&{secret_file(folder, PASSWORD)}"
            yield Remote(kind, server.url, [server])


def redis_tls(folder: Path, days: int = 1) -> Server:
    """Return Redis with TLS, a certificate of its own authority, and a password."""
    binary, env = redis_binary()
    authority = Authority(folder)
    cert, key = authority.issue("server", days=days)
    options = ["--port", "0", "--tls-cert-file", str(cert), "--tls-key-file", str(key)]
    options += ["--tls-ca-cert-file", str(authority.path), "--tls-auth-clients", "no"]
    options += ["--requirepass", PASSWORD]
    server = valkey(folder, *options, binary=binary)
    server.command = [*server.command, "--tls-port", str(server.port)]
    server.env = env
    secret = secret_file(folder, PASSWORD)
    server.url = f"valkeys://127.0.0.1:{server.port}/kv?ca={authority.path}&{secret}"
    return server


with_server = pytest.mark.realtime("asks a server's own client, stops the server, or starts one")


@pytest.fixture(scope="module", params=KINDS)
def remote(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    if request.param != "mooncake":
        server = request.param.partition("-")[0] in ("valkey", "redis")
        pytest.importorskip("glide_sync" if server else "obstore")
    with serve(request.param, tmp_path_factory.mktemp(request.param)) as found:
        yield found


@pytest.fixture(scope="module")
def desk(remote: Remote) -> Iterator[MoverDesk]:
    with mover_desk(remote.url) as found:
        found.up()
        found.put([0], OF)  # as below
        yield found


@pytest.fixture(autouse=True)
def empty(desk: MoverDesk) -> Iterator[None]:
    yield
    desk.up()
    desk.final(desk.mover.submit(desk_delete(range(12)), HUNG_S))


def desk_delete(numbers: range):
    from support.movers import SPACE

    from kvhearth_server.tiers.remote.mover import Delete

    return Delete(SPACE, OF, keys_of(numbers))


def test_blocks_come_back(desk: MoverDesk) -> None:
    assert kinds(desk.put(range(8), OF)) == ["Done"] * 8
    answer = desk.get(range(8), OF)
    assert kinds(answer) == ["Done"] * 8
    assert answer.parents == [b"", *keys_of(range(7))]
    assert kinds(desk.put(range(8), OF)) == ["Done"] * 8, "again"


def test_small_and_large_blocks(desk: MoverDesk) -> None:
    for length in (1, 4096, 3 << 20):
        of = family(group=7, length=length)
        desk.put([0], of)  # rclone may fail to make a directory twice at once
        assert kinds(desk.put(range(3), of)) == ["Done"] * 3
        assert kinds(desk.get(range(3), of)) == ["Done"] * 3
        desk.delete(range(3))


def test_absence(desk: MoverDesk) -> None:
    desk.put([0, 1, 3], OF)
    assert kinds(desk.exists(range(4), OF)) == ["Done", "Done", "Missing", "Done"]
    assert kinds(desk.get(range(4), OF)) == ["Done", "Done", "Missing", "Missing"]
    assert kinds(desk.delete([1, 9])) == ["Done", "Done"]
    assert kinds(desk.exists(range(2), OF)) == ["Done", "Missing"]


def test_blocks_of_another_length_are_not_found(remote: Remote, desk: MoverDesk) -> None:
    desk.put([0], OF)
    other = family(length=100_000, shards=2)
    if remote.kind != "mooncake":  # it does not tell sizes of several values at once
        assert kinds(desk.exists([0], other)) == ["Corrupt remote"]
    assert kinds(desk.get([0], other)) == ["Corrupt remote"]


@pytest.mark.realtime("starts a second helper of a remote")
def test_another_fleets_mover_is_told_and_finds_nothing(remote: Remote, desk: MoverDesk) -> None:
    desk.put([0], OF)
    with mover_desk(remote.url, fleet_key=b"the key of another fleet") as other:
        other.until(lambda: "another key" in other.mover.problem)
        assert kinds(other.get([0], OF)) == ["Failed denied"]


def faulty(remote: Remote) -> None:
    if not remote.servers:
        pytest.skip("a directory has no server")


def ends(desk: MoverDesk, submit: Callable[[], object]) -> tuple[float, list[str]]:
    """Return the seconds until a request was told, and its outcomes."""
    began = time.monotonic()
    ticket = submit()
    assert isinstance(ticket, int), ticket
    desk.until(lambda: [a for a in desk.answers if a.ticket == ticket and a.outcomes])
    told = time.monotonic() - began
    return told, kinds(desk.final(ticket))


@with_server
def test_a_stopped_server_is_told_by_the_deadline(remote: Remote, desk: MoverDesk) -> None:
    faulty(remote)
    desk.put(range(4), OF)
    for each in remote.servers:
        each.send(signal.SIGSTOP)
    request = desk.get_request(range(4), OF)
    try:
        told, outcomes = ends(desk, lambda: desk.mover.submit(request, 1.0))
    finally:
        for each in remote.servers:
            each.send(signal.SIGCONT)
    assert set(outcomes) == {"Failed timeout"}
    assert told < 5.0
    desk.up()
    assert kinds(desk.get(range(4), OF)) == ["Done"] * 4
    assert (desk.slot(request.places[0, 0], 100) != 0xEE).any(), "loaded into the same slots"


@with_server
def test_a_killed_server_is_told_and_comes_back(remote: Remote, desk: MoverDesk) -> None:
    if remote.kind == "valkey-cluster":
        pytest.skip("a cluster whose nodes all lost their memory has to be made again")
    desk.put(range(4), OF)
    remote.stop()
    _, outcomes = ends(desk, lambda: desk.mover.submit(desk.get_request(range(4), OF), 1.0))
    assert set(outcomes) <= {"Failed timeout", "Failed unreachable"}
    if remote.folder is not None:
        assert set(kinds(desk.put(range(4, 8), OF))) == {"Failed unreachable"}
        assert not remote.folder.exists(), "a directory is not made again under its mount"
    remote.start()
    if remote.kind == "valkey-acl":
        user = ("ACL", "SETUSER", "kv", "on", f">{PASSWORD}", "~kv/*", "+@all")
        assert resp(remote.servers[0].port, *user) == b"+OK\r\n"
    wanted = {"Done"} if remote.durable else {"Missing"}
    # A library that misses its deadline costs the helper, and nothing is taken without one.
    desk.until(lambda: desk.mover.up and set(kinds(desk.get(range(4), OF))) == wanted)


WRONG = {
    "rclone": ("denied", "the wrong secret"),
    "seaweed": ("denied", "the wrong secret"),
    "valkey-acl": ("denied", "the wrong secret"),
    "redis-tls": ("denied", "the wrong secret"),
}


@with_server
def test_a_wrong_secret_is_named(remote: Remote, tmp_path: Path) -> None:
    if remote.kind not in WRONG:
        pytest.skip("it has no secret")
    secret = secret_file(tmp_path, ACCESS[0], "wrong")
    url = remote.url.partition("&secret_file")[0] + f"&{secret}"
    with mover_desk(url) as other:
        other.until(lambda: "secret" in other.mover.problem)
        assert kinds(other.get([0], OF)) == ["Failed denied"]


@with_server
def test_a_missing_bucket_is_named(remote: Remote) -> None:
    if remote.kind != "rclone":
        pytest.skip("it has no buckets, or makes one for a user who may")
    with mover_desk(remote.url.replace("s3://bucket/", "s3://none-such/")) as other:
        other.until(lambda: "bucket" in other.mover.problem)
        assert kinds(other.get([0], OF)) == ["Failed denied"]


def test_bits_that_flip_at_rest_are_found(remote: Remote, desk: MoverDesk) -> None:
    if remote.kind != "rclone":
        pytest.skip("its values are not files")
    desk.put([0], OF)
    desk.put([1], OF)
    folder = remote.servers[0].folder / "data" / "bucket" / "kv" / LAYOUT
    for path in (each for each in folder.glob("*/*") if each.stat().st_size > 300_000):
        whole = bytearray(path.read_bytes())
        whole[200_000] ^= 1
        path.write_bytes(whole)
    assert kinds(desk.get([0, 1], OF)) == ["Corrupt remote"] * 2
    desk.delete([0, 1])
    assert kinds(desk.put([0], OF)) == ["Done"]
    assert kinds(desk.get([0], OF)) == ["Done"]


def test_a_full_server_refuses_and_keeps_what_it_has(remote: Remote, desk: MoverDesk) -> None:
    if remote.kind != "valkey":
        pytest.skip("it is not bounded here")
    port = remote.servers[0].port
    desk.put([0], OF)
    used = resp(port, "INFO", "memory").partition(b"used_memory:")[2].partition(b"\r")[0]
    bound = str(int(used) + 2_000_000)
    assert resp(port, "CONFIG", "SET", "maxmemory", bound) == b"+OK\r\n"
    try:
        outcomes = kinds(desk.put(range(1, 12), OF))
        assert set(outcomes) == {"Done", "Failed no_space"}
        assert kinds(desk.get([0], OF)) == ["Done"]
    finally:
        resp(port, "CONFIG", "SET", "maxmemory", "0")


@with_server
def test_after_a_fail_over_behind_one_address_connections_are_made_anew(
    remote: Remote, tmp_path: Path
) -> None:
    if remote.kind != "valkey":
        pytest.skip("it has no replica here")
    one, two = (valkey(tmp_path) for _ in range(2))
    with running(one, two), contextlib.closing(Endpoint(one.port)) as address:
        assert resp(two.port, "REPLICAOF", "127.0.0.1", str(one.port)) == b"+OK\r\n"
        with mover_desk(address.url) as desk:
            assert kinds(desk.up().put(range(4), OF)) == ["Done"] * 4
            assert resp(one.port, "REPLICAOF", "127.0.0.1", str(two.port)) == b"+OK\r\n"
            # A probe of before may have ended the connections, and names the cause then.
            assert set(kinds(desk.put(range(4), OF))) == {"Failed read_only"}
            desk.until(lambda: "replica" in desk.mover.problem)
            assert resp(two.port, "REPLICAOF", "NO", "ONE") == b"+OK\r\n"
            address.port = two.port
            desk.up()
            assert kinds(desk.put(range(4), OF)) == ["Done"] * 4
            assert desk.mover.restarts == 0


@with_server
def test_a_password_that_changes_is_read_again(remote: Remote, tmp_path: Path) -> None:
    if remote.kind != "valkey":
        pytest.skip("it has no password, or the same way to change it")
    server, secret = valkey(tmp_path, "--requirepass", "one"), tmp_path / "password"
    secret.write_text("one")
    url = f"{server.url}?secret_file={secret}"
    with running(server), mover_desk(url) as desk:
        assert kinds(desk.up().put(range(2), OF)) == ["Done"] * 2
        answer = resp(server.port, "CONFIG", "SET", "requirepass", "two", password="one")
        assert answer == b"+OK\r\n"
        resp(server.port, "CLIENT", "KILL", "TYPE", "normal", password="two")
        request = desk.get_request(range(2), OF)
        found = set(kinds(desk.final(desk.mover.submit(request, 1.0))))
        assert found <= {"Failed timeout", "Failed denied"}, "the library tries again by itself"
        secret.write_text("two\n")
        desk.until(lambda: set(kinds(desk.get(range(2), OF))) == {"Done"})
        assert desk.mover.restarts == 0


@with_server
def test_an_expired_certificate_is_refused(remote: Remote, tmp_path: Path) -> None:
    if remote.kind != "redis-tls":
        pytest.skip("it has no certificate")
    with running(server := redis_tls(tmp_path, days=-1)), mover_desk(server.url) as refused:
        refused.until(lambda: refused.mover.up and refused.mover.problem)
        assert kinds(refused.get([0], OF)) == ["Failed unreachable"]


@with_server
def test_a_foreign_certificate_is_refused(remote: Remote, tmp_path: Path) -> None:
    if remote.kind != "redis-tls":
        pytest.skip("it has no certificate")
    other = Authority(tmp_path, "other")
    ca = remote.url.partition("ca=")[2].partition("&")[0]
    with mover_desk(remote.url.replace(ca, str(other.path))) as refused:
        refused.until(lambda: refused.mover.up and refused.mover.problem)
        assert kinds(refused.get([0], OF)) == ["Failed unreachable"]
