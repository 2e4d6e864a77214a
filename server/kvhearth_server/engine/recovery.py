"""Writes and restores the durable catalogue: namespaces with contracts and epochs, and groups."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from kvhearth.contract import Contract
from kvhearth.errors import KVHearthError, Reason
from kvhearth.model import I64
from kvhearth_server.core.adoption import adopt
from kvhearth_server.core.groups import Group, Member, MemberState
from kvhearth_server.core.namespaces import NUMBER_MAX
from kvhearth_server.core.state import CoreState
from kvhearth_server.engine.sessions import Peer, Session, Sessions
from kvhearth_server.memory.journal import read_journal
from kvhearth_server.observability.logs import get_logger

if TYPE_CHECKING:
    from kvhearth_server.engine.engine import Engine


_EPOCH_MAX = 0xFFFF_FFFF
_PAUSE_WRITES = 4
"""Pause after a write of the catalogue, in times of its duration."""
_PAUSE_MAX_S = 0.1


class CatalogueWriter:
    """Writes the durable catalogue: at once, or while ``run`` runs on a thread beside the loop. One
    write then has all changes that came during the one before.

    Args:
        prepare: takes the content of this moment, on the loop, and returns the function that
            writes it.
    """

    def __init__(self, prepare: Callable[[], Callable[[], None]]) -> None:
        self._prepare = prepare
        self._beside = False
        self._changes = self._written = 0
        self._changed, self._ended = asyncio.Event(), asyncio.Event()
        self._lock = threading.Lock()
        self._error: KVHearthError | None = None

    def changed(self) -> None:
        """Write the content, or have it written soon.

        Raises:
            KVHearthError: ``arena_unusable`` if it does not fit, unless ``run`` runs.
        """
        self._changes += 1
        if self._beside:
            self._changed.set()
        else:
            self._write(self._prepare())

    async def written(self) -> None:
        """Wait until all changes so far are written: no answer may promise them before.

        Raises:
            KVHearthError: ``arena_unusable`` if the content does not fit.
        """
        asked = self._changes
        while self._beside and self._written < asked:
            await self._ended.wait()
        if self._error is not None:
            raise self._error

    async def run(self) -> None:
        """Write changes until cancelled; the last ones are then written at once."""
        self._beside = True
        loop = asyncio.get_running_loop()
        try:
            while True:
                await self._changed.wait()
                self._changed.clear()
                number, write = self._changes, self._prepare()
                began = loop.time()
                try:
                    await loop.run_in_executor(None, self._write, write)
                    self._error = None
                except KVHearthError as error:
                    _log.error("catalogue.not_written", error=error.message)
                    self._error = error
                self._end(number)
                # A write takes the interpreter from the loop in part: a storm of changes gets a
                # share of the time, and the next write has all of them.
                await asyncio.sleep(min(_PAUSE_MAX_S, _PAUSE_WRITES * (loop.time() - began)))
        finally:
            self._beside = False
            self._write(self._prepare())
            self._end(self._changes)

    def _end(self, number: int) -> None:
        self._written = number
        self._ended.set()
        self._ended = asyncio.Event()

    def _write(self, write: Callable[[], None]) -> None:
        with self._lock:  # a cancelled ``run`` leaves its last write running
            write()


def namespace_texts(state: CoreState) -> list[str]:
    """Return each namespace as a JSON object; its contract, which may be long, is encoded once."""
    return [
        f'{{"contract":{space.contract_text},"epoch":{space.epoch},'
        f'"label":{json.dumps(space.label)},"model_name":{json.dumps(space.model_name)},'
        f'"number":{space.number},'
        f'"tenant":{json.dumps(space.tenant)},"tier_epoch":{space.tier_epoch}}}'
        for space in state.namespaces
    ]


def catalogue_content(
    state: CoreState, sessions: Sessions, boot_id: str, lineage: str
) -> dict[str, Any]:
    """Return the state that a successor needs, but the namespaces, as JSON values."""
    records = {session.number: session for session in sessions}
    return {
        "boot_id": boot_id,
        "lineage": lineage,
        "next_session": sessions.next_number,
        "epoch_floor": state.namespaces.epoch_floor,
        "groups": [
            {
                "number": group.number,
                "tenant": group.tenant,
                "engine_id": group.engine_id,
                "incarnation": group.incarnation,
                "namespace": group.namespace,
                "world_size": group.world_size,
                "members": [
                    _member(m, records[m.session])
                    for m in group.members.values()
                    if m.mapped and m.state is not MemberState.DRAINED and m.session in records
                ],
            }
            for group in state.groups
        ],
    }


def _member(member: Member, record: Session) -> list[Any]:
    return [member.session, member.rank, member.scheduler, record.lock_byte, record.boot_id]


def _restore(engine: Engine, content: dict[str, Any]) -> None:
    """Restore lineage, numbers and namespaces of a catalogue, except the namespaces of tenants that
    the settings no longer name.

    Raises:
        KVHearthError: ``arena_unusable`` if the catalogue is not whole; nothing has changed.
    """
    _check(content)
    namespaces, tenants = engine.core.state.namespaces, engine.core.state.segment_of
    engine.lineage = content["lineage"]
    engine.sessions.number_from(content["next_session"])
    namespaces.epoch_floor = content["epoch_floor"]
    for entry in content["namespaces"]:
        if entry["tenant"] in tenants:
            namespaces.restore(
                entry["number"],
                entry["tenant"],
                Contract.from_json(entry["contract"]),
                entry["epoch"],
                entry["tier_epoch"],
                entry["label"],
                entry["model_name"],
            )


def _check(content: dict[str, Any]) -> None:
    try:
        if not isinstance(content["lineage"], str) or not content["lineage"]:
            raise ValueError(f"lineage is {content['lineage']!r}")
        numbers = [entry["number"] for entry in content["namespaces"]]
        if len(set(numbers)) < len(numbers):
            raise ValueError("a number is there twice")
        for entry in content["namespaces"]:
            Contract.from_json(entry["contract"])
            whole = type(entry["number"]) is int and 0 < entry["number"] <= NUMBER_MAX
            epochs = (entry["epoch"], entry["tier_epoch"])
            whole &= all(type(each) is int and 0 <= each <= _EPOCH_MAX for each in epochs)
            whole &= entry["label"] is None or isinstance(entry["label"], str)
            whole &= isinstance(entry["model_name"], str) and isinstance(entry["tenant"], str)
            if not whole:
                raise ValueError(f"namespace {entry['number']!r} is not whole")
        counts = (content["epoch_floor"], content["next_session"])
        if not all(type(count) is int and count >= 0 for count in counts):
            raise ValueError(f"{counts} are no counts")
    except (KeyError, TypeError, ValueError, KVHearthError) as error:
        raise _damaged(error) from None


def restore_groups(
    state: CoreState, content: dict[str, Any]
) -> tuple[dict[int, Group], list[Session]]:
    """Restore the groups of a catalogue as ended ones, with a ghost session for each member that
    may still write.

    Raises:
        KVHearthError: ``arena_unusable`` if the catalogue is not of this form.
    """
    groups: dict[int, Group] = {}
    ghosts: list[Session] = []
    known = {space.number for space in state.namespaces}
    try:
        for entry in content["groups"]:
            if entry["tenant"] not in state.segment_of:
                continue
            segment = state.segment_of[entry["tenant"]]
            group = Group(
                entry["number"],
                entry["tenant"],
                segment,
                entry["engine_id"],
                entry["incarnation"],
                entry["namespace"] if entry["namespace"] in known else 0,
                entry["world_size"],
                ended=True,
            )
            for session, rank, scheduler, lock_byte, boot_id in entry["members"]:
                gone = MemberState.GONE
                group.members[session] = Member(session, rank, bool(scheduler), True, gone)
                ghosts.append(_ghost(session, group, lock_byte, boot_id))
            state.groups.restore(group)
            groups[group.number] = group
    except (KeyError, TypeError, ValueError) as error:
        raise _damaged(error) from None
    return groups, ghosts


def _damaged(error: Exception) -> KVHearthError:
    return KVHearthError(
        Reason.ARENA_UNUSABLE,
        f"the arena's catalogue is damaged ({error!r}); remove the files to start cold",
    )


ORPHANED_LOADS_S = 60.0
"""Wait for a dead daemon's reads; if its directories are not all here, nothing shows their end."""
_log = get_logger("kvhearth.engine")


def take_over(engine: Engine) -> None:
    """Fill a fresh core from an arena that an earlier run left; start cold if there is none."""
    old = engine.arena.catalogue
    state = engine.core.state
    if old is None or engine.journal is None:
        _start_cold(engine)
        return
    _restore(engine, old)
    found = read_journal(engine.journal, engine.arena.plan.geometry, state.namespaces)
    groups, ghosts = restore_groups(state, old)
    if 0 in found.held or set(found.held) - set(groups):
        _unknown_holders(engine, found.held, groups, ghosts)
    adopt(state, found, groups)
    # Run as an engine call, so that dropped slots become free in the journal even where no group is
    # left.
    engine.call(engine.core.promotions.adopt, found.orphaned_loads)
    for ghost in ghosts:
        engine.sessions.add(ghost)
    engine.adopted_blocks = sum(len(part.keys) for part in found.blocks)
    for group in groups.values():
        engine.call(engine.core.membership.release_quarantine, group)
    _end_private(engine)


def _end_private(engine: Engine) -> None:
    """Give up private namespaces that nobody has; whoever returns has its own again."""
    for space in engine.core.state.namespaces:
        engine.core.membership.end_private(space.number)


def safe_after(engine: Engine) -> float:
    """Return the time from which slots that a dead daemon was loading into may be reused, if the
    file locks allow it; later if it had other directories.
    """
    here = {str(path.parent) for path in engine.ssd_catalogue.paths}
    return engine.started_at + ORPHANED_LOADS_S if set(loading_from(engine)) - here else 0.0


def loading_from(engine: Engine) -> list[str]:
    """Return the directories from which loads into the arena may be under way: this run's, and
    those of an earlier run that left slots behind.
    """
    old = engine.arena.catalogue or {}
    left = old.get("ssd_dirs", ()) if len(engine.core.promotions.orphaned_loads) else ()
    return sorted({str(path.parent) for path in engine.ssd_catalogue.paths}.union(left))


def _start_cold(engine: Engine) -> None:
    """Start without an old arena; the SSD tier's blocks are usable if their epochs are known."""
    state = engine.core.state
    if engine.tiers:
        # Start above the numbers that an earlier run gave to blocks that the tier may still have.
        state.sequence = int(time.time()) << 16
    content = engine.ssd_catalogue.read()
    try:
        if content is not None:
            _restore(engine, content)
            _end_private(engine)
            return
    except KVHearthError as error:
        _log.error("ssd_catalogue.damaged", error=str(error))
    # Epochs of an earlier run are forgotten and must not recur: an engine that still runs with old
    # weights would share blocks with one that has new weights.
    state.namespaces.epoch_floor = int(time.time())


def _unknown_holders(
    engine: Engine, held: dict[int, I64], groups: dict[int, Group], ghosts: list[Session]
) -> None:
    """Make slots of unknown writers wait for every process that still maps the arena."""
    state = engine.core.state
    orphaned_loads = [slots for number, slots in held.items() if number not in groups]
    for number in [number for number in held if number not in groups]:
        del held[number]
    every = np.concatenate(orphaned_loads)
    for segment, slots in state.table.by_segment(every):
        tenant = state.table.geometry.segments[segment].tenant
        number = 1 + max([*groups, *(g.number for g in state.groups), 0])
        group = Group(number, tenant, segment, "", 0, 0, 0, ended=True)
        mapped = engine.arena.segments[segment]
        for index in range(4 * engine.limits.sessions_max):
            if mapped.client_byte_held(index):
                session = 1 + max([*(g.number for g in ghosts), engine.sessions.next_number])
                group.members[session] = Member(session, -1, False, True, MemberState.GONE)
                ghosts.append(_ghost(session, group, index, ""))
        state.groups.restore(group)
        groups[number] = group
        held[number] = slots


def _ghost(number: int, group: Group, lock_byte: int, boot_id: str) -> Session:
    """Return the session of a member of an earlier run's group."""
    return Session(
        number,
        group.tenant,
        group.segment,
        "",
        Peer(-1, 0, -1),
        lock_byte,
        group.number,
        boot_id,
        ghost=True,
        gone=True,
    )
