"""The kernel's facts about pages, read from scripted and real trees."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.memory_places import mounted, tmpfs_directory

from kvhearth.memory_limits import tightest
from kvhearth_server.memory.mapping import (
    BASE_PAGE_BYTES,
    FilesystemKind,
    HugePool,
    KernelMemory,
    filesystem_kind,
)

MIB = 1 << 20
POOL = "sys/kernel/mm/hugepages/hugepages-2048kB"
THP = "sys/kernel/mm/transparent_hugepage"


def tree(root: Path, files: dict[str, str]) -> KernelMemory:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")
    return KernelMemory(root)


def test_pool_leaves_out_promised_pages_and_adds_overcommit(tmp_path: Path) -> None:
    kernel = tree(
        tmp_path,
        {
            f"{POOL}/nr_hugepages": "100",
            f"{POOL}/free_hugepages": "60",
            f"{POOL}/resv_hugepages": "20",
            f"{POOL}/nr_overcommit_hugepages": "5",
            f"{POOL}/surplus_hugepages": "2",
        },
    )
    assert kernel.pool(2 * MIB) == HugePool(2 * MIB, total=100, free=43)
    assert kernel.pool(1 << 30) == HugePool(1 << 30, total=0, free=0)


def test_shortage_names_free_needed_and_the_fix(tmp_path: Path) -> None:
    kernel = tree(
        tmp_path,
        {
            "proc/meminfo": "Hugepagesize:       2048 kB",
            f"{POOL}/nr_hugepages": "10",
            f"{POOL}/free_hugepages": "4",
        },
    )
    reported = kernel.pool_shortage(2 * MIB, 32)
    assert reported == "4 of 32 pages of 2MiB are free; run: sysctl -w vm.nr_hugepages=38"
    assert "hugepagesz=1G hugepages=3" in kernel.pool_shortage(1 << 30, 3)


def test_shortage_when_2mib_is_not_the_default_size(tmp_path: Path) -> None:
    kernel = tree(tmp_path, {"proc/meminfo": "Hugepagesize: 1048576 kB"})
    assert f"echo 7 > /{POOL}/nr_hugepages" in kernel.pool_shortage(2 * MIB, 7)


@pytest.mark.parametrize(
    ("top", "own", "chosen", "allowed"),
    [
        ("always within_size advise [never] deny force", None, "never", False),
        ("always within_size [advise] never deny force", None, "advise", True),
        ("[always] within_size advise never deny force", None, "always", True),
        ("always within_size advise never [deny] force", "[always] inherit", "deny", False),
        ("always within_size advise never deny [force]", None, "force", True),
        ("always within_size advise [never] deny force", "always [inherit]", "never", False),
        ("always within_size advise [never] deny force", "inherit [advise] never", "advise", True),
        ("always within_size [advise] never deny force", "inherit advise [never]", "never", False),
    ],
)
def test_thp_setting(tmp_path: Path, top: str, own: str | None, chosen: str, allowed: bool) -> None:
    files = {f"{THP}/shmem_enabled": top}
    if own is not None:
        files[f"{THP}/hugepages-2048kB/shmem_enabled"] = own
    kernel = tree(tmp_path, files)
    assert kernel.shmem_thp() == chosen
    assert kernel.memfd_thp_allowed() is allowed


def least(kernel: KernelMemory) -> tuple[str, int]:
    found = tightest(kernel.limits())
    assert found is not None
    return found.name, found.free_bytes


V2_MOUNT = "25 20 0:22 / /sys/fs/cgroup rw shared:4 - cgroup2 cgroup2 rw,nsdelegate"
HYBRID = (
    "31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755\n"
    "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
    "36 31 0:33 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
    "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw"
)
"""Mounts of a host with version 1 for memory, and version 2 beside it."""


def test_the_tightest_limit_of_groups_of_version_2(tmp_path: Path) -> None:
    files = {"proc/meminfo": "MemTotal: 9 kB\nMemAvailable: 1024 kB"}
    assert least(tree(tmp_path, files)) == ("MemAvailable of /proc/meminfo", MIB)
    files |= {
        "proc/self/cgroup": "0::/pods/pod1",
        "proc/self/mountinfo": V2_MOUNT,
        "sys/fs/cgroup/pods/pod1/memory.max": "max",
        "sys/fs/cgroup/pods/pod1/memory.current": "5",
        "sys/fs/cgroup/pods/memory.max": "500000",
        "sys/fs/cgroup/pods/memory.current": "450000",
        "sys/fs/cgroup/pods/memory.stat": "anon 400000\nactive_file 1000\ninactive_file 2000",
    }
    assert least(tree(tmp_path, files)) == ("/sys/fs/cgroup/pods/memory.max", 53_000)
    files["sys/fs/cgroup/memory.max"] = "10"
    assert least(tree(tmp_path, files)) == ("/sys/fs/cgroup/memory.max", 10)


def test_the_tightest_limit_of_groups_of_version_1(tmp_path: Path) -> None:
    top = "sys/fs/cgroup/memory"
    files = {
        "proc/meminfo": "MemTotal: 9 kB\nMemAvailable: 1024 kB",
        "proc/self/cgroup": "8:cpu,cpuacct:/other\n4:memory:/docker/a\n0::/",
        "proc/self/mountinfo": HYBRID,
        f"{top}/memory.limit_in_bytes": "9223372036854771712",
        f"{top}/docker/memory.limit_in_bytes": "600000",
        f"{top}/docker/a/memory.limit_in_bytes": "500000",
        f"{top}/docker/a/memory.usage_in_bytes": "450000",
        f"{top}/docker/a/memory.stat": "active_file 9\ntotal_active_file 1000",
        f"{top}/docker/b/memory.limit_in_bytes": "1",
    }
    name = f"/{top}/docker/a/memory.limit_in_bytes"
    assert least(tree(tmp_path, files)) == (name, 51_000)
    files[f"{top}/docker/memory.usage_in_bytes"] = "580000"
    assert least(tree(tmp_path, files)) == (f"/{top}/docker/memory.limit_in_bytes", 20_000)


@pytest.mark.parametrize(("group", "free"), [("/docker/a/own", 400), ("/elsewhere", 500)])
def test_a_containers_mount_shows_its_own_groups(tmp_path: Path, group: str, free: int) -> None:
    top = "sys/fs/cgroup/memory"
    files = {
        "proc/self/cgroup": f"4:memory:{group}",
        "proc/self/mountinfo": f"35 31 0:32 /docker/a /{top} rw - cgroup cgroup rw,memory",
        f"{top}/memory.limit_in_bytes": "500",
        f"{top}/own/memory.limit_in_bytes": "400",
    }
    assert least(tree(tmp_path, files))[1] == free


def test_the_limit_of_the_address_space(tmp_path: Path) -> None:
    limits = "Max data size             1     2     bytes\nMax address space         {}     bytes"
    files = {
        "proc/meminfo": f"MemTotal: 9 kB\nMemAvailable: {4 << 20} kB",
        "proc/self/limits": limits.format(f"{3 << 30}     unlimited"),
        "proc/self/statm": f"{(512 * MIB) // BASE_PAGE_BYTES} 429 401 5 0 123 0",
    }
    name = "RLIMIT_AS (ulimit -v; threads take 1GiB of it)"
    assert least(tree(tmp_path, files)) == (name, 1536 * MIB)
    files["proc/self/limits"] = limits.format("unlimited     unlimited")
    assert least(tree(tmp_path, files)) == ("MemAvailable of /proc/meminfo", 4 << 30)


def test_nothing_known_about_available_memory(tmp_path: Path) -> None:
    assert KernelMemory(tmp_path).limits() == []


def test_pmd_mapped_bytes_of_one_mapping(tmp_path: Path) -> None:
    smaps = (
        "7f0000000000-7f0000400000 rw-s 00000000 00:01 1  /memfd:a\n"
        "Size: 4096 kB\nShmemPmdMapped:     2048 kB\n"
        "7f0000400000-7f0000800000 rw-s 00000000 00:01 2  /memfd:b\n"
        "Size: 4096 kB\nShmemPmdMapped:     4096 kB"
    )
    kernel = tree(tmp_path, {"proc/self/smaps": smaps})
    assert kernel.pmd_mapped_bytes(0x7F0000000000) == 2 * MIB
    assert kernel.pmd_mapped_bytes(0x7F0000400000) == 4 * MIB
    assert kernel.pmd_mapped_bytes(0x1000) == 0


def test_kinds_of_file_systems(tmp_path: Path) -> None:
    with tmpfs_directory() as path:
        found = filesystem_kind(path)
        assert (found.kind, found.page_bytes) == (FilesystemKind.TMPFS, BASE_PAGE_BYTES)
    assert filesystem_kind(Path("/proc")).kind is FilesystemKind.OTHER
    with pytest.raises(FileNotFoundError):
        filesystem_kind(tmp_path / "absent")


def test_hugetlbfs_and_its_page_size(tmp_path: Path) -> None:
    with mounted("hugetlbfs", "pagesize=2M", tmp_path / "huge") as path:
        found = filesystem_kind(path)
        assert (found.kind, found.page_bytes) == (FilesystemKind.HUGETLBFS, 2 * MIB)


@pytest.mark.parametrize("option", ["never", "advise", "within_size", "always"])
def test_huge_option_of_a_tmpfs(tmp_path: Path, option: str) -> None:
    with mounted("tmpfs", f"size=1M,huge={option}", tmp_path / "t") as path:
        found = filesystem_kind(path)
        assert (found.huge_option, found.total_bytes) == (option, MIB)
        kernel = tree(tmp_path, {f"{THP}/shmem_enabled": "[never] deny force"})
        assert kernel.tmpfs_thp_allowed(found) is (option != "never")
        kernel = tree(tmp_path, {f"{THP}/shmem_enabled": "never [deny] force"})
        assert not kernel.tmpfs_thp_allowed(found)
