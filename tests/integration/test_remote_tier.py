"""Daemons that share a remote tier: what one stores, another one or its successor loads."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.cached import CachedEngine, cached_engine
from support.daemon import Daemon, stopped_daemon, until
from support.ssd_kit import SSD, new_keys

ALL = {"remote_write": "all"}


@contextlib.contextmanager
def sharer(folder: Path, **settings: object) -> Iterator[Daemon]:
    """A daemon without durable memory that shares a scripted remote."""
    with stopped_daemon(arena=False, **{**ALL, **settings}) as daemon:
        daemon.remotes = [folder]
        daemon.start()
        yield daemon
        daemon.wait_quiet()


def published(daemon: Daemon, blocks: int) -> None:
    """Wait until a daemon has published so many blocks."""
    until(lambda: daemon.counters()["published_blocks"] >= blocks, "blocks are published")


def loaded(engine: CachedEngine, keys: list[bytes]) -> int:
    """Load keys, which may wait for the remote; return the blocks that came."""
    return int(engine.load(keys, wait_s=5.0).loaded.sum())


@pytest.mark.parametrize("ssd", [False, True])
def test_an_empty_daemon_loads_what_an_earlier_one_published(tmp_path: Path, ssd: bool) -> None:
    keys = new_keys(40)
    more = {**SSD, "ssd_dirs": [f"{tmp_path}/ssd=32MiB"]} if ssd else {}
    (remote := tmp_path / "remote").mkdir()
    with sharer(remote, **more) as daemon, cached_engine(daemon.url()) as engine:
        engine.store(keys)
        published(daemon, len(keys))
    with sharer(remote) as daemon, cached_engine(daemon.url()) as engine:
        assert loaded(engine, keys) == len(keys)
        assert loaded(engine, new_keys(3)) == 0


def test_one_daemon_loads_what_another_one_published(tmp_path: Path) -> None:
    keys, url = new_keys(40), f"file://{tmp_path}/shared"
    (tmp_path / "shared").mkdir()
    settings = {"remote": url, "remote_staging": "8MiB", **ALL}
    with (
        stopped_daemon(arena=False, **settings) as one,
        stopped_daemon(arena=False, **settings) as other,
    ):
        one.start()
        other.start()
        with cached_engine(one.url()) as engine:
            engine.store(keys)
            published(one, len(keys))
        with cached_engine(other.url()) as engine:
            until(lambda: loaded(engine, keys) == len(keys), "the other one loads all")
            assert loaded(engine, new_keys(3)) == 0
