"""Places of a daemon and of a client that are given none."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from kvhearth import url as urls
from kvhearth.connectors.core.settings import Settings as ConnectorSettings
from kvhearth.url import DEFAULT_URL, UnixUrl, default_socket_dir, find_socket_dir, parse_url
from kvhearth_server.config import load
from kvhearth_server.config.load import load_settings
from kvhearth_server.config.model import Settings

pytestmark = pytest.mark.usefixtures("no_environment")


@pytest.fixture
def ordinary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An ordinary user's runtime directory; ``/run/kvhearth`` is in a scratch directory."""
    runtime = tmp_path / "user"
    runtime.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    monkeypatch.setattr(urls, "SYSTEM_SOCKET_DIR", tmp_path / "system")
    (tmp_path / "shm").mkdir()
    monkeypatch.setattr(load, "SHARED_MEMORY", tmp_path / "shm")
    monkeypatch.setattr(os, "geteuid", lambda: 61000)
    return runtime


def test_root_uses_the_systems_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert default_socket_dir() == find_socket_dir() == Path("/run/kvhearth")
    assert parse_url(DEFAULT_URL) == UnixUrl(Path("/run/kvhearth"))


def test_a_user_has_a_directory_of_their_own(ordinary: Path) -> None:
    assert default_socket_dir() == find_socket_dir() == ordinary / "kvhearth"
    assert parse_url("kvhearth+unix:?call_ms=7") == UnixUrl(
        ordinary / "kvhearth", daemon_uid=61000, call_ms=7
    )
    assert ConnectorSettings().url == DEFAULT_URL


def test_a_systems_daemon_is_found_unless_the_user_has_one(ordinary: Path) -> None:
    system, own = urls.SYSTEM_SOCKET_DIR, ordinary / "kvhearth"
    if os.getuid() != 0:  # root may write to everything
        system.mkdir(mode=0o555)
        assert default_socket_dir() == own
        assert find_socket_dir() == system
    own.mkdir()
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(str(own / "attach.sock"))
        assert find_socket_dir() == own


def test_without_a_runtime_directory_it_is_in_tmp(
    ordinary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(ordinary / "none"))
    assert default_socket_dir() == Path("/tmp/kvhearth-61000")
    assert parse_url(DEFAULT_URL) == UnixUrl(Path("/tmp/kvhearth-61000"), daemon_uid=61000)


def test_the_cache_is_on_shared_memory_where_there_is_room(ordinary: Path) -> None:
    shared = ordinary.parent / "shm"
    settings = load_settings({"memory": "64MiB"})
    assert settings.arena_dir == shared / "kvhearth-61000"
    assert settings.socket_dir == ordinary / "kvhearth"
    assert settings.arena_fallback == ""
    for asked, reason in (
        ({"memory": "1024TiB"}, "MiB free, and the arena takes 1107296320MiB"),
        ({"memory": "64MiB", "hugepages": "require"}, "huge pages are required"),
    ):
        settings = load_settings(asked)
        assert settings.arena_dir is None
        assert reason in settings.arena_fallback
    for given in ("none", "/a"):
        settings = load_settings({"arena_dir": given})
        assert settings.arena_dir == (None if given == "none" else Path(given))
        assert settings.arena_fallback == ""


def test_a_daemon_with_a_socket_directory_gets_no_arena_unasked(ordinary: Path) -> None:
    """Two daemons of a user would meet in it."""
    assert load_settings({"socket_dir": "/s"}) == Settings(socket_dir="/s")  # type: ignore[arg-type]
