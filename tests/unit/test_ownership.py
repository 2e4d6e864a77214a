"""Files and directories of other users are refused, and no symbolic link is followed."""

from __future__ import annotations

import asyncio
import os
import stat
from pathlib import Path

import pytest
from support.core_kit import refused

from kvhearth.errors import Reason
from kvhearth.wire.handshake import Hello
from kvhearth_server.engine.epoch_store import RESERVE_BYTES, EpochStore
from kvhearth_server.observability.counters import Counters
from kvhearth_server.observability.metrics import COUNTERS
from kvhearth_server.ownership import foreign, read_own, read_secret, socket_mask
from kvhearth_server.tiers.base import NAMESPACES_NAME
from kvhearth_server.tiers.ssd.files import Files
from kvhearth_server.transport.attach import Admission, Tenancy


def test_a_directory_is_ones_own_unless_others_may_write_to_it(tmp_path: Path) -> None:
    for mode in (0o700, 0o755, 0o1755):
        tmp_path.chmod(mode)
        assert foreign(tmp_path) == ""
    for mode in (0o770, 0o702, 0o1777):
        tmp_path.chmod(mode)
        assert f"mode {mode:04o}" in foreign(tmp_path)


FS_GROUP = 2000


@pytest.mark.parametrize(
    ("kind", "mode", "groups", "accepted"),
    [
        ("folder", 0o2770, [FS_GROUP], True),
        ("folder", 0o2775, [FS_GROUP], True),
        ("folder", 0o2770, [], False),
        ("folder", 0o770, [FS_GROUP], False),
        ("folder", 0o2777, [FS_GROUP], False),
        ("file", 0o660, [FS_GROUP], True),
        ("file", 0o660, [], False),
        ("file", 0o620, [FS_GROUP], False),
        ("file", 0o666, [FS_GROUP], False),
    ],
)
def test_bits_of_an_fs_group(
    tmp_path: Path, kind: str, mode: int, groups: list[int], accepted: bool
) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, to have another group")
    place = tmp_path / kind
    place.mkdir() if kind == "folder" else place.touch()
    os.chown(place, -1, FS_GROUP)
    place.chmod(mode)
    before = os.getgroups()
    os.setgroups(groups)
    try:
        assert (foreign(place) == "") is accepted
        if kind == "file":
            with pytest.raises(PermissionError):
                read_secret(place, 10)
    finally:
        os.setgroups(before)


def test_another_users_file(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, to give a file to another user")
    path = tmp_path / "file"
    path.write_bytes(b"x")
    os.chown(path, 65534, 65534)
    assert foreign(path) == "user 65534 owns it"
    with pytest.raises(PermissionError, match="user 65534 owns it"):
        read_own(path)
    with pytest.raises(PermissionError, match="user 65534 owns it"):
        Files().open(path)


def test_reading_follows_no_link_and_has_a_bound(tmp_path: Path) -> None:
    path, link = tmp_path / "file", tmp_path / "link"
    path.write_bytes(b"12345")
    link.symlink_to(path)
    assert read_own(path, 5) == b"12345"
    with pytest.raises(OSError, match="too large"):
        read_own(path, 4)
    with pytest.raises(OSError, match="symbolic links"):
        read_own(link)
    os.mkdir(tmp_path / "folder")
    with pytest.raises(OSError, match="directory"):
        read_own(tmp_path / "folder")


@pytest.mark.parametrize(("owner_only", "mode"), [(False, 0o666), (True, 0o600)])
def test_a_socket_is_open_without_a_chmod(tmp_path: Path, owner_only: bool, mode: int) -> None:
    before = os.umask(0o077)
    try:
        with socket_mask(owner_only=owner_only):
            os.mknod(tmp_path / "socket", stat.S_IFSOCK | 0o777)
        (tmp_path / "file").touch()
    finally:
        os.umask(before)
    modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("socket", "file")]
    assert modes == [mode, 0o600]


def test_the_namespaces_do_not_follow_a_planted_link(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_bytes(b"theirs")
    folder = tmp_path / "kv"
    folder.mkdir()
    (folder / f"{NAMESPACES_NAME}.new").symlink_to(target)
    catalogue = EpochStore([folder], Counters(COUNTERS))
    catalogue.write({"lineage": "a", "next_session": 1, "epoch_floor": 0}, [])
    asyncio.run(catalogue.confirm())
    catalogue.close()
    assert target.read_bytes() == b"theirs"


def test_huge_namespaces_are_not_read(tmp_path: Path) -> None:
    with (tmp_path / NAMESPACES_NAME).open("wb") as file:
        file.truncate(RESERVE_BYTES + 1)
    assert EpochStore([tmp_path], Counters(COUNTERS)).read() is None


def test_only_a_gateway_speaks_for_a_tenant() -> None:
    admission = Admission([Tenancy("a", (1,)), Tenancy("b", (2,))], gateway_uids=(9,))

    def hello(tenant: str) -> Hello:
        return Hello(1, "engine", "{}", scheduler=True, rank=0, tenant=tenant)

    assert admission.tenant(1, hello("")) == "a"
    assert admission.tenant(9, hello("b")) == "b"
    for uid, tenant in ((1, "b"), (1, "a"), (3, ""), (9, "c")):
        with refused(Reason.PEER_NOT_ALLOWED):
            admission.tenant(uid, hello(tenant))
