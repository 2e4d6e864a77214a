"""A daemon with keys: restarts, kill -9, a lost key, another key; no plain bytes on the drive."""

from __future__ import annotations

import base64
import json
import secrets
from pathlib import Path

import pytest
from support.daemon import Daemon, running_daemon, until
from support.raw_door import new_keys
from support.ssd_kit import CONTRACT, PAGE, SSD, fetch_all, saved, store_all

from kvhearth_lab.harness.engine import Engine, content

OLD, NEW = (base64.b64encode(secrets.token_bytes(32)).decode() for _ in range(2))


def keys_file(path: Path, *keys: str) -> Path:
    path.touch(mode=0o600)
    rows = "".join(f"- {{id: k{number}, key: {key}}}\n" for number, key in enumerate(keys))
    path.write_text(f"default:\n{rows}")
    return path


def engine_of(daemon: Daemon) -> Engine:
    found = Engine(daemon.url(), CONTRACT, "engine")
    until(lambda: found.ready, "the engine is attached")
    return found


def kept(daemon: Daemon, keys: list[bytes]) -> list[bytes]:
    """Return the keys that a fresh daemon loads from its drive, every byte right."""
    until(lambda: daemon.read_back, "the log is recovered")
    engine = engine_of(daemon)
    try:
        return fetch_all(engine, keys)
    finally:
        engine.close()


@pytest.mark.parametrize("killed", [False, True], ids=["stopped", "killed"])
def test_restarts_rotation_and_a_lost_key(tmp_path: Path, killed: bool) -> None:
    folder = tmp_path / "ssd"
    path = keys_file(tmp_path / "keys.yaml", OLD)
    ssd = {**SSD, "ssd_dirs": [f"{folder}=64MiB"], "keys_file": path}
    with running_daemon(arena=False, **ssd) as daemon:
        engine = engine_of(daemon)
        keys = new_keys(24)
        store_all(engine, keys)
        saved(daemon, len(keys))
        epoch = engine.epoch
        engine.close()
        data = b"".join(each.read_bytes() for each in folder.glob("*.segment"))
        for key in keys:
            assert key in data, "its header names it"
            assert content(key, 0, epoch, PAGE)[:64].tobytes() not in data
        if killed:
            daemon.kill()
        else:
            daemon.terminate()
        daemon.start()
        assert len(kept(daemon, keys)) == len(keys)
        daemon.terminate()
        keys_file(path, NEW)
        daemon.start()
        assert kept(daemon, keys) == []
        (line,) = [json.loads(each) for each in daemon.own_lines() if "ssd.key_missing" in each]
        assert line["records"] == len(keys)
        assert OLD not in daemon.log_text()
        daemon.terminate()
        keys_file(path, NEW, OLD)
        daemon.start()
        assert len(kept(daemon, keys)) == len(keys)
        daemon.terminate()
