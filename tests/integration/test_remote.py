"""An engine on another host: the client and the simple API by a gateway, with its failures."""

from __future__ import annotations

import os
import secrets
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support.cached import (
    CONTRACT,
    PAGE_BYTES,
    CachedEngine,
    cached_engine,
    computed,
    wrong_bytes,
)
from support.certificates import Authority
from support.daemon import Daemon, running_daemon, until
from support.remote_raw import GatewayProcess, gateway

from kvhearth import PagedKV, connect
from kvhearth.client import KVClient
from kvhearth.copiers.base import CopyKind, Done
from kvhearth.copiers.remote import RemoteCopier
from kvhearth.errors import Reason
from kvhearth.model import U8, Records
from kvhearth.results import CommitGroup
from kvhearth.session.remote_arena import RemoteArena
from kvhearth.transfer.copier_pool import default_copier
from kvhearth.wire.remote import Purpose
from kvhearth_lab.harness import HUNG_S
from kvhearth_lab.harness.relay import Relay, relay
from kvhearth_server.gateway.tokens import Identity, add_token

OPTIONS = "call_ms=10000&lookup_ms=10000&heartbeat_ms=100&attach_ms=2000"


def keys_of(count: int) -> list[bytes]:
    """Return new keys."""
    return [secrets.token_bytes(CONTRACT.hash_bytes) for _ in range(count)]


def url_of(port: int, host: str = "127.0.0.1", more: str = "") -> str:
    """Return the URL of a gateway."""
    return f"kvhearth://{host}:{port}?{OPTIONS}{more}"


@pytest.fixture
def served() -> Iterator[tuple[Daemon, GatewayProcess]]:
    with running_daemon(memory="32MiB") as daemon, gateway(daemon.socket_dir) as process:
        yield daemon, process


@pytest.fixture
def network(served: tuple[Daemon, GatewayProcess]) -> Iterator[tuple[Relay, CachedEngine]]:
    """A relay, and an engine whose connections go through it."""
    port = served[1].port
    with relay(port) as between, cached_engine(url_of(port, between.host)) as engine:
        yield between, engine


@pytest.mark.parametrize("more", ["", "&connections=1&staging=1MiB"])
def test_blocks_are_stored_and_loaded(served: tuple[Daemon, GatewayProcess], more: str) -> None:
    daemon, process = served
    keys = keys_of(48)
    with cached_engine(url_of(process.port, more=more)) as engine:
        assert engine.load(keys).usable_blocks == 0
        assert engine.store(keys[:40]).stored == 40
        assert engine.store(keys[:40]).duplicate == 40
        for _ in range(3):
            assert engine.load(keys).usable_blocks == 40
        assert engine.loadable(keys) == 40
        assert engine.counter("load_failed") == 0
    daemon.wait_quiet()


def test_engines_here_and_there_share_blocks(served: tuple[Daemon, GatewayProcess]) -> None:
    daemon, process = served
    ours, theirs = keys_of(20), keys_of(20)
    with cached_engine(daemon.url()) as near:
        assert near.store(ours).stored == 20
        with cached_engine(url_of(process.port), engine_id="far") as far:
            assert far.load(ours).usable_blocks == 20
            assert far.store(theirs).stored == 20
        assert near.load(theirs).usable_blocks == 20


def test_a_broken_network_loses_no_session(network: tuple[Relay, CachedEngine]) -> None:
    between, engine = network
    client = engine.client
    keys = keys_of(24)
    assert engine.store(keys).stored == 24
    session = client.session_id
    found = client.lookup({0: keys})
    room = client.reserve({0: 4})
    lost = (Purpose.LIFE_LINE,), (Purpose.DATA, Purpose.CALLS), tuple(Purpose)
    for purposes in lost:
        lines = between.counts[Purpose.LIFE_LINE]
        between.cut(*purposes)
        assert engine.load(keys).usable_blocks == 24
        if Purpose.LIFE_LINE in purposes:
            until(lambda n=lines: between.counts[Purpose.LIFE_LINE] > n, "it is resumed")
    assert client.session_id == session
    assert client.counters()["attaches"] == 1
    # What the session held, it holds: a lease can be read, reserved slots can be written.
    pages = np.zeros((24, PAGE_BYTES), np.uint8)
    done = moved(client, CopyKind.LOAD, found.boot_id, found.groups[0].extents, pages)
    assert wrong_bytes(keys, pages, done.ok) == []
    client.release(found.lease)
    fresh, extents = keys_of(4), room.groups[0]
    done = moved(client, CopyKind.STORE, room.boot_id, extents[:, 0], computed(fresh))
    assert done.checksums is not None
    group = CommitGroup(fresh, extents, done.checksums[:, None], b"")
    assert client.commit({0: group}, boot_id=room.boot_id).stored[0].all()
    assert engine.load(fresh).usable_blocks == 4


def moved(client: KVClient, kind: CopyKind, boot_id: str, extents: Records, pages: U8) -> Done:
    """Copy pages to or from extents by the copier that the client's arena needs."""
    arena = client.arena
    assert isinstance(arena, RemoteArena)
    copier = default_copier()(PagedKV([pages]), arena)
    assert isinstance(copier, RemoteCopier)
    numbers = np.arange(len(pages))
    if kind is CopyKind.STORE:
        ticket = copier.store(boot_id, numbers, extents)
    else:
        ticket = copier.load(boot_id, extents, numbers)
    assert ticket is not None
    done = copier.wait(ticket, HUNG_S)
    assert done is not None
    assert done.ok.all(), done.reasons
    assert copier.close()
    return done


def test_a_network_that_stays_away_ends_the_session(
    served: tuple[Daemon, GatewayProcess],
) -> None:
    process = served[1]
    keys = keys_of(8)
    between = Relay(process.port)
    with cached_engine(url_of(process.port, between.host)) as engine:
        assert engine.store(keys).stored == 8
        between.stop()
        # Refused at once: the port has nobody behind it.
        until(lambda: not engine.client.session_id, "the session is lost")
        assert engine.load(keys).usable_blocks == 0
        with relay(process.port):
            until(lambda: engine.client.wait_ready(1.0), "attached again")
            assert engine.load(keys).usable_blocks == 8


def test_bytes_that_the_network_garbles_are_never_served(
    network: tuple[Relay, CachedEngine],
) -> None:
    between, engine = network
    keys = keys_of(16)
    assert engine.store(keys).stored == 16

    def garble(purpose: Purpose, data: bytes) -> bytes:
        if purpose is not Purpose.DATA or len(data) < 60000:
            return data
        return data[:-100] + bytes([data[-100] ^ 4]) + data[-99:]

    between.garble = garble
    for _ in range(6):
        engine.load(keys)
    assert engine.counter("load_failed") > 0
    between.garble = lambda purpose, data: data
    # The daemon looked itself: its bytes are right, and reports of wrong ones lose no block.
    until(lambda: engine.load(keys).usable_blocks == 16, "loads again")


def test_without_a_gateway_all_is_a_miss_until_the_next_one(
    served: tuple[Daemon, GatewayProcess],
) -> None:
    daemon, process = served
    keys = keys_of(16)
    with cached_engine(url_of(process.port)) as engine:
        assert engine.store(keys).stored == 16
        process.end(signal.SIGKILL)
        until(lambda: not engine.client.session_id, "its end is noticed")
        assert engine.load(keys).usable_blocks == 0
        assert engine.store(keys_of(2)).stored == 0
        with gateway(daemon.socket_dir, "--listen", f"127.0.0.1:{process.port}"):
            assert engine.client.wait_ready(HUNG_S)
            assert engine.load(keys).usable_blocks == 16
            assert engine.store(keys_of(4)).stored == 4
    daemon.wait_quiet()


def test_a_killed_daemon_is_a_miss_until_the_next_one(
    served: tuple[Daemon, GatewayProcess],
) -> None:
    daemon, process = served
    keys = keys_of(16)
    with cached_engine(url_of(process.port)) as engine:
        assert engine.store(keys).stored == 16
        boot_id = engine.client.boot_id
        daemon.kill()
        until(lambda: engine.client.boot_id != boot_id, "its end is noticed")
        assert engine.load(keys).usable_blocks == 0
        daemon.start()
        assert engine.client.wait_ready(HUNG_S)
        assert engine.client.boot_id != boot_id
        # The arena is a file: a warm daemon adopts its blocks.
        until(lambda: engine.load(keys).usable_blocks == 16, "the blocks are there")
        assert engine.store(keys_of(4)).stored == 4


def test_kills_while_bytes_move_serve_no_wrong_byte(
    served: tuple[Daemon, GatewayProcess],
) -> None:
    daemon, process = served
    keys = keys_of(64)
    with cached_engine(url_of(process.port)) as engine:
        assert engine.store(keys).stored == 64
        for turn in range(2):
            begun = [engine.begin_load(keys) for _ in range(2)]
            begun_store = engine.begin_store(keys_of(64))
            if turn % 2:
                daemon.restart()
            else:
                os.kill(process.child, signal.SIGKILL)
            assert all(each.result(HUNG_S) is not None for each in begun)
            begun_store.result(HUNG_S)
            until(lambda: engine.client.wait_ready(1.0), "attached again")
        until(lambda: engine.load(keys).usable_blocks == 64, "all loads again")


@pytest.mark.parametrize("own_certificate", [False, True], ids=["token", "certificate"])
def test_an_identity_over_tls(tmp_path: Path, own_certificate: bool) -> None:
    """Only the URL differs: its scheme, and files that prove who calls."""
    authority = Authority(tmp_path)
    cert, key = authority.issue("gateway")
    own, own_key = authority.issue("far")
    (secret := tmp_path / "token").write_text("kvh_far_" + "x" * 40)
    tokens = tmp_path / "tokens.yaml"
    settings: dict[str, object] = {"tls_cert": cert, "tls_key": key, "tokens_file": tokens}
    if own_certificate:
        tokens.write_text("certificates:\n- {cn: far, name: far, tenant: default}\n")
        tokens.chmod(0o600)
        settings["client_ca"] = authority.path
        proof = f"&cert={own}&key={own_key}"
    else:
        add_token(tokens, Identity("far", "default"), secret.read_text())
        proof = f"&token_file={secret}"
    with running_daemon(memory="32MiB", listen="127.0.0.1:0", **settings) as daemon:
        (served, *_) = until(lambda: daemon.events("gateway.serving"), "the gateway serves")
        daemon.settings["listen"] = f"127.0.0.1:{served['port']}"
        url = daemon.remote_url(f"{OPTIONS}&ca={authority.path}{proof}").replace("://", "s://", 1)
        keys = keys_of(32)
        with cached_engine(url) as engine:
            assert engine.store(keys).stored == 32
            assert engine.load(keys).usable_blocks == 32
        stranger = connect(url.replace(proof, ""), CONTRACT, engine_id="stranger")
        refusal = until(lambda: stranger.refusal, "a stranger is refused")
        assert refusal.reason is Reason.PEER_NOT_ALLOWED
        stranger.close()
        assert "x" * 40 not in daemon.log_text()
