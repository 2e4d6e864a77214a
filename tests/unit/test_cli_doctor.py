"""``kvhearth doctor``: each check on a machine that passes it and on one that fails it."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
from support.cases import cases
from support.daemon import scratch
from support.native import without_native

from kvhearth_server.cli import app, doctor
from kvhearth_server.cli.doctor import Look, examine
from kvhearth_server.cli.machine import Machine
from kvhearth_server.config.load import Settings
from kvhearth_server.tiers.ssd.disk.probe import ProbeResult, choose
from kvhearth_server.transport.reports import Finding, Grade

POOL = "hugepages/hugepages-2048kB"
THP = "sys/kernel/mm/transparent_hugepage"


class Told(Machine):
    """A machine with files under a temporary directory and a scripted kernel."""

    def __init__(self, root: Path, *, good: bool, nofile: int = 65536) -> None:
        super().__init__(root)
        self.good = good
        self.device = (259, 1) if good else (0, 42)
        self.nofile = nofile
        self.broken = {} if good else {"libaio": "not permitted"}

    def descriptors(self) -> int:
        return self.nofile

    def direct_io(self, folder: Path) -> str:
        return "" if self.good else "Invalid argument"

    def device_of(self, folder: Path) -> int:
        return os.makedev(*self.device)

    def disk_interface(self, name: str, depth: int) -> ProbeResult:
        return ProbeResult(name, self.broken.get(name, ""))

    def space(self, existing: Path, folder: Path) -> tuple[int, int]:
        return (1 << 40 if self.good else 1 << 30), 1 << 29

    def peer_pidfd(self) -> bool:
        return self.good

    def populate(self) -> bool:
        return self.good

    def collapse(self) -> int:
        return 0 if self.good else errno.EINVAL

    def native_problem(self) -> str | None:
        return None if self.good else "not built; run: python -m kvhearth.native.build"


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


@pytest.fixture
def machine(tmp_path: Path) -> Told:
    """A machine that has everything but drives and GPUs."""
    machine_files(tmp_path, pages=512, available_mib=4096, thp="[advise]")
    return Told(tmp_path, good=True)


def a_drive(root: Path, name: str, number: str, *, model: str = "", partitions: int = 0) -> None:
    """A drive as in /sys; its partitions' numbers follow its own."""
    place = root / "sys/devices/block" / name
    write(place, "size", f"{2 << 30}\n")
    write(place, "device/model", f"{model}   \n")
    (root / "sys/block").mkdir(parents=True, exist_ok=True)
    (root / "sys/dev/block").mkdir(parents=True, exist_ok=True)
    (root / "sys/block" / name).symlink_to(place)
    (root / "sys/dev/block" / number).symlink_to(place)
    major, _, minor = number.partition(":")
    for index in range(1, partitions + 1):
        write(place, f"{name}p{index}/partition", f"{index}\n")
        link = root / "sys/dev/block" / f"{major}:{int(minor) + index}"
        link.symlink_to(place / f"{name}p{index}")


def gpus(root: Path, *, driver: str = "", on_bus: int = 0, nodes: int = 0) -> None:
    """NVIDIA GPUs; with a driver, those on the bus are bound to it."""
    for number in range(on_bus):
        place = f"sys/bus/pci/devices/0000:0{number}:00.0"
        write(root, f"{place}/vendor", "0x10de\n")
        write(root, f"{place}/class", "0x030200\n")
        if driver:
            info = f"proc/driver/nvidia/gpus/0000:0{number}:00.0/information"
            write(root, info, "Model: \t\t NVIDIA H200\nIRQ:   \t\t 71\n")
    write(root, "sys/bus/pci/devices/0000:09:00.0/vendor", "0x8086\n")
    write(root, "sys/bus/pci/devices/0000:09:00.0/class", "0x030000\n")
    if driver:
        line = f"NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {driver}  Release Build\n"
        write(root, "proc/driver/nvidia/version", f"{line}GCC version: gcc 12.2.0\n")
    for name in ("nvidiactl", *(f"nvidia{number}" for number in range(nodes))):
        write(root, f"dev/{name}", "")


def findings(machine: Machine, tmp_path: Path, **settings: object) -> dict[str, Finding]:
    values = {"memory": "1GiB", "socket_dir": tmp_path / "s", "http": "off", **settings}
    look = Look(machine, Settings(**values), tmp_path)  # type: ignore[arg-type]
    found, error = examine(look)
    assert len({one.check for one in found}) == len(found)
    started = [one for one in found if one.grade is Grade.FAIL]
    assert bool(started) == (error is not None), "serve's preflight alone fails a start"
    return {one.check: one for one in found}


def test_a_machine_that_has_everything(tmp_path: Path) -> None:
    machine_files(tmp_path, pages=512, available_mib=4096, thp="always [advise] never")
    a_drive(tmp_path, "nvme0n1", "259:0", model="SAMSUNG MZQL23T8HCLS-00A07", partitions=2)
    gpus(tmp_path, driver="580.95.05", on_bus=2, nodes=2)
    found = findings(Told(tmp_path, good=True), tmp_path)
    assert {one.check for one in found.values() if one.grade is not Grade.OK} == {"arena_dir"}
    assert [one.check for one in found.values() if one.grade is Grade.OK and one.fix] == []
    assert found["drive"].found.endswith(": on nvme0n1 (SAMSUNG MZQL23T8HCLS-00A07, 1 TiB)")
    assert found["nvidia"].found == "driver 580.95.05, 2 x NVIDIA H200"
    assert found["native"].found == "in use"


def test_a_machine_that_has_nothing_gets_a_line_for_each(tmp_path: Path) -> None:
    machine_files(tmp_path, pages=0, available_mib=100, thp="always advise [never]")
    gpus(tmp_path, on_bus=1)
    machine = Told(tmp_path, good=False, nofile=1024)
    found = findings(machine, tmp_path)
    assert [one for one in found.values() if one.grade is not Grade.OK and not one.fix] == []
    warned = {one.check for one in found.values() if one.grade is Grade.WARN}
    failed = {one.check for one in found.values() if one.grade is Grade.FAIL}
    assert failed == {"memory"}
    assert warned == {
        *("hugepages", "hugepages.node0", "thp", "nofile", "peer_pidfd", "populate"),
        *("o_direct", "ssd_interface", "arena_dir", "drive", "nvidia", "native"),
    }
    assert found["hugepages"].fix == "run: sysctl -w vm.nr_hugepages=512"
    assert found["thp"].fix == f"run: echo advise > /{THP}/shmem_enabled"
    assert "Invalid argument" in found["thp"].found
    assert "1GiB of memory are asked for, 100MiB are available" in found["memory"].found
    assert "ulimit -n 3328" in found["nofile"].fix
    assert found["native"].found == "not built"
    assert found["native"].fix == "run: python -m kvhearth.native.build"


def test_a_control_group_of_version_1_has_too_little_memory(tmp_path: Path) -> None:
    machine_files(tmp_path, pages=0, available_mib=8192, thp="[always]")
    write(tmp_path, "proc/self/cgroup", "4:memory:/pod\n")
    mount = "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
    write(tmp_path, "proc/self/mountinfo", mount)
    limit = "sys/fs/cgroup/memory/pod/memory.limit_in_bytes"
    write(tmp_path, limit, f"{400 << 20}\n")
    found = findings(Told(tmp_path, good=True), tmp_path)
    assert found["memory"].grade is Grade.FAIL
    assert f"400MiB are available by /{limit}" in found["memory"].found


@cases(("policy", "grade"), [("require", Grade.FAIL), ("prefer", Grade.WARN), ("off", Grade.OK)])
def test_missing_huge_pages_weigh_what_the_settings_say(
    tmp_path: Path, policy: str, grade: Grade
) -> None:
    machine_files(tmp_path, pages=10, available_mib=4096, thp="[never]")
    found = findings(Told(tmp_path, good=True), tmp_path, hugepages=policy)
    assert found["hugepages"].grade is grade
    assert {"10", "512"} < set(found["hugepages"].found.split())
    assert ("hugepages.node0" in found) == (policy != "off"), "nobody takes them"
    assert found["thp"].grade is Grade.OK, "collapsed pages do without the setting"
    assert "never" in found["thp"].found


def test_an_arena_on_a_disk_fails(tmp_path: Path, machine: Told) -> None:
    found = findings(machine, tmp_path, arena_dir="/proc/kvhearth")
    assert found["arena_dir"].grade is Grade.FAIL


def test_an_nvme_drive_that_is_not_used_is_named(tmp_path: Path, machine: Told) -> None:
    a_drive(tmp_path, "vda", "254:0")
    a_drive(tmp_path, "nvme1n1", "259:0", model="Amazon EC2 NVMe")
    a_drive(tmp_path, "loop0", "7:0")
    machine.device = (254, 0)
    found = findings(machine, tmp_path)["drive"]
    assert found.grade is Grade.WARN
    assert ": on vda (1 TiB, not NVMe); there is nvme1n1 (Amazon EC2 NVMe, 1 TiB)" in found.found
    assert found.fix.startswith("mount a file system of nvme1n1, then: kvhearth doctor --dir")


def test_the_drives_below_a_volume_are_found(tmp_path: Path) -> None:
    """LVM on a partition and on a whole drive."""
    a_drive(tmp_path, "nvme0n1", "259:0", partitions=1)
    a_drive(tmp_path, "nvme1n1", "259:5")
    a_drive(tmp_path, "dm-0", "253:0")
    slaves = tmp_path / "sys/devices/block/dm-0/slaves"
    slaves.mkdir()
    (slaves / "nvme0n1p1").symlink_to(tmp_path / "sys/devices/block/nvme0n1/nvme0n1p1")
    (slaves / "nvme1n1").symlink_to(tmp_path / "sys/devices/block/nvme1n1")
    machine = Machine(tmp_path)
    lower_tier = [each.name for each in machine.drives_under(os.makedev(253, 0))]
    assert lower_tier == ["nvme0n1", "nvme1n1"] == [each.name for each in machine.drives()]


# -- the SSD tier ----------------------------------------------------------------------------------

MOUNTS = """22 1 254:0 / / rw,relatime shared:1 - {root} /dev/vda rw
23 22 0:21 / /proc rw,nosuid - proc proc rw
24 22 259:1 / {place} rw,noatime shared:7 - {kind} /dev/nvme0n1p1 rw{options}
"""


def mounted(machine: Told, place: Path, kind: str = "ext4", options: str = "") -> None:
    """A file system of a drive, mounted at ``place``."""
    point = str(place).replace(" ", r"\040")  # as the kernel does
    text = MOUNTS.format(root="ext4", place=point, kind=kind, options=options)
    write(machine._root, "proc/self/mountinfo", text)
    machine.device = (259, 1)


def ssd_findings(machine: Told, tmp_path: Path, *dirs: str, **more: object) -> dict[str, Finding]:
    found = findings(machine, tmp_path, ssd_dirs=list(dirs), **more)
    return {name: one for name, one in found.items() if name.startswith("ssd.")} | {
        name: found[name] for name in ("ssd_interface", "nofile")
    }


def test_a_good_place_for_the_ssd_tier(tmp_path: Path, machine: Told) -> None:
    a_drive(tmp_path, "nvme0n1", "259:0", partitions=2)
    write(tmp_path, "sys/block/nvme0n1/queue/discard_max_bytes", "1\n")
    mounted(machine, tmp_path, options=",discard")
    found = ssd_findings(machine, tmp_path, f"{tmp_path}/kv=100GiB")
    assert {name: one.grade for name, one in found.items()} == dict.fromkeys(found, Grade.OK)
    parts = ("", ".o_direct", ".filesystem", ".space", ".drive", ".discard")
    assert {f"ssd.1{part}" for part in parts} < set(found)
    assert found["ssd.1"].found == f"{tmp_path}/kv: is made at the start"
    assert found["nofile"].found.startswith("65536, 256 sessions and 398 files of the SSD tier")


def test_a_bad_place_for_the_ssd_tier(tmp_path: Path, machine: Told) -> None:
    machine = Told(tmp_path, good=False)
    mounted(machine, tmp_path, kind="tmpfs")
    dirs = [f"{tmp_path}/kv=100GiB", f"{tmp_path}/not/there=100GiB"]
    found = ssd_findings(machine, tmp_path, *dirs)
    assert found["ssd.2"].grade is Grade.WARN, "the tier works with the other one"
    assert f"{tmp_path}/not does not exist" in found["ssd.2"].found
    assert found["ssd.2"].fix == "mount the drive there, or create it"
    warned = {name: one for name, one in found.items() if one.grade is Grade.WARN}
    assert {"ssd.1.o_direct", "ssd.1.filesystem", "ssd.1.space", "ssd.1.drive"} < set(warned)
    assert [one for one in warned.values() if not one.fix] == []
    assert "it is memory" in found["ssd.1.filesystem"].found
    assert found["ssd.1.space"].fix.endswith(f"--ssd-dir {tmp_path}/kv=1382MiB")


def test_a_drive_that_is_never_told_what_is_free(tmp_path: Path, machine: Told) -> None:
    a_drive(tmp_path, "nvme0n1", "259:0", partitions=2)
    write(tmp_path, "sys/block/nvme0n1/queue/discard_max_bytes", "1\n")
    mounted(machine, tmp_path)
    found = ssd_findings(machine, tmp_path, f"{tmp_path}/kv=100GiB")["ssd.1.discard"]
    assert found.grade is Grade.WARN
    assert "systemctl enable --now fstrim.timer" in found.fix
    write(tmp_path, "etc/systemd/system/timers.target.wants/fstrim.timer", "")
    found = ssd_findings(machine, tmp_path, f"{tmp_path}/kv=100GiB")["ssd.1.discard"]
    assert found.grade is Grade.OK


def test_a_directory_on_the_root_file_system_is_worth_a_word(tmp_path: Path, machine: Told) -> None:
    mounted(machine, Path("/elsewhere"))
    found = ssd_findings(machine, tmp_path, f"{tmp_path}/kv=100GiB")["ssd.1.filesystem"]
    assert (found.grade, found.found) == (Grade.WARN, "ext4, mounted at /")


@cases(
    ("wanted", "grade", "reported", "fix"),
    [
        ("auto", Grade.WARN, "auto -> threads; not libaio: not permitted", "run: sysctl"),
        ("threads", Grade.OK, "threads -> threads", ""),
        ("libaio", Grade.FAIL, "libaio -> none; libaio: not permitted", "set ssd_interface: auto;"),
    ],
)
def test_the_interface_that_a_daemon_takes_is_told(
    tmp_path: Path, machine: Told, *, wanted: str, grade: Grade, reported: str, fix: str
) -> None:
    machine.broken = {"libaio": "not permitted"}
    place = f"{tmp_path}/kv=100GiB"
    found = ssd_findings(machine, tmp_path, place, ssd_interface=wanted)["ssd_interface"]
    assert found.grade is grade
    assert reported in found.found
    assert found.fix.startswith(fix)
    assert bool(found.fix) == (grade is not Grade.OK)
    found = findings(machine, tmp_path, ssd_interface=wanted)["ssd_interface"]
    assert found.grade is (Grade.OK if grade is Grade.OK else Grade.WARN), "no directory asks it"


def test_no_interface_at_all(tmp_path: Path, machine: Told) -> None:
    machine.broken = dict.fromkeys(("libaio", "threads"), "not permitted")
    found = ssd_findings(machine, tmp_path, f"{tmp_path}/kv=100GiB")["ssd_interface"]
    assert found.grade is Grade.FAIL
    assert found.found.startswith("auto -> none; libaio: not permitted; threads")
    assert "preadv" in found.fix


@cases(
    ("free", "taken", "fix"),
    [
        (0, 0, "nothing can be stored there: name a directory on another file system"),
        (200 << 20, 1 << 20, "even the least, 257.3 MiB, has no room: free some, or name"),
        (200 << 20, 200 << 20, "free some, or ask for less: --ssd-dir "),
    ],
)
def test_less_is_asked_for_only_where_less_would_do(
    tmp_path: Path, machine: Told, *, free: int, taken: int, fix: str
) -> None:
    machine.space = lambda existing, folder: (free, taken)  # type: ignore[method-assign]
    found = ssd_findings(machine, tmp_path, f"{tmp_path}/kv=100GiB")["ssd.1.space"]
    assert found.grade is Grade.WARN
    assert found.fix.startswith(fix)


@cases(
    ("gpus_of", "grade", "reported"),
    [
        ({}, Grade.OK, "no NVIDIA GPU; the daemon needs none"),
        ({"on_bus": 2}, Grade.WARN, "2 GPUs of NVIDIA and no driver"),
        ({"driver": "470.256.02", "on_bus": 1, "nodes": 1}, Grade.WARN, "CUDA 12 needs 525"),
        ({"driver": "570.133.20", "on_bus": 1}, Grade.OK, "none can be opened here"),
        ({"driver": "580.95.05", "on_bus": 1, "nodes": 1}, Grade.OK, "in pieces"),
    ],
)
def test_drivers_of_gpus(gpus_of: Any, grade: Grade, reported: str) -> None:
    with scratch() as root:
        machine_files(root, pages=512, available_mib=4096, thp="[advise]")
        gpus(root, **gpus_of)
        found = findings(Told(root, good=True), root, memory="600GiB")["nvidia"]
    assert found.grade is grade
    assert reported in found.found
    assert ("ubuntu-drivers install" in found.fix) == (grade is Grade.WARN)


def test_nowhere_to_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A read-only container has no temporary directory; tests/integration runs a real one."""
    monkeypatch.setattr(doctor.tempfile, "tempdir", None)
    monkeypatch.setattr(doctor.tempfile, "_get_default_tempdir", _no_directory)
    assert app.run(["doctor", "--json", "--memory", "64MiB"]) in (0, 1, 3)
    checks = {one["check"] for one in json.loads(capsys.readouterr().out)["findings"]}
    assert "o_direct" in checks


def _no_directory() -> str:
    raise FileNotFoundError("no usable temporary directory")


def test_this_machine(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ["doctor", "--memory", "64MiB", "--dir", str(tmp_path)]
    code = app.run([*words, "--json"])
    report = json.loads(capsys.readouterr().out)
    assert set(report) == {"ready", "exit_code", "verdict", "findings"}
    assert code == report["exit_code"]
    assert (code == 0) == report["ready"]
    assert report["verdict"].startswith("ready" if report["ready"] else "not ready")
    checks = {one["check"]: one for one in report["findings"]}
    assert checks["ssd_interface"]["found"].startswith(f"auto -> {choose('auto', 32)[0]}")
    assert {"hugepages", "thp", "nofile", "o_direct", "drive", "nvidia"} < set(checks)
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
    assert machine.disk_interface("threads", 4) == ProbeResult("threads", "")
    mount = machine.place(tmp_path).mount
    assert mount is not None
    assert tmp_path.is_relative_to(mount.point)
    assert machine.place(Path("/proc/self")).mount == machine.place(Path("/proc")).mount
    free, taken = machine.space(tmp_path, tmp_path / "absent")
    assert free > 0
    assert taken == 0
    assert list(tmp_path.iterdir()) == []
    with without_native():
        assert machine.native_problem() == "turned off by KVHEARTH_NATIVE=0"
