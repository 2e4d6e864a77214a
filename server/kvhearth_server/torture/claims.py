"""What the daemon says of itself: failures that it counted, and what it has on the drive, beside
what is there. It is asked before a planned death, too: its successor knows nothing of that.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import grpc

from kvhearth.proto.v1 import admin_pb2
from kvhearth_server.torture import damage
from kvhearth_server.torture.damage import DRIVE
from kvhearth_server.torture.report import CAUGHT, CRASH, LOST
from kvhearth_server.torture.shape import PRESSED

if TYPE_CHECKING:
    from kvhearth_server.torture.scene import Scene

IMPATIENT = "demotion_refused{slow}"
"""The daemon's counter of blocks that it gave up unwritten because the tier made no progress."""

_QUIET_S = 2.0
_POLL_S = 0.05


def failures(scene: Scene, said: admin_pb2.StatsResponse) -> None:
    """Failures that the daemon counted itself, since the last look."""
    counters = dict(said.counters)
    before, told_of = scene.counted
    scene.counted = (said.boot_id, counters)
    for name, count in counters.items():
        more = count - (told_of.get(name, 0) if before == said.boot_id else 0)
        if more <= 0:
            continue
        if name.startswith("task_failures"):
            text = f"{more} {name}: {scene.daemon.complaints()}"
            scene.report.find(CRASH, text, scene.where)
        elif name.startswith("checksum_failures"):
            scene.report.figures["checksum_failures_counted"] += more
            if not scene.explains_checksum(name):
                scene.report.find(CAUGHT, f"{more} {name}", scene.where)
        elif name == IMPATIENT and not scene.drive_is_suspect:
            # Also where no sealed block is missing yet: they may be evicted at any moment.
            text = f"{more} blocks were given up unwritten, though no fault stopped the drive"
            scene.report.find(LOST, text, scene.where, more)


def look_at_drive(scene: Scene) -> None:
    """Every block that the daemon would load from the drive is whole there, whatever failed before:
    it must not believe in what it could not write. Clients should pause.
    """
    if not scene.shape.ssd_bytes or DRIVE in scene.damaged:
        return  # it does not know of damaged records yet
    try:
        said = _calm(scene)
        there = len(damage.names_on_disk(scene.ssd_dir))
        later = scene.daemon.stats(check_books=False)
    except (grpc.RpcError, OSError):
        return  # that it does not answer is found by others
    failures(scene, later)
    if _reclaimed(said) == _reclaimed(later):  # else what it let go may be overwritten by now
        judge(scene, said.ssd.blocks, there)


def claimed(scene: Scene) -> int:
    """How many blocks could be loaded from the drive, by the daemon's word, for ``judge`` after
    its death; 0 where that says nothing.
    """
    if DRIVE in scene.damaged or scene.shape.kind == PRESSED:
        return 0
    try:
        return int(scene.daemon.stats(check_books=False).ssd.blocks)
    except (grpc.RpcError, OSError):
        return 0


def given_up(scene: Scene) -> int:
    """Blocks that the daemon has given up unwritten since its start; -1 without an answer."""
    try:
        said = scene.daemon.stats(check_books=False)
    except (grpc.RpcError, OSError):
        return -1
    return said.counters.get(IMPATIENT, 0)


def judge(scene: Scene, claims: int, there: int) -> None:
    """So many blocks could be loaded from the drive, it said; so many are whole there."""
    scene.report.figures["claims_compared_with_the_drive"] += claims
    if there < claims:
        text = f"{claims} blocks were said to be on the drive, {there} are"
        scene.report.find(LOST, text, scene.where, claims - there)


def _calm(scene: Scene) -> admin_pb2.StatsResponse:
    """Its word once nothing is being written, or a while is over: what is written between its word
    and the look at the drive hides what is missing.
    """
    end = time.monotonic() + _QUIET_S
    while True:
        said = scene.daemon.stats(check_books=False)
        if not _busy(said) or time.monotonic() > end:
            return said
        time.sleep(_POLL_S)


def _busy(said: admin_pb2.StatsResponse) -> bool:
    return bool(said.ssd.demoting_blocks or said.ssd.queued_writes or said.ssd.recovering)


def _reclaimed(said: admin_pb2.StatsResponse) -> int:
    return said.ssd.counters.get("segments_reclaimed", 0)
