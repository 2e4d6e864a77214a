"""Sessions and groups: attaching, leaving and draining."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvhearth.contract import Contract, differences
from kvhearth.errors import KVHearthError, Reason
from kvhearth.model import I64
from kvhearth_server.core.actions import Mark
from kvhearth_server.core.groups import Group, Member, MemberState
from kvhearth_server.core.holds import drop_lease
from kvhearth_server.core.namespaces import Namespace
from kvhearth_server.core.slot_table import State
from kvhearth_server.core.state import CoreState, require


@dataclass(frozen=True)
class Joining:
    """A session that wants to attach, as established by the shell.

    ``tenant`` comes from the peer's identity; ``node`` is the NUMA node it copies from, or -1.
    ``process_group`` is the same in all processes of one engine; ``model_name`` is for people.
    """

    session: int
    tenant: str
    engine_id: str
    contract: Contract
    scheduler: bool
    rank: int
    incarnation: int
    mapped: bool
    node: int = -1
    process_group: str = ""
    model_name: str = ""


ENGINE_ID_CHARS_MAX = 256
_REMEDY = (
    "give each replica an engine_id of its own (vLLM makes one where kv_transfer_config has none), "
    "or end the other one"
)


class Membership:
    """Sessions and groups."""

    def __init__(self, state: CoreState) -> None:
        self._state = state

    def join(self, joining: Joining) -> Group:
        """Let a session into its engine's open group, or into a new one.

        Raises:
            KVHearthError: ``too_many_sessions``, ``bad_contract``, ``bad_message``,
                ``contract_mismatch`` (naming the fields), ``rank_taken``, ``stale_incarnation``,
                ``too_many_namespaces``.
        """
        state = self._state
        most = state.part(state.limits.sessions_max)
        attached = sum(len(g.attached) for g in state.groups if g.tenant == joining.tenant)
        require(
            attached < most,
            Reason.TOO_MANY_SESSIONS,
            f"tenant {joining.tenant} has {attached} of {most} sessions; raise sessions_max, which "
            "tenants have in equal parts, or end some",
        )
        self._check_shape(joining)
        group = state.groups.open_group(joining.tenant, joining.engine_id)
        if group is None:
            require(
                joining.incarnation == 0,
                Reason.STALE_INCARNATION,
                f"incarnation {joining.incarnation} of {joining.engine_id!r} ended; attach with 0",
            )
            namespace = state.namespaces.obtain(joining.tenant, joining.contract)
            group = state.groups.create(
                joining.tenant,
                state.segment_of[joining.tenant],
                joining.engine_id,
                namespace.number,
                joining.contract.world_size,
                joining.process_group,
            )
            namespace.groups += 1
        else:
            namespace = state.namespaces.get(group.namespace)
            self._check_place(group, namespace, joining)
        state.namespaces.name_model(namespace, joining.model_name)
        member = Member(
            joining.session,
            joining.rank,
            joining.scheduler,
            joining.mapped,
            node=joining.node,
        )
        if state.namespaces.ended.pop(namespace.number, None):
            state.policies.reorder(namespace.number)
        state.groups.join(group, member)
        return group

    def leave(self, session: int, *, finished: bool) -> None:
        """Handle the closing of a session's attach socket.

        ``finished``: the session had reported that its copies are done. The group ends with its
        scheduler, or with its last member.
        """
        group = self._state.groups.of_session(session)
        if group is None:
            return
        member = group.members[session]
        if member.state is not MemberState.ATTACHED:
            return
        quiet = finished or not member.mapped
        member.state = MemberState.DRAINED if quiet else MemberState.GONE
        if not group.ended and (member.scheduler or not group.attached):
            self._end(group)
        self.release_quarantine(group)

    def drained(self, session: int) -> None:
        """Note that a session that left without a word can no longer write.

        The session may have reported so itself since.
        """
        group = self._state.groups.of_session(session)
        if group is None:
            return
        member = group.members[session]
        if member.state is MemberState.GONE:
            member.state = MemberState.DRAINED
        self.release_quarantine(group)

    def _check_shape(self, joining: Joining) -> None:
        contract, state = joining.contract, self._state
        named = 0 < len(joining.engine_id) <= ENGINE_ID_CHARS_MAX
        require(
            named, Reason.BAD_MESSAGE, f"engine_id must have 1..{ENGINE_ID_CHARS_MAX} characters"
        )
        for name in ("process_group", "model_name"):
            require(
                len(getattr(joining, name)) <= ENGINE_ID_CHARS_MAX,
                Reason.BAD_MESSAGE,
                f"{name} must have at most {ENGINE_ID_CHARS_MAX} characters",
            )
        require(
            -1 <= joining.rank < contract.world_size and (joining.scheduler or joining.rank >= 0),
            Reason.BAD_MESSAGE,
            f"rank {joining.rank} is not in the contract's {contract.world_size} ranks",
        )
        geometry = state.table.geometry
        segment = state.segment_of[joining.tenant]
        capacity, slabs = geometry.segment_bytes(segment), geometry.segments[segment].slabs
        for index, spec in enumerate(contract.groups):
            size = state.slot_bytes(spec)
            require(
                size and spec.shards <= slabs * (geometry.slab_bytes // size),
                Reason.BAD_CONTRACT,
                f"groups[{index}].page_bytes: a block of {spec.shards} x {spec.page_bytes} bytes "
                f"does not fit slabs of {geometry.slab_bytes} in {capacity} bytes",
            )

    def _check_place(self, group: Group, namespace: Namespace, joining: Joining) -> None:
        require(
            joining.incarnation in (0, group.incarnation),
            Reason.STALE_INCARNATION,
            f"incarnation {joining.incarnation} is not the running one, {group.incarnation}",
        )
        require(
            joining.process_group == group.process_group,
            Reason.RANK_TAKEN,
            f"engine {joining.engine_id!r} runs already in other processes; {_REMEDY}",
        )
        differing = differences(joining.contract, namespace.contract)
        if differing:
            text = "; ".join(
                f"{name}: {ours!r} here, {theirs!r} there" for name, ours, theirs in differing
            )
            raise KVHearthError(
                Reason.CONTRACT_MISMATCH,
                f"engine {joining.engine_id!r} runs under another contract: {text}",
                fields=",".join(name for name, _, _ in differing),
            )
        for member in group.attached:
            same = (joining.scheduler and member.scheduler) or (
                joining.rank >= 0 and joining.rank == member.rank
            )
            require(
                not same,
                Reason.RANK_TAKEN,
                f"engine {joining.engine_id!r} has this scheduler or rank already; {_REMEDY}",
            )

    def _end(self, group: Group) -> None:
        """End a group and its leases; quarantine its reserved slots until no member can write."""
        state = self._state
        group.ended = True
        state.count("groups_ended")
        state.namespaces.get(group.namespace).groups -= 1
        for lease_id in list(group.leases):
            drop_lease(state, group, lease_id)
        held = group.held_slots(state.table)
        quarantine(state, group, held[state.table.state[held] == State.RESERVED])
        group.reservations.clear()

    def release_quarantine(self, group: Group) -> None:
        """Free the quarantined slots of an ended group once no member can write.

        Drained members are forgotten; otherwise a rank that comes and goes would leave a record
        each time.
        """
        self._state.groups.forget_drained(group)
        if not group.has_undrained_member and group.doubtful and not group.ended:
            state = self._state
            slots = np.unique(np.concatenate(group.doubtful))
            group.doubtful.clear()
            mine = state.table.owner[slots] == group.number
            quarantined = state.table.state[slots] == State.QUARANTINED
            take_from_quarantine(state, group, slots[mine & quarantined])
        if group.ended and group.drained:
            held = group.held_slots(self._state.table)
            take_from_quarantine(self._state, group, held)
            self._state.groups.drop(group)
            self.end_private(group.namespace)

    def end_private(self, number: int) -> None:
        """Give a private namespace up if nobody uses it: its blocks are the first victims, and its
        entry goes with them.
        """
        state = self._state
        namespace = state.namespaces.find_number(number)
        if namespace is None or not namespace.contract.private:
            return
        if not state.groups.of_namespace(number):
            state.namespaces.ended[number] = namespace
            state.policies.reorder(number)
            state.namespaces.end_pins(number, "ended")


def quarantine(state: CoreState, group: Group, slots: I64) -> None:
    """Quarantine RESERVED slots, which a member may still write to."""
    if not len(slots):
        return
    state.table.bump(slots)
    state.table.state[slots] = State.QUARANTINED
    size = state.book(group.segment, "reserved", slots, -1)
    state.book(group.segment, "quarantined", slots, +1)
    group.stock_bytes -= size
    group.quarantined_bytes += size
    state.count("quarantined_slots", len(slots))
    state.actions.append(Mark(slots, State.QUARANTINED, group.number))


def take_from_quarantine(state: CoreState, group: Group, slots: I64) -> None:
    """Free quarantined slots of a group that nothing can write to any more."""
    if not len(slots):
        return
    size = state.book(group.segment, "quarantined", slots, -1)
    group.quarantined_bytes -= size
    state.bill(group.namespace, -size)
    state.count("released_quarantine_slots", len(slots))
    state.free_slots(group.segment, np.sort(slots))
