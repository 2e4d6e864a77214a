"""From the engine's state to the documents of ``models``."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
import traceback
from asyncio import all_tasks
from typing import Any

from kvhearth.version import PROTOCOL_VERSION, __version__
from kvhearth_server.config import Settings
from kvhearth_server.core.inspection import held_by_groups
from kvhearth_server.engine.engine import Engine
from kvhearth_server.engine.snapshot import SsdNow, take_snapshot
from kvhearth_server.tiers.ssd.figures import SsdFigures
from kvhearth_server.transport.web import models

_OF_TIER = {each.name for each in dataclasses.fields(SsdFigures)} - {"directories", "counts"}
_SECRET = re.compile(r"token|secret|password|credential|(^|_)key$")
_MASK = "***"


def version(engine: Engine) -> models.Version:
    """What runs here."""
    return models.Version(version=__version__, protocol=PROTOCOL_VERSION, boot_id=engine.boot_id)


def stats(engine: Engine) -> models.Stats:
    """The daemon in numbers."""
    now = take_snapshot(engine)
    return models.Stats(
        version=now.version,
        boot_id=now.boot_id,
        uptime_s=now.uptime_s,
        draining=now.draining,
        blocks=now.blocks,
        leases=now.leases,
        oldest_lease_s=now.oldest_lease_s,
        pins=now.pins,
        sessions=now.sessions,
        sessions_leaving=now.sessions_leaving,
        groups=now.groups,
        namespaces=now.namespace_count,
        adopt_s=now.adopt_s,
        segments=[models.SegmentStats(**dataclasses.asdict(each)) for each in now.segments],
        ssd=_ssd(now.ssd),
        counters=engine.counters.snapshot(),
        client_counters=dict(now.reported),
    )


def _ssd(now: SsdNow | None) -> models.SsdStats | None:
    if now is None:
        return None
    values = {name: getattr(now.tier, name) for name in _OF_TIER}
    directories = [
        models.SsdDirectory(
            path=each.path,
            capacity_bytes=each.capacity_bytes,
            file_bytes=each.file_bytes,
            segments=dict(each.segments),
            reasons=[told for _, told in each.findings],
        )
        for each in now.tier.directories
    ]
    return models.SsdStats(
        **values,
        directories=directories,
        demoting_blocks=now.demoting_blocks,
        promoting_blocks=now.promoting_blocks,
        counters=dict(now.tier.counts),
    )


def sessions(engine: Engine) -> models.Sessions:
    """Every member of every group."""
    state = engine.core.state
    digests = _digests(engine)
    found = []
    for group in state.groups:
        for member in group.members.values():
            record = engine.sessions.find(member.session)
            found.append(
                models.Session(
                    session=member.session,
                    tenant=group.tenant,
                    engine_id=group.engine_id,
                    incarnation=group.incarnation,
                    scheduler=member.scheduler,
                    rank=member.rank,
                    world_size=group.world_size,
                    pid=record.peer.pid if record else 0,
                    namespace=digests.get(group.namespace, ""),
                    state=str(member.state),
                )
            )
    return models.Sessions(boot_id=engine.boot_id, sessions=found)


def namespaces(engine: Engine) -> models.Namespaces:
    """Every namespace with its contract."""
    found = [
        models.Namespace(
            namespace=space.digest.hex(),
            tenant=space.tenant,
            contract=json.loads(space.contract.to_json()),
            epoch=space.epoch,
            blocks=space.blocks,
            used_bytes=space.used_bytes,
            quota_bytes=space.quota_bytes,
        )
        for space in engine.core.state.namespaces
    ]
    return models.Namespaces(boot_id=engine.boot_id, namespaces=found)


def leases(engine: Engine) -> models.Leases:
    """What each group's readers hold."""
    digests = _digests(engine)
    found = [
        models.LeaseHolder(
            tenant=held.group.tenant,
            engine_id=held.group.engine_id,
            incarnation=held.group.incarnation,
            namespace=digests.get(held.group.namespace, ""),
            leases=held.leases,
            slots=held.slots,
            bytes=held.bytes,
            oldest_s=held.oldest_s,
        )
        for held in held_by_groups(engine.core.state, engine.now())
    ]
    return models.Leases(boot_id=engine.boot_id, groups=found)


def masked(settings: Settings) -> dict[str, Any]:
    """The settings as JSON, with what is named like a secret left out."""
    values = settings.model_dump(mode="json")
    return {
        name: _MASK if value and _SECRET.search(name) else value for name, value in values.items()
    }


def stacks() -> str:
    """Where every thread and every task of the loop is now."""
    parts = []
    for number, frame in sys._current_frames().items():
        parts.append(f"thread {number}\n" + "".join(traceback.format_stack(frame)))
    for task in sorted(all_tasks(), key=lambda task: task.get_name()):
        frames = "".join(
            "".join(traceback.format_stack(frame, limit=1)) for frame in task.get_stack()
        )
        parts.append(f"task {task.get_name()}\n{frames}")
    return "\n".join(parts)


def _digests(engine: Engine) -> dict[int, str]:
    return {space.number: space.digest.hex() for space in engine.core.state.namespaces}
