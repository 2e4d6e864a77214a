"""Reports for operators: plain dataclasses that HTTP answers as JSON and the CLI reads back. Their
docstrings and descriptions are OpenAPI's.
"""

from __future__ import annotations

import asyncio
import enum
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from kvhearth.contract import KEY_BYTES_MAX, KEY_BYTES_MIN, Contract, namespace_digest
from kvhearth.errors import KVHearthError, Reason
from kvhearth.model import Tier
from kvhearth.version import PROTOCOL_VERSION, __version__
from kvhearth_server.core.lookup import KeysItem
from kvhearth_server.core.namespaces import Namespace as CoreNamespace
from kvhearth_server.core.scores import score
from kvhearth_server.core.slot_table import State
from kvhearth_server.core.state import require
from kvhearth_server.engine.engine import Engine
from kvhearth_server.engine.operations import PINS_MAX
from kvhearth_server.transport.messages import plain_text

LEASES_AT_ONCE = 128


@dataclass(frozen=True)
class Report:
    """What a daemon says."""

    boot_id: Annotated[str, Field(description="A new one for each start of the daemon.")]


@dataclass(frozen=True)
class Version(Report):
    """Versions of the running daemon."""

    version: str
    protocol: int


@dataclass(frozen=True)
class Session:
    """One process that is attached, or left and may still be writing."""

    session: int
    tenant: str
    engine_id: str
    incarnation: int
    scheduler: bool
    rank: Annotated[int, Field(description="-1 for a process that moves no bytes.")]
    world_size: int
    pid: Annotated[int, Field(description="0 where the kernel does not tell.")]
    namespace: str
    state: str


@dataclass(frozen=True)
class Sessions(Report):
    """All sessions."""

    sessions: list[Session]


@dataclass(frozen=True)
class Namespace:
    """One tenant's contract, and the blocks stored under it."""

    namespace: Annotated[str, Field(description="Digest, 64 hex digits.")]
    tenant: str
    model: Annotated[str, Field(description="Its name; of a local model base name#digits.")]
    contract: dict[str, Any]
    epoch: int
    blocks: int
    used_bytes: int
    quota_bytes: int | None
    engines: Annotated[int, Field(description="Engines that use it now.")]
    ended: Annotated[
        bool, Field(description="Of a run that has ended: its blocks are the first victims.")
    ]


@dataclass(frozen=True)
class Namespaces(Report):
    """All namespaces."""

    namespaces: list[Namespace]


@dataclass(frozen=True)
class LeaseHolder:
    """Leases of one group's readers; slots and bytes count once for each lease on them."""

    tenant: str
    engine_id: str
    incarnation: int
    namespace: str
    leases: int
    slots: int
    bytes: int
    oldest_s: float


@dataclass(frozen=True)
class Leases(Report):
    """Groups that hold leases, the one with the oldest first."""

    groups: list[LeaseHolder]


@dataclass(frozen=True)
class Pin:
    """Blocks that are evicted last, for a while; those with several pins count in each."""

    tenant: str
    namespace: str
    session: Annotated[str, Field(description="The client's name for what wants them.")]
    blocks: int
    bytes: int
    ends_in_s: float


@dataclass(frozen=True)
class Pins(Report):
    """Pins, the one that ends first first."""

    pins: list[Pin]


@dataclass(frozen=True)
class Unpinned(Report):
    """Result of an unpin."""

    ended_pins: int


@dataclass(frozen=True)
class KeyPlace:
    """A block of a key, in memory or on SSD."""

    namespace: str
    tenant: str
    kv_group: int
    state: str
    tier: str
    epoch: int
    namespace_epoch: int
    shard_bytes: int
    shards: int
    why_not: Annotated[str, Field(description="Why a lookup does not hit it; empty if it does.")]
    leases: int = 0
    pins: int = 0


@dataclass(frozen=True)
class KeyPlaces(Report):
    """Where a key is: in which namespaces and KV groups, and whether it would be served."""

    places: list[KeyPlace]


@dataclass(frozen=True)
class FieldDifference:
    """A field in which two contracts differ."""

    field: str
    asked: str
    stored: str


@dataclass(frozen=True)
class NamespaceDifference:
    """A namespace whose contract is near another one, and what tells them apart."""

    namespace: str
    fields: list[FieldDifference]


@dataclass(frozen=True)
class ContractPlace(Report):
    """The namespace of a contract, and those of the tenant that are near it."""

    namespace: str
    exists: bool
    nearest: list[NamespaceDifference]


@dataclass(frozen=True)
class Books(Report):
    """Whether a recount of everything agrees with the books."""

    balanced: bool
    error: Annotated[
        str, Field(description="What disagrees, with both numbers; empty if nothing does.")
    ]


@dataclass(frozen=True)
class Config(Report):
    """The settings in effect; they name files of secrets and hold none."""

    settings: dict[str, Any]


@dataclass(frozen=True)
class Evicted(Report):
    """Blocks that were removed."""

    evicted_blocks: Annotated[int, Field(description="From memory.")]
    ssd_blocks: Annotated[int, Field(description="From SSD.")]


@dataclass(frozen=True)
class Bumped(Report):
    """The weights epoch from now on."""

    epoch: int


@dataclass(frozen=True)
class Drained(Report):
    """The daemon accepts no more stores and attaches."""

    draining: bool


@dataclass(frozen=True)
class Reload(Report):
    """Settings that changed when they were read again."""

    changed: Annotated[list[str], Field(description="They hold now.")]
    needs_restart: Annotated[list[str], Field(description="They hold after a restart only.")]


class Grade(enum.StrEnum):
    """Severity of a finding: ``fail`` keeps a daemon from starting, ``warn`` costs speed or a
    feature.
    """

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True)
class Finding:
    """Something about this machine, and whether it could be better."""

    check: str
    grade: Grade
    found: str
    fix: Annotated[str, Field(description="The line that fixes it; empty for nothing.")] = ""


Examine = Callable[[], list[Finding]]


def version(engine: Engine) -> Version:
    """Return the versions of the running daemon."""
    return Version(engine.boot_id, __version__, PROTOCOL_VERSION)


def sessions(engine: Engine) -> Sessions:
    """Return every member of every group."""
    digests, state = _digests(engine), engine.core.state
    members = [(group, member) for group in state.groups for member in group.members.values()]
    return Sessions(
        engine.boot_id,
        [
            Session(
                session=member.session,
                tenant=group.tenant,
                engine_id=group.engine_id,
                incarnation=group.incarnation,
                scheduler=member.scheduler,
                rank=member.rank,
                world_size=group.world_size,
                pid=record.peer.pid if (record := engine.sessions.find(member.session)) else 0,
                namespace=digests.get(group.namespace, ""),
                state=str(member.state),
            )
            for group, member in members
        ],
    )


def namespaces(engine: Engine) -> Namespaces:
    """Return every namespace with its contract."""
    known = engine.core.state.namespaces
    return Namespaces(
        engine.boot_id,
        [
            Namespace(
                namespace=space.digest.hex(),
                tenant=space.tenant,
                model=space.model,
                contract=json.loads(space.contract.to_json()),
                epoch=space.epoch,
                blocks=space.blocks,
                used_bytes=space.used_bytes,
                quota_bytes=space.quota_bytes,
                engines=space.groups,
                ended=space.number in known.ended,
            )
            for space in known
        ],
    )


async def leases(engine: Engine) -> Leases:
    """Return the leases that each group's readers hold, the group with the oldest first.

    The loop turns after each ``LEASES_AT_ONCE`` leases; they may come and go meanwhile.
    """
    digests, table, found = _digests(engine), engine.core.state.table, list[LeaseHolder]()
    for group in engine.core.state.groups:
        if not group.leases:
            continue
        oldest, sizes, total = min(group.leased_at.values()), list[int](), 0
        for index, lease in enumerate(list(group.leases), 1):
            if (slots := group.leases.get(lease)) is not None:
                sizes.append(len(slots))
                total += table.total_bytes(slots)
            if index % LEASES_AT_ONCE == 0:
                await asyncio.sleep(0)
        holder = LeaseHolder(
            tenant=group.tenant,
            engine_id=group.engine_id,
            incarnation=group.incarnation,
            namespace=digests.get(group.namespace, ""),
            leases=len(sizes),
            slots=sum(sizes),
            bytes=total,
            oldest_s=max(0.0, engine.now() - oldest),
        )
        found.append(holder)
    return Leases(engine.boot_id, sorted(found, key=lambda holder: -holder.oldest_s))


async def pins(engine: Engine) -> Pins:
    """Return the pins; the loop turns after some of them, and they may end meanwhile."""
    digests, state, found = _digests(engine), engine.core.state, list[Pin]()
    for index, (number, pin) in enumerate(engine.core.pinning.listed(), 1):
        slots = engine.core.pinning.living(pin)
        one = Pin(
            tenant=state.table.geometry.segments[pin.segment].tenant,
            namespace=digests.get(number, ""),
            session=pin.session,
            blocks=int(np.count_nonzero(state.table.head[slots] == 0)),
            bytes=state.table.total_bytes(slots),
            ends_in_s=max(0.0, pin.expires_at - engine.now()),
        )
        found.append(one)
        if index % PINS_MAX == 0:
            await asyncio.sleep(0)
    return Pins(engine.boot_id, sorted(found, key=lambda pin: pin.ends_in_s))


@dataclass(frozen=True)
class TierScore:
    """The longest prefix that a tier and all faster ones could restore."""

    blocks: Annotated[int, Field(description="Blocks of the first of the groups.")]
    tokens: int
    ms: Annotated[
        float, Field(description="Estimated milliseconds until all of it could be in memory.")
    ]


@dataclass(frozen=True)
class Scores(Report):
    """How much of a prompt could be restored."""

    dram: TierScore
    ssd: Annotated[TierScore, Field(description="From memory and SSD.")]
    remote: Annotated[
        TierScore, Field(description="From memory, SSD and what is known to be at remotes.")
    ]


async def prefix_scores(
    engine: Engine, namespace: str, keys: dict[int, list[str] | list[int]]
) -> Scores:
    """Score the keys of a prompt, by KV group.

    Args:
        namespace: first hex digits of its digest.
        keys: keys as hex digits, or their last 8 bytes as numbers.

    Raises:
        KVHearthError: ``unknown_namespace``, ``bad_group``, ``bad_keys``, ``too_many_keys``.
    """
    state, tiering = engine.core.state, engine.tiering
    space = engine.core.named_by(namespace)
    state.check_count(sum(map(len, keys.values())))
    if any(int in map(type, named) for named in keys.values()):
        while engine.call(engine.core.short_keys.read, space, engine.now()):
            await asyncio.sleep(0)
    items = [KeysItem(group, _keys_of(engine, space, group, keys[group])) for group in keys]
    found = dict[str, TierScore]()
    for tier, tokens, promotions in score(state, space, items):
        eta_us = 0
        if tiering is not None and promotions:
            eta_us = tiering.eta_us(promotions, remote=tier is Tier.REMOTE)
        blocks = tokens // space.contract.groups[items[0].kv_group].block_tokens
        found[tier.name.lower()] = TierScore(blocks, tokens, eta_us / 1000)
    return Scores(engine.boot_id, **found)


def _keys_of(
    engine: Engine, space: CoreNamespace, kv_group: int, named: list[str] | list[int]
) -> list[bytes]:
    size = space.contract.hash_bytes
    if shorts := [each for each in named if isinstance(each, int)]:
        return engine.core.short_keys.find(space, kv_group, shorts)
    try:
        keys = [bytes.fromhex(each) for each in named if isinstance(each, str)]
    except ValueError:
        raise KVHearthError(Reason.BAD_KEYS, "a key is not hex digits") from None
    good = all(len(key) == size for key in keys)
    require(good, Reason.BAD_KEYS, f"a key of this namespace has {size} bytes")
    return keys


def key_places(engine: Engine, key: bytes) -> KeyPlaces:
    """Return the places of a key, those in memory first.

    Raises:
        KVHearthError: ``bad_keys`` if nothing of this length can be a key.
    """
    require(
        KEY_BYTES_MIN <= len(key) <= KEY_BYTES_MAX,
        Reason.BAD_KEYS,
        f"a key has {KEY_BYTES_MIN}..{KEY_BYTES_MAX} bytes, this one has {len(key)}",
    )
    found = [
        place
        for space in sorted(engine.core.state.namespaces, key=lambda space: space.number)
        for kv_group in range(len(space.contract.groups))
        for place in _places(engine, space, kv_group, key)
    ]
    return KeyPlaces(engine.boot_id, sorted(found, key=lambda place: place.state == _SAVED))


def _places(engine: Engine, space: CoreNamespace, kv_group: int, key: bytes) -> Iterator[KeyPlace]:
    """Yield a key's block of one namespace and KV group: in memory, on SSD, both or none."""
    state, tiering, spec = engine.core.state, engine.tiering, space.contract.groups[kv_group]
    place = partial(
        KeyPlace,
        namespace=space.digest.hex(),
        tenant=space.tenant,
        kv_group=kv_group,
        namespace_epoch=space.epoch,
        shard_bytes=spec.page_bytes,
        shards=spec.shards,
    )
    head = int(state.index.find(space.number, kv_group, [key])[0])
    if head >= 0:
        at, epoch = State(int(state.table.state[head])), int(state.table.epoch[head])
        yield place(
            state=at.name.lower(),
            tier=Tier.DRAM.name.lower(),
            epoch=epoch,
            why_not=_why_not(at, epoch, space.epoch),
            leases=int(state.table.refs[head]),
            pins=int(state.table.pins[head]),
        )
    if tiering is not None and tiering.present(space, kv_group, [key])[0]:
        why_not = _IN_MEMORY_TOO if head >= 0 else _SSD_ONLY
        yield place(state=_SAVED, tier=Tier.SSD.name.lower(), epoch=space.epoch, why_not=why_not)


def _why_not(state: State, epoch: int, current: int) -> str:
    """Return why a block in memory is not served; empty if it is."""
    if epoch != current:
        return f"its weights epoch {epoch} is not the namespace's {current}: weights have changed"
    if state is State.COMMITTED:
        return "committed, its checksum is still being taken: ask again"
    if state is not State.SUMMED:
        return f"its slots are {state.name.lower()}, only summed ones are served"
    return ""


_SAVED = "saved"
_SSD_ONLY = "it is on SSD only: a lookup with prefetch, or a prefetch, loads it first"
_IN_MEMORY_TOO = "this is a copy: the block is served from memory"


def contract_place(engine: Engine, tenant: str, text: str) -> ContractPlace:
    """Return the namespace of a contract; ``tenant`` may be empty for the first one.

    Raises:
        KVHearthError: ``bad_contract``.
    """
    state = engine.core.state
    contract = Contract.from_json(text)
    tenant = tenant or state.table.geometry.segments[0].tenant
    digest = namespace_digest(tenant, contract)
    nearest = [
        NamespaceDifference(
            space.digest.hex(),
            [FieldDifference(name, plain_text(a), plain_text(b)) for name, a, b in fields],
        )
        for space, fields in state.namespaces.explain(tenant, contract)
    ]
    known = state.namespaces.find(digest) is not None
    return ContractPlace(engine.boot_id, digest.hex(), known, nearest)


def _digests(engine: Engine) -> dict[int, str]:
    """Return the namespaces' digests. An ended group may outlive its namespace, which was empty and
    made place for another one.
    """
    return {space.number: space.digest.hex() for space in engine.core.state.namespaces}
