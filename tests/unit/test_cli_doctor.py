"""``kvhearth doctor``: each check on a machine that has it and on one that has not."""

from __future__ import annotations

import json
import resource
from pathlib import Path

import pytest

from kvhearth_server.cli import app
from kvhearth_server.cli.checks import Finding, Grade, Look, examine
from kvhearth_server.cli.probes import Installed, Machine
from kvhearth_server.config import Settings

POOL = "hugepages/hugepages-2048kB"
THP = "sys/kernel/mm/transparent_hugepage"


class Told(Machine):
    """A machine with files below a directory of its own, and a kernel that says what it is told."""

    def __init__(self, root: Path, *, good: bool, memlock: int = -1, nofile: int = 65536) -> None:
        super().__init__(root)
        self.good = good
        self.limits = {resource.RLIMIT_MEMLOCK: memlock, resource.RLIMIT_NOFILE: nofile}

    def limit(self, which: int) -> int:
        return self.limits[which]

    def kernel_release(self) -> str:
        return "6.5.0"

    def direct_io(self, folder: Path) -> str:
        return "" if self.good else "Invalid argument"

    def io_uring(self) -> str:
        return "" if self.good else "Operation not permitted"

    def peer_pidfd(self) -> bool:
        return self.good

    def populate(self) -> bool:
        return self.good

    def packages(self) -> list[Installed]:
        return [Installed("grpcio", "1.80.0" if self.good else "1.9.0", "1.66.2")]


def write(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def machine_files(root: Path, *, pages: int, available_mib: int, thp: str) -> None:
    meminfo = f"MemAvailable: {available_mib * 1024} kB\nHugepagesize: 2048 kB\n"
    write(root, "proc/meminfo", meminfo)
    for folder in (f"sys/kernel/mm/{POOL}", f"sys/devices/system/node/node0/{POOL}"):
        for name, count in (
            ("nr_hugepages", pages),
            ("free_hugepages", pages),
            ("resv_hugepages", 0),
            ("nr_overcommit_hugepages", 0),
            ("surplus_hugepages", 0),
        ):
            write(root, f"{folder}/{name}", f"{count}\n")
    write(root, f"{THP}/shmem_enabled", thp)


def findings(machine: Machine, tmp_path: Path, **settings: object) -> dict[str, Finding]:
    values = {"memory": "1GiB", "socket_dir": tmp_path / "s", **settings}
    look = Look(machine, Settings(**values), tmp_path)  # type: ignore[arg-type]
    found = examine(look)
    assert len({one.check for one in found}) == len(found)
    return {one.check: one for one in found}


def test_a_machine_that_has_everything(tmp_path: Path) -> None:
    machine_files(tmp_path, pages=512, available_mib=4096, thp="always [advise] never")
    found = findings(Told(tmp_path, good=True), tmp_path)
    assert {one.check for one in found.values() if one.grade is not Grade.OK} == {"arena_dir"}
    assert [one.check for one in found.values() if one.grade is Grade.OK and one.fix] == []


def test_a_machine_that_has_nothing_gets_a_line_for_each(tmp_path: Path) -> None:
    machine_files(tmp_path, pages=0, available_mib=100, thp="always advise [never]")
    machine = Told(tmp_path, good=False, memlock=8 << 20, nofile=1024)
    found = findings(machine, tmp_path)
    assert [one for one in found.values() if one.grade is not Grade.OK and not one.fix] == []
    warned = {one.check for one in found.values() if one.grade is Grade.WARN}
    failed = {one.check for one in found.values() if one.grade is Grade.FAIL}
    assert failed == {"memory", "version.grpcio"}
    assert warned == {
        *("hugepages", "hugepages.node0", "thp", "memlock", "nofile", "peer_pidfd", "populate"),
        *("o_direct", "io_uring", "arena_dir"),
    }
    assert found["hugepages"].fix == "run: sysctl -w vm.nr_hugepages=512"
    assert found["thp"].fix == f"run: echo advise > /{THP}/shmem_enabled"
    assert found["memory"].fix == "set a smaller memory: kvhearth serve --memory 75MiB"
    assert found["version.grpcio"].fix == "run: pip install 'grpcio>=1.66.2'"
    assert "LimitMEMLOCK=infinity" in found["memlock"].fix
    assert "ulimit -n 2176" in found["nofile"].fix


@pytest.mark.parametrize(
    ("policy", "grade"), [("require", Grade.FAIL), ("prefer", Grade.WARN), ("off", Grade.OK)]
)
def test_missing_huge_pages_weigh_what_the_settings_say(
    tmp_path: Path, policy: str, grade: Grade
) -> None:
    machine_files(tmp_path, pages=10, available_mib=4096, thp="[never]")
    found = findings(Told(tmp_path, good=True), tmp_path, hugepages=policy)
    assert found["hugepages"].grade is grade
    assert "10 of 10 pages of 2 MiB are free, the arena takes 512" in found["hugepages"].found


def test_an_arena_on_a_disk_fails(tmp_path: Path) -> None:
    machine_files(tmp_path, pages=512, available_mib=4096, thp="[advise]")
    found = findings(Told(tmp_path, good=True), tmp_path, arena_dir="/proc/kvhearth")
    assert found["arena_dir"].grade is Grade.FAIL


def test_this_machine(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ["doctor", "--memory", "64MiB", "--dir", str(tmp_path)]
    code = app.run([*words, "--json"])
    report = json.loads(capsys.readouterr().out)
    assert set(report) == {"ready", "findings"}
    assert code == (0 if report["ready"] else 1)
    checks = {one["check"] for one in report["findings"]}
    assert {"hugepages", "thp", "memlock", "nofile", "o_direct", "io_uring"} < checks
    assert {"version.grpcio", "version.protobuf", "version.numpy", "version.typer"} < checks
    for one in report["findings"]:
        assert set(one) == {"check", "grade", "found", "fix"}
        assert one["grade"] in ("ok", "warn", "fail")
        assert one["grade"] == "ok" or one["fix"]
    assert app.run(words) == code
    text = capsys.readouterr().out
    assert all(check in text for check in checks)


def test_what_is_tried_is_tried_for_real(tmp_path: Path) -> None:
    machine = Machine()
    assert machine.direct_io(tmp_path / "absent") == "No such file or directory"
    assert isinstance(machine.io_uring(), str)
    assert list(tmp_path.iterdir()) == []


def test_versions_are_compared_as_numbers() -> None:
    assert Installed("a", "1.10", "1.9").enough
    assert not Installed("a", "1.9", "1.10").enough
    assert not Installed("a", "", "0.1").enough
