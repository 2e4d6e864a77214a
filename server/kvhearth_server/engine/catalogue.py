"""The durable catalogue's content: namespaces with their contracts and epochs, groups with their
members.
"""

from __future__ import annotations

from typing import Any

from kvhearth.contract import Contract
from kvhearth.errors import KVHearthError, Reason
from kvhearth_server.core.groups import Group, Member, MemberState
from kvhearth_server.core.namespaces import NUMBER_MAX
from kvhearth_server.core.state import CoreState
from kvhearth_server.engine.sessions import Peer, Session, Sessions

_EPOCH_MAX = 0xFFFF_FFFF


def catalogue_content(
    state: CoreState, sessions: Sessions, boot_id: str, lineage: str
) -> dict[str, Any]:
    """What a successor must know, as JSON."""
    records = {session.number: session for session in sessions}
    return {
        "complete": True,
        "boot_id": boot_id,
        "lineage": lineage,
        "next_session": sessions.next_number,
        "epoch_floor": state.namespaces.epoch_floor,
        "namespaces": [
            {
                "number": space.number,
                "tenant": space.tenant,
                "epoch": space.epoch,
                "tier_epoch": space.tier_epoch,
                "contract": space.contract.to_json(),
            }
            for space in state.namespaces
        ],
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


def restore_lineage(content: dict[str, Any]) -> str:
    """The id of the cold start that the catalogue descends from.

    Raises:
        KVHearthError: ``arena_unusable`` if the catalogue has none.
    """
    lineage = content.get("lineage")
    if not isinstance(lineage, str) or not lineage:
        raise _damaged(ValueError(f"lineage is {lineage!r}"))
    return lineage


def check_namespaces(content: dict[str, Any]) -> None:
    """Refuse a content from which namespaces cannot be restored, before any is.

    Raises:
        KVHearthError: ``arena_unusable``.
    """
    restore_lineage(content)
    try:
        numbers = [entry["number"] for entry in content["namespaces"]]
        for entry in content["namespaces"]:
            Contract.from_json(entry["contract"])
            whole = type(entry["number"]) is int and 0 < entry["number"] <= NUMBER_MAX
            epochs = (entry["epoch"], entry.get("tier_epoch", 0))
            whole &= all(type(each) is int and 0 <= each <= _EPOCH_MAX for each in epochs)
            if not whole or not isinstance(entry["tenant"], str):
                raise ValueError(f"namespace {entry['number']!r} is not whole")
        counts = (content["epoch_floor"], content["next_session"])
        if not all(type(count) is int and count >= 0 for count in counts):
            raise ValueError(f"{counts} are no counts")
    except (KeyError, TypeError, ValueError, KVHearthError) as error:
        raise _damaged(error) from None
    if len(set(numbers)) < len(numbers):
        raise _damaged(ValueError("a number is there twice"))


def restore_namespaces(state: CoreState, content: dict[str, Any]) -> None:
    """Namespaces of a catalogue; those of tenants that the settings no longer name are left out.

    Raises:
        KVHearthError: ``arena_unusable`` if the catalogue is not of this form.
    """
    try:
        state.namespaces.epoch_floor = int(content["epoch_floor"])
        for entry in content["namespaces"]:
            if entry["tenant"] in state.segment_of:
                contract = Contract.from_json(entry["contract"])
                epochs = (entry["epoch"], int(entry.get("tier_epoch", 0)))
                state.namespaces.restore(entry["number"], entry["tenant"], contract, *epochs)
    except (KeyError, TypeError, ValueError, KVHearthError) as error:
        raise _damaged(error) from None


def restore_groups(
    state: CoreState, content: dict[str, Any]
) -> tuple[dict[int, Group], list[Session]]:
    """Groups of a catalogue as ended ones, and a ghost session for each member that may still
    write.

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
                peer = Peer(-1, 0, -1)
                ghosts.append(
                    Session(
                        session,
                        group.tenant,
                        segment,
                        "",
                        peer,
                        lock_byte,
                        group.number,
                        boot_id,
                        ghost=True,
                        gone=True,
                    )
                )
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
