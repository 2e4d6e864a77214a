"""A world's directories, promises and daemon settings, before its daemon and clients run."""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvhearth.errors import KVHearthError, Reason
from kvhearth.failpoints import DISK_ENVIRONMENT_NAME
from kvhearth.worker_thread import SupervisedThread
from kvhearth_lab.harness.daemon import FLEET_KEY, Daemon, tied
from kvhearth_lab.harness.engine import contract_of, key_of
from kvhearth_lab.harness.faults import set_offsets
from kvhearth_lab.harness.remote_server import RemoteServer
from kvhearth_lab.torture import damage
from kvhearth_lab.torture.damage import ARENA, DRIVE
from kvhearth_lab.torture.network import Network
from kvhearth_lab.torture.oracle import Oracle
from kvhearth_lab.torture.plan import Plan
from kvhearth_lab.torture.report import Report, Stalls
from kvhearth_lab.torture.world_config import ROOMY
from kvhearth_server.config.model import DEFAULT_TENANT_NAME
from kvhearth_server.config.value_types import format_size
from kvhearth_server.memory.mapping import FilesystemKind, filesystem_kind
from kvhearth_server.tiers.remote.names import object_names, space_name

_EVERY_S = 0.02
_SOCKETS_CHARS = 60
_ARENA_BYTES, _DRIVE_BYTES = 300 << 20, 400 << 20


@dataclass(frozen=True)
class Roots:
    """Roots of the worlds' directories.

    Attributes:
        arena: directory on tmpfs (or hugetlbfs).
        drive: directory on the drive under test.
    """

    arena: Path
    drive: Path

    def check(self, *, ssd: bool = True) -> None:
        """Raise KVHearthError ``config_invalid`` unless both are writable and have room: a loss
        because a world does not fit would be blamed on the daemon. Without ``ssd`` only logs are on
        the drive.
        """
        rooms = (
            ("--arena-root", self.arena, _ARENA_BYTES),
            ("--dir", self.drive, _DRIVE_BYTES if ssd else 0),
        )
        for name, path, needed in rooms:
            try:
                # Permissions do not decide: root may write to anything. Try it.
                with tempfile.TemporaryFile(prefix="kvh-", dir=path), _folder(path):
                    pass
            except OSError as error:
                raise KVHearthError(
                    Reason.CONFIG_INVALID,
                    f"{name} {path} is no directory that can be written to ({error.strerror})",
                ) from None
            free = shutil.disk_usage(path).free
            if free < needed:
                raise KVHearthError(
                    Reason.CONFIG_INVALID,
                    f"{name} {path}: {format_size(free)} are free, {format_size(needed)} are "
                    "needed; give another directory",
                )
        if filesystem_kind(self.arena).kind is FilesystemKind.OTHER:
            raise KVHearthError(
                Reason.CONFIG_INVALID,
                f"--arena-root {self.arena} is neither on tmpfs nor on hugetlbfs, and an arena is "
                "memory; give a directory such as /dev/shm",
            )


@dataclass(frozen=True)
class Places:
    """Directories of one world."""

    folder: Path
    arena: Path
    ssd: Path

    @property
    def orders(self) -> Path:
        """The file that commands the drive."""
        return self.folder / "drive.json"

    @property
    def clock(self) -> Path:
        """The file that the daemon's clocks follow."""
        return self.folder / "clock"


@contextlib.contextmanager
def places(roots: Roots, keep: list[bool]) -> Iterator[Places]:
    """Make the directories of one world; they are removed at the end unless ``keep`` is not
    empty.
    """
    with contextlib.ExitStack() as made:
        folder = made.enter_context(_folder(roots.drive, keep))
        # A socket's path has at most 107 characters: under a long path, sockets go elsewhere.
        near = None if len(str(folder)) > _SOCKETS_CHARS else folder
        sockets = near or made.enter_context(_folder(None, keep))
        arena = made.enter_context(_folder(roots.arena))
        ssd = folder / "ssd"
        ssd.mkdir()
        yield Places(sockets, arena, ssd)


@contextlib.contextmanager
def _folder(root: Path | None, keep: Sequence[bool] = ()) -> Iterator[Path]:
    """Make a new directory; it is removed at the end unless ``keep`` is not empty."""
    path = Path(tempfile.mkdtemp(prefix="kvh-", dir=root))
    try:
        yield path
    finally:
        if not keep:
            shutil.rmtree(path, ignore_errors=True)


class CapacityWatch(SupervisedThread):
    """Watches continuously how much space a directory takes by its file system's count."""

    def __init__(self, path: Path) -> None:
        super().__init__("kvhearth-capacity", self._turn)
        self.most_bytes = 0
        self._path = path

    def _turn(self) -> None:
        self.rest(_EVERY_S)
        self.look()

    def look(self) -> int:
        """Look once; returns the maximum so far."""
        with contextlib.suppress(FileNotFoundError):
            self.most_bytes = max(self.most_bytes, damage.claimed_bytes(self._path))
        return self.most_bytes


ON_DRIVE = "checksum_failures{ssd}"
"""The daemon's counter of blocks stopped at the drive by their checksum."""

PATIENCE_S = 15.0
"""Time within which blocks must be served, resources released and processes closed."""

REMOTE_PATIENCE_S = 45.0
"""The same where a remote may have been away: a daemon tries it again after 35 s at most."""

WORLD_ENVIRONMENT_NAME = "TORTURE_WORLD"
"""Variable by which all processes of a world's daemons are found."""


class Scenario:
    """Places, promises, and the daemon's settings; the daemon does not run yet.

    Attributes:
        network: the way of remote clients to the gateway.
        server: the remote behind memory, if there is one.
        labels: the weights' label of each model whose weights were bumped.
        models: names of the shape's models.
        patience_s: ``PATIENCE_S``; shorter where blocks are known to be lost.
        monotonic_s: offset of the daemon's monotonic clock.
        damaged: places where faults damaged bytes: ``ARENA``, ``DRIVE``.
        drive_is_good: no fault has hit the drive, so everything must reach it.
        drive_is_suspect: a fault has hit it since the daemon's start.
        counted: boot and counters of the daemon at the last look.
    """

    def __init__(self, plan: Plan, places: Places, report: Report, stalls: Stalls) -> None:
        self.plan, self.shape, self.places, self.report = plan, plan.shape, places, report
        self.stalls = stalls
        self.oracle = Oracle(keeps=self.shape.keeps)
        self.models = [self.model_name(number) for number in range(len(self.shape.models))]
        self.step = 0
        self.patience_s = REMOTE_PATIENCE_S if self.shape.tier else PATIENCE_S
        self.monotonic_s = 0.0
        self.damaged: set[str] = set()
        self.drive_is_good = True
        self.drive_is_suspect = False
        self.counted: tuple[str, dict[str, int]] = ("", {})
        self.orders()
        set_offsets(places.clock, 0.0, 0.0)
        self.network = Network(self.shape.remote)
        kind = self.shape.tier
        self.server = RemoteServer(kind, places.folder / "remote") if kind else None
        self.labels: dict[str, str] = {}
        self.daemon = Daemon(
            places.folder,
            places.arena if self.shape.arena_stays else None,
            self.shape.settings(
                places.ssd, self.network.port, self.server.url if self.server else ""
            ),
            tied(places.clock if self.shape.skewed else None),
        )
        self.daemon.environment[WORLD_ENVIRONMENT_NAME] = str(places.folder)
        if self.shape.ssd_bytes:
            self.daemon.environment[DISK_ENVIRONMENT_NAME] = str(places.orders)

    @property
    def where(self) -> dict[str, Any]:
        """The place of a finding: world, step and kind of world."""
        return {"world": self.plan.number, "step": self.step, "kind_of_world": self.shape.kind}

    @property
    def arena_dir(self) -> Path:
        """The directory of the arena's files."""
        return self.places.arena

    @property
    def ssd_dir(self) -> Path:
        """The drive's directory."""
        return self.places.ssd

    @property
    def clock_file(self) -> Path:
        """The file that the daemon's clocks follow."""
        return self.places.clock

    def model_name(self, number: int) -> str:
        """Return the name of one of the world's models."""
        return f"m{self.plan.seed}.{self.plan.number}.{number}"

    @contextlib.contextmanager
    def window(self, why: str, *whose: str) -> Iterator[None]:
        """Mark slow operations during the block as expected, of these clients (default: of all)."""
        opened = [self.stalls.open(why, each) for each in whose or ("",)]
        try:
            yield
        finally:
            for each in opened:
                self.stalls.close(each)

    def orders(self, **said: Any) -> None:
        """Command the drive; without arguments it behaves normally again."""
        fresh = self.places.orders.with_suffix(".new")
        fresh.write_text(json.dumps(said), encoding="utf-8")
        fresh.replace(self.places.orders)

    def drive_faulted(self) -> None:
        """Expect losses until the daemon's next start, of any block that does not fit into memory.
        Blocks that cannot be written are evicted without a copy, blocks that cannot be read are
        forgotten, and a tier that got "no space" evicts its own blocks.
        """
        self.drive_is_good, self.drive_is_suspect = False, True
        if self.shape.kind != ROOMY:
            self.oracle.keeps = False

    def trust_drive(self) -> None:
        """Excuse blocks that are not whole on the drive after the daemon's death: its successor
        knows only those that are.
        """
        if self.drive_is_suspect and self.shape.kind != ROOMY:
            self.excuse_not_on_disk("drive fault")
            self.oracle.keeps = self.shape.keeps
        self.drive_is_suspect = False

    def explains_checksum(self, source: str) -> bool:
        """Whether a fault explains a checksum failure at this source. Damage on the drive must be
        stopped there and must not reach the arena and its readers.
        """
        return ARENA in self.damaged or (DRIVE in self.damaged and source == ON_DRIVE)

    def excuse(self, keys: Iterable[bytes], why: str, *, spoilt: bool = False) -> None:
        """Excuse blocks that may be gone.

        Args:
            spoilt: the daemon may not have noticed yet (``Oracle.spoil``).
        """
        wanted = set(keys)
        take = self.oracle.spoil if spoilt else self.oracle.excuse
        for model in self.models:
            known = self.oracle.within_reach(model)
            take(model, [number for number in known if key_of(model, number) in wanted], why)

    def excuse_unless_on_disk(
        self, keys: Iterable[bytes], why: str, *, spoilt: bool = False
    ) -> None:
        """Excuse blocks whose copy in memory is damaged, unless a whole copy on the drive repairs
        them.

        Args:
            spoilt: as for ``excuse``.
        """
        wanted = set(keys)
        take = self.oracle.spoil if spoilt else self.oracle.excuse
        for model, above in self.not_on_disk().items():
            take(model, [number for number in above if key_of(model, number) in wanted], why)

    def at_the_remote(self) -> dict[str, list[int]]:
        """Return, by model, the acknowledged blocks that the remote has now.

        Raises:
            OSError, KVHearthError: it does not answer.
        """
        assert self.server is not None
        names = self.server.names()
        found = {}
        for number, model in enumerate(self.models):
            page_bytes, shards = self.shape.models[number]
            contract = contract_of(page_bytes, shards=shards, model=model).to_json()
            label = self.labels.get(model, "")
            space = space_name(FLEET_KEY, DEFAULT_TENANT_NAME, contract, label, 0)
            known = list(self.oracle.known(model))
            made = object_names(FLEET_KEY, space, [key_of(model, each) for each in known])
            found[model] = [n for n, name in zip(known, made, strict=True) if name in names]
        return found

    def excuse_unless_at_the_remote(self) -> None:
        """Excuse blocks that were not published: eviction does not wait for that."""
        if self.server is None:
            return
        for model, there in self.at_the_remote().items():
            self.report.figures["blocks_found_at_the_remote"] += len(there)
            rest = set(self.oracle.known(model)).difference(there)
            self.oracle.excuse(model, sorted(rest), "not published")

    def excuse_all(self, why: str) -> None:
        """Excuse all blocks, because their names are lost."""
        for model in self.models:
            self.oracle.excuse(model, self.oracle.within_reach(model), why)

    def excuse_not_on_disk(self, why: str) -> None:
        """Excuse blocks that are in memory only."""
        for model, above in self.not_on_disk().items():
            self.oracle.excuse(model, above, why)

    def not_on_disk(self, *, sealed: bool = False) -> dict[str, list[int]]:
        """Return, by model, blocks that are not whole on the drive under the present weights.

        Args:
            sealed: only acknowledged blocks; otherwise also those being stored.
        """
        whole = damage.blocks_on_disk(self.ssd_dir) if self.shape.ssd_bytes else set()
        found = {}
        for model in self.models:
            epoch = self.oracle.epoch(model)
            known = self.oracle.known(model) if sealed else self.oracle.within_reach(model)
            found[model] = [n for n in known if (key_of(model, n), epoch) not in whole]
        return found
