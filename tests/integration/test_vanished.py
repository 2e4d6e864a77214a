"""Files of a running daemon that others remove: sockets, the operators' token, the arena's."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from support.cached import cached_engine
from support.daemon import Daemon, running_daemon, until
from support.http_door import ANY_PORT, ask
from support.raw_door import new_keys

from kvhearth.errors import KVHearthError
from kvhearth_lab.harness import HUNG_S
from kvhearth_server.doors import claimed
from kvhearth_server.memory.plan import segment_path

DOORS = {"admin_token", "grpc", "admin", "calls", "attach"}


def verbose(daemon: Daemon) -> str:
    """Return what ``/readyz?verbose`` says."""
    return ask(daemon, "/readyz?verbose").body.decode()


def remove_files(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()


@pytest.mark.parametrize("remove", [remove_files, shutil.rmtree])
def test_sockets_that_were_removed_come_back(remove: object) -> None:
    keys = new_keys(8)
    with running_daemon(http=ANY_PORT) as daemon, cached_engine(daemon.url()) as engine:
        engine.store(keys)
        folder = daemon.socket_dir
        before = {path.name for path in folder.iterdir()}
        assert "grpc.sock" in before
        assert callable(remove)
        remove(folder)
        until(lambda: folder.is_dir() and {path.name for path in folder.iterdir()} == before)
        assert engine.load(keys).loaded.all(), "a session lives on"
        with cached_engine(daemon.url(), engine_id="other") as other:
            assert other.load(keys).loaded.all()
        until(lambda: ask(daemon, "/readyz").status == 200, "all doors are open")
        assert daemon.stats().counters is not None, "operators have their token"
        with grpc.insecure_channel(f"unix:{folder / 'grpc.sock'}") as channel:
            health = health_pb2_grpc.HealthStub(channel)
            answer = health.Check(health_pb2.HealthCheckRequest(), timeout=HUNG_S)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(KVHearthError, match="another daemon serves"):
            claimed(folder)
        assert "attach.sock was removed and made again" in verbose(daemon)
        assert "door.open_again" in daemon.log_text()


def open_to_others(place: Path) -> Path:
    place.mkdir()
    place.chmod(0o777)
    return place


def link(place: Path) -> Path:
    target = place.with_name("target")
    target.mkdir(mode=0o700)
    place.symlink_to(target)
    return target


@pytest.mark.parametrize(
    ("make", "why"), [(open_to_others, "lets others write"), (link, "symbolic link")]
)
def test_sockets_go_into_no_directory_that_a_start_refuses(
    make: Callable[[Path], Path], why: str
) -> None:
    with running_daemon(http=ANY_PORT) as daemon:
        place = daemon.socket_dir
        os.kill(daemon.pid, signal.SIGSTOP)  # else it could make one of its own in between
        place.rename(place.with_name("aside"))
        folder = make(place)
        os.kill(daemon.pid, signal.SIGCONT)
        until(lambda: why in ask(daemon, "/readyz").body.decode(), "it is refused")
        found = ask(daemon, "/readyz").body.decode()
        assert {name for name in DOORS if f"[-]{name}-door: " in found} == DOORS
        assert list(folder.iterdir()) == []
        place.unlink() if place.is_symlink() else place.rmdir()
        until(lambda: ask(daemon, "/readyz").status == 200, "all doors are open again")
        assert daemon.stats().boot_id


def test_an_arena_without_its_files_is_told() -> None:
    with running_daemon(http=ANY_PORT) as daemon:
        assert daemon.arena_dir is not None
        segment_path(daemon.arena_dir, 0).unlink()
        until(lambda: "the next start will be cold" in verbose(daemon), "it is told")
        assert "arena.files_gone" in daemon.log_text()
        assert ask(daemon, "/readyz").status == 200
        advice = ask(daemon, "/v1/guide").body.decode()
        assert "segment-0 of the arena" in advice, "the page tells"


def test_an_arena_whose_files_were_moved_away_is_linked_anew(tmp_path: Path) -> None:
    keys = new_keys(8)
    with running_daemon() as daemon:
        with cached_engine(daemon.url()) as engine:
            engine.store(keys)
        folder = daemon.arena_dir
        assert folder is not None
        aside = folder.with_name(f"{folder.name}-aside")
        aside.mkdir()
        try:
            moved = segment_path(folder, 0)
            moved.rename(aside / moved.name)
            until(moved.exists, "it is linked anew")
        finally:
            shutil.rmtree(aside)
        daemon.kill()
        daemon.start()
        with cached_engine(daemon.url()) as engine:
            assert engine.load(keys).loaded.all()
