"""``kvhearth init``: settings that fit a machine, in files that the daemon and systemd take."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from kvhearth_server.cli import app
from kvhearth_server.cli.init import FILE, UNIT, choices
from kvhearth_server.cli.machine import Machine
from kvhearth_server.config.load import load_settings
from kvhearth_server.config.value_types import parse_size

pytestmark = pytest.mark.usefixtures("no_environment")
ROOT = Path(__file__).resolve().parents[2]
DEPLOYED = ROOT / "deploy/systemd/kvhearth.service"
PAGES = 4160
"""Some more huge pages than docs/operations.md reserves for 8 GiB."""


def machine(root: Path, pages: int, *mounts: tuple[Path, str]) -> Machine:
    """A machine with 64 GiB available, as many free huge pages, and these mounts."""
    pool = root / "sys/kernel/mm/hugepages/hugepages-2048kB"
    pool.mkdir(parents=True)
    for name in ("nr_hugepages", "free_hugepages"):
        (pool / name).write_text(f"{pages}\n")
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text("MemAvailable: 67108864 kB\n")
    lines = [f"30 29 0:27 / {point} rw shared:12 - {kind} none rw\n" for point, kind in mounts]
    (root / "proc/self/mountinfo").write_text("".join(lines))
    return Machine(root)


def chosen(found: Machine, memory: int | None = None, *, system: bool = True) -> dict[str, object]:
    return {each.name: each.value for each in choices(found, memory, system=system)}


def test_huge_pages_are_taken_where_some_are_reserved(tmp_path: Path) -> None:
    values = chosen(machine(tmp_path, PAGES, (tmp_path, "hugetlbfs")))
    assert values["arena_dir"] == f"{tmp_path}/kvhearth"
    memory = parse_size(str(values["memory"]))
    assert 7.5 < memory / (1 << 30) <= 8


def test_without_them_half_of_the_memory_on_shared_memory(tmp_path: Path) -> None:
    room = shutil.disk_usage("/dev/shm").free
    values = chosen(machine(tmp_path, 0))
    assert values["arena_dir"] == "/dev/shm/kvhearth"
    assert parse_size(str(values["memory"])) <= min(32 << 30, room)
    assert parse_size(str(chosen(Machine(tmp_path), 5 << 30)["memory"])) == 5 << 30
    own = chosen(Machine(tmp_path), system=False)
    assert re.fullmatch(r"/dev/shm/kvhearth-\d+", str(own["arena_dir"]))


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
    if shutil.disk_usage(drive).free < 8 << 30:
        pytest.skip("this drive has less than 8 GiB left")
    (place,) = chosen(found)["ssd_dirs"]  # type: ignore[misc]
    assert re.fullmatch(re.escape(str(drive)) + r"/kvhearth=\d+GiB", place)


@pytest.mark.realtime("asks systemd and the command")
@pytest.mark.parametrize("mode", ["--user", "--system"])
def test_the_files_are_ones_that_daemon_and_systemd_take(
    tmp_path: Path, mode: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["init", mode, "--memory", "1GiB", "--dir", str(tmp_path / "new"), "--json"]
    assert app.run(words) == 0
    told = json.loads(capsys.readouterr().out)
    settings = load_settings({}, Path(told["settings_file"]))
    assert settings.memory == 1 << 30
    assert str(settings.arena_dir) == told["settings"]["arena_dir"]
    text = Path(told["unit"]).read_text()
    assert f"Environment=KVHEARTH_CONFIG={tmp_path}/new/{FILE}\n" in text
    assert "User=" in text or mode == "--user", "whose the daemon is"
    assert f"WantedBy={'default' if mode == '--user' else 'multi-user'}.target\n" in text
    if tool := shutil.which("systemd-analyze"):
        done = subprocess.run(
            [tool, "verify", "--man=no", told["unit"]], capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stderr) == (0, "")


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


def test_the_systems_unit_is_the_deployed_one_for_another_place(tmp_path: Path) -> None:
    template = ROOT / "server/kvhearth_server/cli" / UNIT
    assert template.read_text() == DEPLOYED.read_text(), f"cp {DEPLOYED} {template}"
    assert app.run(["init", "--system", "--dir", str(tmp_path)]) == 0
    ours, theirs = ((path / UNIT).read_text().splitlines() for path in (tmp_path, DEPLOYED.parent))
    assert len(ours) == len(theirs)
    differ = [a.partition("=")[0] for a, b in zip(ours, theirs, strict=True) if a != b]
    assert set(differ) <= {"Environment", "ExecStartPre", "ExecStart", "ReadWritePaths"}
