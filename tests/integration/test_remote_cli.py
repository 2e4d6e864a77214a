"""``kvhearth remote`` and the doctor's probe, on a directory and a bucket that misbehaves."""

from __future__ import annotations

import builtins
import json
import os
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
from support.bad_bucket import bad_bucket
from support.movers import SPACE, mover_desk

from kvhearth_server.cli import remote
from kvhearth_server.cli.app import run
from kvhearth_server.cli.machine import Machine
from kvhearth_server.config.load import load_settings
from kvhearth_server.tier_startup import fleet_key
from kvhearth_server.tiers.base import Done, Outcome
from kvhearth_server.tiers.remote.helper.drivers.base import Listed, Refused
from kvhearth_server.tiers.remote.names import LAYOUT, MARK_NAME
from kvhearth_server.tiers.remote.url import lifecycle_rule, parse_remote

obstore = pytest.importorskip("obstore")


@pytest.fixture(scope="session", autouse=True)
def runtime() -> None:
    """Start the runtime of the library, which lasts as long as the process."""
    obstore.put(obstore.store.MemoryStore(), "name", b"")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a directory with four blocks, of which one is old, and an object of others."""
    path = tmp_path / "remote"
    path.mkdir()
    with mover_desk(f"file://{path}") as desk:
        desk.up().put(range(4))
    old = sorted((path / LAYOUT / SPACE).iterdir())[0]
    os.utime(old, (1_000_000_000, 1_000_000_000))
    (path / "theirs.txt").write_text("somebody else's")
    (path / LAYOUT / "notes").write_text("somebody else's")
    (path / LAYOUT / "probe-0123").write_text("left behind")
    os.utime(path / LAYOUT / "probe-0123", (1_000_000_000, 1_000_000_000))
    return path


def said(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, object]:
    assert run([*words, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert isinstance(report, dict)
    return report


def blocks(folder: Path) -> int:
    place = folder / LAYOUT / SPACE
    return len(list(place.iterdir())) if place.is_dir() else 0


def test_usage_by_space(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = said(capsys, "remote", "usage", "--remote", f"file://{folder}")
    spaces = report["spaces"]
    assert isinstance(spaces, dict)
    assert list(spaces) == [SPACE]
    assert spaces[SPACE]["objects"] == 4
    assert (report["foreign"], report["bytes"]) == (1, spaces[SPACE]["bytes"])
    assert run(["remote", "usage", "--remote", f"file://{folder}"]) == 0


def test_sweep_removes_old_blocks_only(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("remote", "sweep", "--older-than", "7d", "--remote", f"file://{folder}")
    assert said(capsys, *words)["removed"] == 1
    assert blocks(folder) == 3
    assert said(capsys, *words)["removed"] == 0
    assert not (folder / LAYOUT / "probe-0123").exists()
    assert (folder / LAYOUT / "notes").exists()


def test_purge_leaves_what_others_made(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("remote", "purge", "--remote", f"file://{folder}")
    assert run(list(words)) == 2, "without --yes"
    assert blocks(folder) == 4
    assert said(capsys, *words, "--yes", "--space", "0" * 32)["removed"] == 0
    assert (folder / MARK_NAME).exists()
    assert said(capsys, *words, "--yes")["removed"] == 4
    assert blocks(folder) == 0
    assert (folder / "theirs.txt").exists()
    assert (folder / LAYOUT / "notes").exists()
    assert not (folder / MARK_NAME).exists(), "nobody's any more"


@pytest.mark.parametrize("words", ["sweep --older-than 1d", "purge --yes"])
def test_what_is_listed_is_removed_before_more_is(
    words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A bucket may have more objects than memory holds."""
    from kvhearth_server.tiers.remote.helper.drivers.objects import ObjectDriver

    listed, removed = list[str](), list[str]()

    class Endless(ObjectDriver):
        async def list(self, prefix: str) -> AsyncIterator[builtins.list[Listed]]:
            for portion in range(40):
                names = [f"{LAYOUT}/{SPACE}/{portion:016x}{row:016x}" for row in range(100)]
                listed.extend(names)
                yield [Listed(name, 7, 1.0) for name in names]
                assert len(listed) - len(removed) <= 600

        async def delete(self, names: Sequence[str], deadline: float) -> builtins.list[Outcome]:
            removed.extend(name for name in names if name != MARK_NAME)
            return [Done()] * len(names)

    monkeypatch.setattr(remote, "open_driver", Endless)
    report = said(capsys, "remote", *words.split(), "--remote", "file:///tmp")
    assert (report["removed"], report["removed_bytes"]) == (4000, 28000)
    assert removed == listed


def test_a_remote_has_to_be_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["remote", "usage"]) == 2
    assert "--remote URL" in capsys.readouterr().err
    assert run(["remote", "usage", "--remote", "file:///none/such"]) == 1
    assert "no directory" in capsys.readouterr().err


def test_the_doctor_probes(tmp_path: Path) -> None:
    machine = Machine()
    assert machine.remote_problem(parse_remote(f"file://{tmp_path}"), b"key" * 9) == ""
    assert "another key" in machine.remote_problem(parse_remote(f"file://{tmp_path}"), b"k" * 32)
    secret = tmp_path / "secret"
    secret.write_text("id\nsecret\n")
    with bad_bucket() as bucket:
        bucket.mode = "404"
        url = parse_remote(f"{bucket.url}&secret_file={secret}")
        assert "bucket exists" in machine.remote_problem(url, b"k" * 32)


def test_a_key_is_made_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "fleet.key"
    assert run(["remote", "init-key", str(path)]) == 0
    made = path.read_text()
    assert len(bytes.fromhex(made)) == 32
    assert path.stat().st_mode & 0o777 == 0o600
    assert f"remote_fleet_key_file: {path}" in capsys.readouterr().out
    assert run(["remote", "init-key", str(path)]) == 2
    assert "copy it to the other hosts" in capsys.readouterr().err
    assert path.read_text() == made
    assert run(["remote", "init-key", str(tmp_path / "none" / "key")]) == 2
    settings = load_settings({"remote": "file:///mnt/kv", "remote_fleet_key_file": str(path)})
    assert fleet_key(settings).decode() == made.strip()


@pytest.mark.usefixtures("restored_logging")
def test_no_daemon_starts_without_its_fleets_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["serve", "--socket-dir", str(tmp_path), "--remote", f"file://{tmp_path}"]
    assert run(words) == 2
    assert "kvhearth remote init-key" in capsys.readouterr().err
    key = tmp_path / "key"
    key.write_text("a" * 64)
    key.chmod(0o644)
    assert run([*words, "--remote-fleet-key-file", str(key)]) == 2
    assert "0600" in capsys.readouterr().err
    key.chmod(0o600)
    key.write_text("short")
    assert run([*words, "--remote-fleet-key-file", str(key)]) == 2
    assert "too few" in capsys.readouterr().err


def test_a_lost_key_is_told_and_a_purge_gives_the_remote_to_another_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    machine, url = Machine(), parse_remote(f"file://{tmp_path}")
    assert machine.remote_problem(url, b"k" * 32) == ""
    problem = machine.remote_problem(url, b"l" * 32)
    assert "copy that fleet's key file" in problem
    assert "kvhearth remote purge --yes" in problem
    said(capsys, "remote", "purge", "--yes", "--remote", f"file://{tmp_path}")
    assert machine.remote_problem(url, b"l" * 32) == ""


def test_a_rule_for_each_kind_of_bucket() -> None:
    rule = lifecycle_rule(parse_remote("s3://bucket/a/b?ttl=3d"))
    assert "--bucket bucket" in rule
    text = rule.partition("--lifecycle-configuration ")[2].strip("'")
    (found,) = json.loads(text)["Rules"]
    assert (found["Filter"], found["Expiration"]) == ({"Prefix": "a/b/3/"}, {"Days": 3})
    assert '"age": 7' in lifecycle_rule(parse_remote("gs://bucket"))
    assert "c/3/" in lifecycle_rule(parse_remote("az://c?account=a"))


def test_rdma_that_this_host_does_not_have_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mooncake.store")
    from kvhearth_server.tiers.remote.helper.drivers import mooncake

    url = parse_remote("mooncake://h/p?protocol=rdma&insecure=yes")
    monkeypatch.setattr(mooncake, "_RDMA_DEVICES", Path("/none"))
    with pytest.raises(Refused, match="no RDMA device"):
        mooncake.MooncakeDriver(url)
