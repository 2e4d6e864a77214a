"""The SSD tier on file systems and under limits of the machine."""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path

import pytest
from support.memory_places import Child, mounted
from support.tiers import Opened

from kvhearth_server.tiers.base import Throttled
from kvhearth_server.tiers.ssd.superblock import SUPERBLOCK_NAME


def test_a_small_file_system_runs_full(tmp_path: Path) -> None:
    with (
        mounted("tmpfs", "size=1300k", tmp_path / "small") as folder,
        Opened(folder, real=True) as desk,
    ):
        desk.store_all(range(200))
        assert desk.loaded(range(190, 200)) == list(range(190, 200))
        assert "no space" in desk.reasons


@pytest.mark.parametrize("damage", [False, True])
def test_a_file_system_that_was_remounted_read_only(tmp_path: Path, damage: bool) -> None:
    with mounted("tmpfs", "size=16m", tmp_path / "small") as folder:
        with Opened(folder, real=True) as desk:
            desk.store_all(range(20))
        if damage:
            (folder / SUPERBLOCK_NAME).unlink()
        subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
        with Opened(folder, real=True) as desk:
            assert desk.loaded(range(20)) == list(range(20))
            assert "may not be written to (Read-only file system)" in desk.reasons
            assert desk.store([50]).parts[0][0] == Throttled("degraded", 60.0)


def test_blocks_that_cannot_be_reserved_are_written_by_us_and_not_by_the_library(
    tmp_path: Path,
) -> None:
    with (
        mounted("ramfs", "mode=700", tmp_path / "ram") as folder,
        Opened(folder, segments=6, real=True) as desk,
    ):
        desk.store_all(range(10))
        desk.rest()
        made = desk.tier.figures().directories[0].file_bytes
        assert desk.counts["written_bytes"] // made == 1


FORBID = """
import ctypes, struct
numbers = [int(word) for word in arguments]
program = struct.pack("<HBBI", 0x20, 0, 0, 0)  # load the system call's number
for number in numbers:
    program += struct.pack("<HBBI", 0x15, 0, 1, number) + struct.pack("<HBBI", 0x06, 0, 0, 0x50001)
program += struct.pack("<HBBI", 0x06, 0, 0, 0x7FFF0000)
memory = ctypes.create_string_buffer(program, len(program))
head = struct.pack("<HxxxxxxQ", len(program) // 8, ctypes.addressof(memory))
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0
assert libc.prctl(22, 2, head, 0, 0) == 0, ctypes.get_errno()
from kvhearth_server.tiers.ssd.disk.probe import choose
name, verdicts = choose()
lines = [name, *(f"{each.name}: {each.reason}" for each in verdicts)]
peer.sendall("\\n".join(lines).encode())
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the numbers are of x86_64")
def test_what_a_seccomp_profile_forbids_is_passed_over() -> None:
    with Child(FORBID, "206") as child:
        answer = b""
        while piece := child.socket.recv(4096):
            answer += piece
    name, first, *_ = answer.decode().split("\n")
    assert name == "threads"
    assert first == "libaio: not permitted: a seccomp profile"
