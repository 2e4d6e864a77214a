"""Upgrade and rollback: an older daemon and client, from their sources, beside the present ones.

``tests/golden/older`` has the sources of older commits, made by::

    git archive COMMIT client/kvhearth server/kvhearth_server pyproject.toml LICENSE | xz -9e
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO

import pytest
from support.cached import cached_engine
from support.daemon import Daemon, directories
from support.raw_door import new_keys

from kvhearth_lab.harness.daemon import SERVE, Process

ROOT = Path(__file__).resolve().parents[2]
OLDER = sorted((ROOT / "tests/golden/older").glob("*.tar.xz"))
EXAMPLE = ROOT / "deploy/examples/quickstart/store_and_load.py"
PROMOTED_S = 10.0


class Release:
    """The sources of a commit, unpacked."""

    def __init__(self, folder: Path) -> None:
        self.path = f"{folder / 'client'}{os.pathsep}{folder / 'server'}"

    def serve(self, flags: list[str], environment: Mapping[str, str], log: IO[bytes]) -> Process:
        """Start its daemon."""
        return SERVE(flags, {**environment, "PYTHONPATH": self.path}, log)

    def run(self, code: str) -> str:
        """Run Python with its client; return the output."""
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONPATH": self.path},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture(scope="module", params=OLDER, ids=lambda path: path.name.partition(".")[0])
def older(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Release:
    folder = tmp_path_factory.mktemp("older")
    with tarfile.open(request.param) as archive:
        archive.extractall(folder, filter="data")
    release = Release(folder)
    assert str(folder) in release.run("import kvhearth; print(kvhearth.__file__)")
    return release


Pair = tuple[Daemon, Daemon]


@pytest.fixture
def pair(older: Release) -> Iterator[Pair]:
    """An older and the present daemon of the same directories; only one of them may run."""
    with directories() as (folder, arena_dir):
        both = Daemon(folder, arena_dir, starter=older.serve), Daemon(folder, arena_dir)
        yield both
        for each in both:
            each.kill()


def test_an_arena_goes_to_the_present_daemon_and_back(pair: Pair) -> None:
    before, now = pair
    keys, more = new_keys(60), new_keys(20)
    before.start()
    with cached_engine(before.url()) as engine:  # the present client at the older daemon
        assert engine.store(keys).stored == 60
    before.kill()
    now.start()
    assert now.ready()["adopted_blocks"] == 60
    with cached_engine(now.url()) as engine:
        assert engine.load(keys).loaded.all()
        assert engine.store(more).stored == 20
    now.kill()
    before.start()
    with cached_engine(before.url()) as engine:
        assert engine.load([*keys, *more]).loaded.all()
    assert before.terminate() == 0


def test_an_ssd_tier_goes_to_the_present_daemon_and_back(older: Release, tmp_path: Path) -> None:
    keys, more = new_keys(40), new_keys(10)
    settings = {"ssd_dirs": f"{tmp_path}/ssd=128MiB", "ssd_segment_bytes": "4MiB"}
    with directories(arena=False) as (folder, _):
        before = Daemon(folder, None, starter=older.serve, **settings)
        now = Daemon(folder, None, **settings)
        try:
            before.start()
            with cached_engine(before.url()) as engine:
                assert engine.store(keys).stored == 40
            assert before.terminate() == 0
            now.start()
            with cached_engine(now.url()) as engine:
                assert engine.load(keys, PROMOTED_S).loaded.all()
                assert engine.store(more).stored == 10
            assert now.terminate() == 0
            before.start()
            with cached_engine(before.url()) as engine:
                assert engine.load([*keys, *more], PROMOTED_S).loaded.all()
            assert before.terminate() == 0
        finally:
            before.kill()
            now.kill()


def test_an_older_client_shares_blocks_with_the_present_one(older: Release) -> None:
    with directories() as (folder, arena_dir):
        now = Daemon(folder, arena_dir)
        try:
            now.start()
            code = EXAMPLE.read_text().replace("kvhearth+unix:", now.url())
            assert "8 stored, 0 there already" in older.run(code)
            present = subprocess.run(
                [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
            ).stdout
            assert "8 of 8 blocks were there" in present
            assert "128 tokens need no prefill" in older.run(code)
        finally:
            now.kill()
