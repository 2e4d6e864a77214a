"""``kvhearth doctor`` predicts the outcome of ``kvhearth serve`` with the same flags."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.daemon import Daemon, directories, running_daemon, stopped_daemon, until
from support.memory_places import HUGE, mounted, on_hugetlbfs, tmpfs_directory

from kvhearth_lab.harness import HUNG_S
from kvhearth_lab.harness.engine import contract_of, engine_of
from kvhearth_server.cli import app
from kvhearth_server.config.load import Settings
from kvhearth_server.config.value_types import parse_size
from kvhearth_server.memory.mapping import FilesystemKind, KernelMemory, filesystem_kind
from kvhearth_server.memory.plan import CATALOGUE_NAME
from kvhearth_server.tiers.ssd.superblock import SUPERBLOCK_NAME

ROOT = Path(__file__).resolve().parents[2]
NR_HUGEPAGES = Path("/proc/sys/vm/nr_hugepages")


def listing(*folders: Path | None) -> list[str]:
    """Returns every path below some directories."""
    found = [each for each in folders if each and os.path.isdir(each)]
    return sorted(str(path) for each in found for path in each.rglob("*"))


def advised(daemon: Daemon, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Returns exit code and verdict of ``doctor``, which leaves nothing behind."""
    before = listing(daemon.socket_dir, daemon.arena_dir)
    capsys.readouterr()
    code = app.run(["doctor", "--json", *daemon.flags()])
    out = capsys.readouterr()
    assert listing(daemon.socket_dir, daemon.arena_dir) == before
    if code == app.EXIT_CONFIG and not out.out:
        return code, out.err
    report = json.loads(out.out)
    assert report["exit_code"] == code
    assert report["ready"] == (code == 0)
    assert code == 0 or [one for one in report["findings"] if one["grade"] == "fail"]
    return code, report["verdict"]


def happened(daemon: Daemon) -> int:
    """Returns the exit code of ``serve``, 0 if it becomes ready."""
    process = daemon.launch()
    until(
        lambda: process.poll() is not None or any('"ready"' in each for each in daemon.own_lines()),
        "it is ready or ends",
        HUNG_S,
    )
    code = process.poll()
    daemon.kill()
    return 0 if code is None else code


# -- the table -------------------------------------------------------------------------------------


class World:
    """A daemon that has not started, and a folder, in which something is made wrong."""

    def __init__(self, daemon: Daemon, folder: Path, undo: contextlib.ExitStack) -> None:
        self.daemon, self.folder, self._undo = daemon, folder, undo

    def set(self, **values: object) -> None:
        self.daemon.settings.update(values)

    def arena_at(self, name: str, make: Callable[[Path], object] | None = None) -> None:
        self.daemon.arena_dir = self.folder / name
        if make:
            make(self.daemon.arena_dir)

    def arena_on(self, kind: str, options: str, name: str = ".", **values: object) -> None:
        self.daemon.arena_dir = self._mounted(kind, options) / name
        self.set(**values)

    def earlier_arena(self, **values: object) -> Path:
        """Leave an arena on tmpfs, and return its directory."""
        self.daemon.arena_dir = folder = self._undo.enter_context(tmpfs_directory())
        self._start_once()
        self.set(**values)
        return folder

    def new_arena(self, name: str = ".", mode: int = 0o700) -> None:
        folder = self._undo.enter_context(tmpfs_directory())
        folder.chmod(mode)
        self.daemon.arena_dir = folder / name

    def arena_in_use(self) -> None:
        self.daemon.arena_dir = self._undo.enter_context(running_daemon()).arena_dir

    def drives(self, *names: str, mode: int = 0o700) -> Path:
        """Give the daemon SSD directories, of which the folder has ``drive`` and ``same``."""
        (self.folder / "drive").mkdir(mode=0o700)
        (self.folder / "drive").chmod(mode)
        (self.folder / "same").symlink_to(self.folder / "drive")
        (self.folder / "file").touch()
        self.set(ssd_dirs=[f"{self.folder / name}=300MiB" for name in names])
        return self.folder / names[0]

    def drive_on(self, options: str, name: str = ".") -> None:
        self.set(ssd_dirs=[f"{self._mounted('tmpfs', options) / name}=300MiB"])

    def foreign_head(self) -> None:
        folder = self.drives("drive")
        self._start_once()
        given_to_nobody(folder / SUPERBLOCK_NAME)

    def port_in_use(self) -> None:
        taken = self._undo.enter_context(socket.create_server(("127.0.0.1", 0)))
        self.set(http=f"127.0.0.1:{taken.getsockname()[1]}")

    def sockets_in_use(self) -> None:
        self.daemon.socket_dir = self._undo.enter_context(running_daemon(arena=False)).socket_dir

    def sockets_at(self, path: str) -> None:
        (self.folder / "file").touch()
        self.daemon.socket_dir = self.folder / path

    def sockets_by_link(self) -> None:
        place = self.daemon.socket_dir.with_name("link")
        place.symlink_to(self.own_sockets())
        self.daemon.socket_dir = place

    def own_sockets(self, below: str = ".", mode: int = 0o700) -> Path:
        """Make the socket directory, and return it."""
        (self.daemon.socket_dir / below).mkdir(parents=True, exist_ok=True)
        self.daemon.socket_dir.chmod(mode)
        return self.daemon.socket_dir

    def _mounted(self, kind: str, options: str) -> Path:
        return self._undo.enter_context(mounted(kind, options, self.folder / "mount"))

    def _start_once(self) -> None:
        self.daemon.start()
        self.daemon.kill()


def given_to_nobody(path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, to give a file to another user")
    os.chown(path, 65534, 65534)


# What makes the world so, the exit status, and texts of the last line.
CASES: dict[str, tuple[Any, ...]] = {
    "nothing is wrong": (lambda w: w.set(), 0),
    "an arena on tmpfs": (lambda w: w.earlier_arena(), 0),
    "an arena directory without a parent": (
        *(lambda w: w.arena_at("no/arena"), 3, "arena_dir", "create it"),
    ),
    "an arena directory that is a file": (lambda w: w.arena_at("file", Path.touch), 3, "arena_dir"),
    "an arena directory of too long a name": (lambda w: w.arena_at("x" * 300), 3),
    "a hugetlbfs that is not mounted": (
        *(lambda w: w.arena_at("huge", Path.mkdir), 3),
        *("neither on hugetlbfs nor on tmpfs", "/huge"),
    ),
    "a read-only arena directory": (lambda w: w.arena_on("tmpfs", "ro,size=64m"), 3),
    "an arena directory to be made on a read-only tmpfs": (
        *(lambda w: w.arena_on("tmpfs", "ro,size=64m", "arena"), 3),
    ),
    "a tmpfs without room for the catalogue": (lambda w: w.arena_on("tmpfs", "size=30m"), 3),
    "a tmpfs with room for all": (lambda w: w.arena_on("tmpfs", "size=64m"), 0),
    "hugetlbfs without a page": (
        *(lambda w: w.arena_on("hugetlbfs", "pagesize=2M", hugepages="prefer"), 3),
    ),
    "hugetlbfs with huge pages off": (lambda w: w.arena_on("hugetlbfs", "pagesize=2M"), 3),
    "required huge pages that are not there": (
        *(lambda w: w.set(hugepages="require"), 3, "pages of 2MiB are free", "run: "),
    ),
    "required huge pages on tmpfs": (
        *(lambda w: w.earlier_arena(hugepages="require"), 3),
        *("huge pages are required", "/dev/hugepages"),
    ),
    "more memory than there is": (lambda w: w.set(memory="64TiB", slab_bytes="64MiB"), 3),
    "an arena of less memory": (lambda w: w.earlier_arena(memory="32MiB"), 0),
    "an arena of another geometry": (lambda w: w.earlier_arena(slab_bytes="4MiB"), 3),
    "discarding an arena": (lambda w: w.earlier_arena(slab_bytes="4MiB", discard_arena=True), 0),
    "an arena directory that the daemon makes": (lambda w: w.new_arena("arena"), 0),
    "an arena directory that others may write to": (lambda w: w.new_arena(mode=0o777), 3),
    "another user's arena directory": (lambda w: given_to_nobody(w.earlier_arena()), 3),
    "another user's catalogue": (
        *(lambda w: given_to_nobody(w.earlier_arena() / CATALOGUE_NAME), 3),
    ),
    "an arena that is in use": (lambda w: w.arena_in_use(), 3),
    "a good SSD directory": (lambda w: w.drives("drive/kv"), 0),
    "an SSD directory without a parent": (lambda w: w.drives("no/kv"), 3),
    "an SSD directory that is a file": (lambda w: w.drives("file"), 3),
    "an SSD directory of too long a name": (lambda w: w.drives("x" * 300), 3),
    "an SSD directory that others may write to": (lambda w: w.drives("drive", mode=0o777), 3),
    "another user's SSD directory file": (lambda w: w.foreign_head(), 3),
    "one SSD directory of two": (lambda w: w.drives("no/kv", "drive/kv"), 0),
    "SSD directories that are one": (lambda w: w.drives("drive", "same"), 2),
    "a drive with too little room": (lambda w: w.drive_on("size=16m"), 0),
    "a read-only drive": (lambda w: w.drive_on("ro,size=128m"), 3),
    "an SSD directory to be made on a read-only drive": (
        *(lambda w: w.drive_on("ro,size=128m", "kv"), 3),
    ),
    "an HTTP port that is in use": (lambda w: w.port_in_use(), 1),
    "sockets that are in use": (lambda w: w.sockets_in_use(), 1),
    "sockets where nothing can be made": (
        *(lambda w: w.sockets_at("/proc/kvhearth"), 1, "/proc/kvhearth", "--socket-dir"),
    ),
    "sockets below a file": (lambda w: w.sockets_at("file/s"), 1, "/file/s", "--socket-dir"),
    "a socket's name that is a directory": (
        *(lambda w: w.own_sockets("attach.sock"), 1, "--socket-dir"),
    ),
    "sockets by way of a link": (lambda w: w.sockets_by_link(), 1, "symbolic link"),
    "a socket directory that a group may write to": (lambda w: w.own_sockets(mode=0o770), 1),
    "another user's socket directory": (lambda w: given_to_nobody(w.own_sockets()), 1),
    "sockets with a path that is too long": (
        *(lambda w: w.sockets_at("/tmp/" + "x" * 120), 2, "shorter directory"),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_doctor_says_what_serve_does(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prepare, expected, *words = CASES[name]
    without_pages = "required huge" in name or "without a page" in name
    if without_pages and KernelMemory().pool(HUGE).free:
        pytest.skip("this machine has huge pages")
    if "not mounted" in name and filesystem_kind(tmp_path).kind is not FilesystemKind.OTHER:
        pytest.skip("the temporary directory is memory")
    with contextlib.ExitStack() as undo, stopped_daemon(arena=False) as daemon:
        prepare(World(daemon, tmp_path, undo))
        code, verdict = advised(daemon, capsys)
        assert (code, happened(daemon)) == (expected, expected), daemon.log_tail()
        if code:
            lines = daemon.log_text().splitlines()
            own = [one for one in lines if one.startswith(("kvhearth:", "Traceback"))]
            assert own == lines[-1:]
            reported = lines[-1].removeprefix("kvhearth: error: ")
            assert [each for each in words if each not in reported] == []
            # Except for the memory that is available at the moment.
            assert re.sub(r"\d+", "N", reported) in re.sub(r"\d+", "N", verdict), "the same words"
            assert ("Read-only file system" in verdict) is ("read-only" in name)


def test_the_verdict_is_the_last_line(tmp_path: Path) -> None:
    with stopped_daemon(arena=False) as daemon:
        daemon.arena_dir = tmp_path / "no" / "arena"
        words = [ROOT / ".venv/bin/kvhearth", "doctor", *daemon.flags()]
        done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=HUNG_S)
    assert done.returncode == 3
    last = done.stdout.splitlines()[-1]
    assert last.startswith("not ready, kvhearth serve would end with 3: arena_dir")


# -- huge pages ------------------------------------------------------------------------------------


class Pool:
    """The machine's pool of 2 MiB pages, unused by others."""

    def resize(self, pages: int) -> None:
        """Sets the number of pages."""
        NR_HUGEPAGES.write_text(str(pages))
        if int(NR_HUGEPAGES.read_text()) != pages:
            pytest.skip(f"this machine cannot make {pages} huge pages now")


@pytest.fixture
def pool() -> Iterator[Pool]:
    """An empty pool, empty again at the end."""
    if os.geteuid() != 0 or not os.access(NR_HUGEPAGES, os.W_OK):
        pytest.skip("needs root, to change vm.nr_hugepages")
    if int(NR_HUGEPAGES.read_text()) or KernelMemory().default_hugepage_bytes() != HUGE:
        pytest.skip("needs a machine without huge pages so far, of 2 MiB by default")
    try:
        yield Pool()
    finally:
        NR_HUGEPAGES.write_text("0")


def number_told(text: str) -> int:
    """Returns the ``vm.nr_hugepages`` of a message."""
    found = re.search(r"sysctl -w vm\.nr_hugepages=(\d+)", text)
    assert found, text
    return int(found[1])


def test_the_pages_that_are_told_are_exactly_enough(
    pool: Pool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    contract = contract_of(64 << 10)
    keys = [number.to_bytes(32, "big") for number in range(60)]
    with (
        mounted("hugetlbfs", "pagesize=2M", tmp_path / "huge") as place,
        directories(arena=False) as (folder, _),
    ):
        daemon = Daemon(folder, place, hugepages="prefer", memory="32MiB")
        try:
            _, verdict = advised(daemon, capsys)
            wanted = number_told(verdict)
            assert wanted == on_hugetlbfs(Settings(memory="32MiB", slab_bytes="2MiB"))  # type: ignore[arg-type]
            pool.resize(wanted - 1)
            assert advised(daemon, capsys)[0] == happened(daemon) == 3
            words = daemon.log_text().splitlines()[-1]
            assert f"{wanted - 1} of {wanted} pages of 2MiB are free" in words
            assert number_told(words) == wanted
            pool.resize(wanted)
            assert advised(daemon, capsys)[0] == 0
            daemon.start()
            with engine_of(daemon.url(), contract) as engine:
                assert engine.store(keys).bound == keys
            assert daemon.restart(), "its files have the pages already"
            daemon.kill()
            # More memory, then less: a second journal for a moment, and every block stays.
            for memory in ("64MiB", "16MiB"):
                daemon.settings["memory"] = memory
                pool.resize(int(NR_HUGEPAGES.read_text()) - KernelMemory().pool(HUGE).free)
                code, verdict = advised(daemon, capsys)
                assert (code, happened(daemon)) == (3, 3)
                pool.resize(number_told(verdict) - 1)
                assert advised(daemon, capsys)[0] == happened(daemon) == 3
                pool.resize(number_told(verdict))
                assert advised(daemon, capsys)[0] == 0
                daemon.start()
                with engine_of(daemon.url(), contract) as engine:
                    seen = engine.check(keys)
                    assert (seen.bad, seen.right) == ([], keys)
                daemon.kill()
        finally:
            daemon.kill()


@pytest.mark.parametrize("name", ["docs/operations.md"])
def test_the_pages_that_documents_tell_are_the_ones_it_takes(name: str) -> None:
    text = (ROOT / name).read_text()
    reported = {int(each) for each in re.findall(r"vm\.nr_hugepages=(\d+)", text)}
    sizes = re.findall(r"kvhearth serve --memory (\w+)[^`]*?--arena-dir /(?:dev/huge|arena)", text)
    assert sizes
    assert on_hugetlbfs(Settings(memory=parse_size(sizes[0]))) in reported


def test_the_sidecars_memory_leaves_room_for_catalogue_and_journal() -> None:
    (daemon,) = yaml.safe_load((ROOT / "deploy/kubernetes/sidecar.yaml").read_text())["spec"][
        "initContainers"
    ]
    values = {one["name"]: one.get("value") for one in daemon["env"]}
    limit = parse_size(daemon["resources"]["limits"]["hugepages-2Mi"])
    assert on_hugetlbfs(Settings(memory=parse_size(values["KVHEARTH_MEMORY"]))) * HUGE <= limit
