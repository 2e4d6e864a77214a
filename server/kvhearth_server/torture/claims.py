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


def gave_up(scene: Scene) -> bool:
    """Whether the daemon may have evicted what it had not written: it has said so since its start,
    or says nothing, or still writes. Clients must pause, and the drive be well again.
    """
    try:
        said = _calm(scene)
    except (grpc.RpcError, OSError):
        return True
    return _busy(said) or _refused(said)


def refused(scene: Scene) -> bool:
    """Whether the daemon has said since its start that it gave up blocks which it had not written,
    or says nothing.
    """
    try:
        return _refused(scene.daemon.stats(check_books=False))
    except (grpc.RpcError, OSError):
        return True


def _refused(said: admin_pb2.StatsResponse) -> bool:
    gave_up = ("demotion_refused", "demotion_failed")
    return any(name.startswith(gave_up) for name in said.counters)


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
