"""One daemon per directory; its lock is the last thing it releases."""

from __future__ import annotations

import fcntl
import os
import resource
import select
import socket
from pathlib import Path

import pytest
from support.daemon import until
from support.memory_places import Child, mounted, tmpfs_directory

from kvhearth.errors import KVHearthError, Reason
from kvhearth_server.memory.durable_file import LOCK_FILE_NAME, lock_directory

HOLDER = """
from pathlib import Path
from kvhearth_server.memory.durable_file import lock_directory
held = lock_directory(Path(arguments[0]))
count = int(arguments[1])
lines = []
while len(lines) < count:
    lines += socket.recv_fds(peer, 1, 1)[1]
peer.sendall(b"locked")
peer.recv(1)
"""


def busy(path: Path) -> bool:
    try:
        os.close(lock_directory(path))
    except KVHearthError as error:
        return error.reason is Reason.ARENA_BUSY and str(path) in error.message
    return False


def test_second_lock_is_refused_until_the_first_is_closed(tmp_path: Path) -> None:
    held = lock_directory(tmp_path)
    assert not os.get_inheritable(held)
    assert busy(tmp_path)
    os.close(held)
    assert not busy(tmp_path)
    assert os.listdir(tmp_path) == [LOCK_FILE_NAME]


def test_a_refused_attempt_leaves_no_descriptor(tmp_path: Path) -> None:
    held = lock_directory(tmp_path)
    before = len(os.listdir("/proc/self/fd"))
    assert busy(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == before
    os.close(held)
    assert len(os.listdir("/proc/self/fd")) == before - 1


def test_a_missing_directory_and_a_planted_link_are_refused(tmp_path: Path) -> None:
    with pytest.raises(KVHearthError, match="arena_unusable") as caught:
        lock_directory(tmp_path / "absent")
    assert "absent" in caught.value.message
    (tmp_path / LOCK_FILE_NAME).symlink_to("/etc/hostname")
    with pytest.raises(KVHearthError, match="arena_unusable"):
        lock_directory(tmp_path)


@pytest.mark.parametrize("place", ["disk", "tmpfs", "hugetlbfs"])
def test_the_lock_ends_with_a_kill(tmp_path: Path, place: str) -> None:
    def check(path: Path) -> None:
        with Child(HOLDER, str(path), "0") as child:
            child.expect(b"locked")
            assert busy(path)
            child.kill()
            until(lambda: not busy(path), "the lock of a killed process ends")

    if place == "disk":
        check(tmp_path)
    elif place == "tmpfs":
        with tmpfs_directory() as path:
            check(path)
    else:
        with mounted("hugetlbfs", "pagesize=2M", tmp_path / "huge") as path:
            check(path)


@pytest.mark.parametrize("attempt", range(3))
def test_every_life_line_is_cut_before_the_lock_comes_free(tmp_path: Path, attempt: int) -> None:
    """Readers trust the old boot while its attach socket is open; the successor must come after."""
    room = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    count = min(room // 4, 1000)
    with Child(HOLDER, str(tmp_path), str(count)) as child:
        lines = []
        poll = select.poll()
        for _ in range(count):
            ours, theirs = socket.socketpair()
            with theirs:
                socket.send_fds(child.socket, [b"x"], [theirs.fileno()])
            lines.append(ours)
            poll.register(ours, select.POLLRDHUP)
        child.expect(b"locked")
        assert poll.poll(0) == []
        descriptor = os.open(tmp_path / LOCK_FILE_NAME, os.O_RDWR)
        child.process.kill()
        # Blocks until the kernel hands over the lock: the tightest race possible.
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        cut = len(poll.poll(0))
        os.close(descriptor)
        for line in lines:
            line.close()
        assert cut == count
