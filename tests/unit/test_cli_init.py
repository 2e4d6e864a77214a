"""``kvhearth init``: settings that fit a machine, in files that the daemon and systemd take."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from kvhearth_server.cli import app
from kvhearth_server.cli import init as verb
from kvhearth_server.cli.init import FILE, UNIT, choices, unit_text
from kvhearth_server.cli.machine import Machine
from kvhearth_server.config.load import load_settings
from kvhearth_server.config.value_types import parse_size

pytestmark = pytest.mark.usefixtures("no_environment")
ROOT = Path(__file__).resolve().parents[2]
DEPLOYED = ROOT / "deploy/systemd/kvhearth.service"
PAGES = 4160
"""Some more huge pages than docs/operations.md reserves for 8 GiB."""


class Roomy(Machine):
    """A machine with as much room on each file system."""

    room = 100 << 30

    def space(self, existing: Path, folder: Path) -> tuple[int, int]:
        return self.room, 0


def machine(root: Path, pages: int, *mounts: tuple[Path, str]) -> Roomy:
    """A machine with 64 GiB available, as many free huge pages, and these mounts."""
    pool = root / "sys/kernel/mm/hugepages/hugepages-2048kB"
    pool.mkdir(parents=True)
    for name in ("nr_hugepages", "free_hugepages"):
        (pool / name).write_text(f"{pages}\n")
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text("MemAvailable: 67108864 kB\n")
    told = [(str(point).replace(" ", r"\040"), kind) for point, kind in mounts]
    lines = [f"30 29 0:27 / {point} rw shared:12 - {kind} none rw\n" for point, kind in told]
    (root / "proc/self/mountinfo").write_text("".join(lines))
    return Roomy(root)


def chosen(found: Machine, memory: int | None = None, *, system: bool = True) -> dict[str, object]:
    return {each.name: each.value for each in choices(found, memory, system=system)}


def test_huge_pages_are_taken_where_some_are_reserved(tmp_path: Path) -> None:
    values = chosen(machine(tmp_path, PAGES, (tmp_path, "hugetlbfs")))
    assert values["arena_dir"] == f"{tmp_path}/kvhearth"
    memory = parse_size(str(values["memory"]))
    assert 7.5 < memory / (1 << 30) <= 8


def test_without_them_half_of_the_memory_on_shared_memory(tmp_path: Path) -> None:
    found = machine(tmp_path, 0)
    values = chosen(found)
    assert values["arena_dir"] == "/dev/shm/kvhearth"
    assert parse_size(str(values["memory"])) == 32 << 30
    assert parse_size(str(chosen(found, 5 << 30)["memory"])) == 5 << 30
    own = chosen(found, system=False)
    assert re.fullmatch(r"/dev/shm/kvhearth-\d+", str(own["arena_dir"]))
    found.room = 10 << 30
    assert parse_size(str(chosen(found)["memory"])) == 9 << 30


def test_an_arena_without_room_is_not_kept(tmp_path: Path) -> None:
    found = machine(tmp_path, 0)
    found.room = 64 << 20  # docker's default
    kept = list(choices(found, None, system=True))
    values = {each.name: each.value for each in kept}
    assert values["arena_dir"] == "none"
    assert parse_size(str(values["memory"])) == 32 << 30
    assert chosen(found, 64 << 20)["arena_dir"] == "/dev/shm/kvhearth"
    unit = unit_text(tmp_path, kept, system=True).splitlines()
    assert [line for line in unit if line.startswith(("ExecStartPre=", "ReadWritePaths="))] == []


def test_an_nvme_drive_with_a_file_system_is_an_ssd_tier(tmp_path: Path) -> None:
    drive = tmp_path / "drive"
    drive.mkdir()
    found = machine(tmp_path, 0, (drive, "ext4"), (tmp_path, "tmpfs"), (Path("/boot"), "ext4"))
    assert "ssd_dirs" not in chosen(found), "not known to be on an NVMe drive"
    number = drive.stat().st_dev
    block = tmp_path / "sys/dev/block"
    block.mkdir(parents=True)
    device = tmp_path / "sys/block/nvme0n1"
    device.mkdir(parents=True)
    (device / "size").write_text("2000000000\n")
    (block / f"{number >> 8 & 0xFFF}:{number & 0xFF}").symlink_to(device)
    assert chosen(found)["ssd_dirs"] == [f"{drive}/kvhearth=80GiB"]
    found.room = 4 << 30
    assert "ssd_dirs" not in chosen(found), "too small"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the verb look at a machine without drives and huge pages."""
    found = machine(tmp_path / "machine", 0)
    monkeypatch.setattr(verb, "Machine", lambda: found)


@pytest.mark.usefixtures("here")
@pytest.mark.realtime("asks systemd and the command")
@pytest.mark.parametrize("mode", ["--user", "--system"])
def test_the_files_are_ones_that_daemon_and_systemd_take(
    tmp_path: Path, mode: str, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "new 100%"
    words = ["init", mode, "--memory", "1GiB", "--dir", str(place), "--json"]
    assert app.run(words) == 0
    told = json.loads(capsys.readouterr().out)
    settings = load_settings({}, Path(told["settings_file"]))
    assert settings.memory == 1 << 30
    assert str(settings.arena_dir) == told["settings"]["arena_dir"]
    text = Path(told["unit"]).read_text()
    assert f'Environment="KVHEARTH_CONFIG={place}%/{FILE}"\n' in text
    assert "User=" in text or mode == "--user", "whose the daemon is"
    assert f"WantedBy={'default' if mode == '--user' else 'multi-user'}.target\n" in text
    if tool := shutil.which("systemd-analyze"):
        done = subprocess.run(
            [tool, "verify", "--man=no", told["unit"]], capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.usefixtures("here")
def test_files_that_exist_stay_unless_forced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / UNIT).write_text("mine")
    words = ["init", "--user", "--dir", str(tmp_path)]
    assert app.run(words) == app.EXIT_CONFIG
    assert "--force" in capsys.readouterr().err
    assert app.run([*words, "--memory", "much"]) == app.EXIT_CONFIG
    assert "--memory: 'much': not a size" in capsys.readouterr().err
    assert (tmp_path / UNIT).read_text() == "mine"
    assert not (tmp_path / FILE).exists()
    assert app.run([*words, "--force"]) == 0
    assert "next:" in capsys.readouterr().out
    assert "[Service]" in (tmp_path / UNIT).read_text()


@pytest.mark.usefixtures("here")
def test_places_that_cannot_be_looked_at_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Such as below a directory that one may not enter, where ``stat`` fails as with this name."""
    place = tmp_path / ("x" * 300)
    assert app.run(["init", "--user", "--dir", str(place)]) == app.EXIT_CONFIG
    assert f"cannot write {place}" in capsys.readouterr().err
    assert "ssd_dirs" not in chosen(machine(tmp_path, 0, (place, "ext4")))


@pytest.mark.usefixtures("here")
def test_a_user_without_a_home_is_told_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("HOME", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 61234)  # no entry in passwd
    assert app.run(["init", "--user"]) == app.EXIT_CONFIG
    assert "--dir" in capsys.readouterr().err


@pytest.mark.usefixtures("here")
def test_the_systems_unit_is_the_deployed_one_for_another_place(tmp_path: Path) -> None:
    template = ROOT / "server/kvhearth_server/cli" / UNIT
    assert template.read_text() == DEPLOYED.read_text(), f"cp {DEPLOYED} {template}"
    assert app.run(["init", "--system", "--dir", str(tmp_path)]) == 0
    ours, theirs = ((path / UNIT).read_text().splitlines() for path in (tmp_path, DEPLOYED.parent))
    assert len(ours) == len(theirs)
    differ = [a.partition("=")[0] for a, b in zip(ours, theirs, strict=True) if a != b]
    assert set(differ) <= {"Environment", "ExecStartPre", "ExecStart", "ReadWritePaths"}
