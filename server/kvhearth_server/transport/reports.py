"""Reports for operators and their actions: plain dataclasses that HTTP answers as JSON and the CLI
reads back. Their docstrings and descriptions are OpenAPI's.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field

from kvhearth.contract import KEY_BYTES_MAX, KEY_BYTES_MIN, Contract, namespace_digest
from kvhearth.errors import KVHearthError, Reason
from kvhearth.model import Tier
from kvhearth.version import PROTOCOL_VERSION, __version__
from kvhearth_server.core.inspection import held_by_groups, places
from kvhearth_server.core.state import require
from kvhearth_server.engine import operations
from kvhearth_server.engine.engine import Engine
from kvhearth_server.engine.operations import Where
from kvhearth_server.engine.sessions import Session as SessionRecord
from kvhearth_server.observability.logs import LimitedLog, Throttle, get_logger
from kvhearth_server.transport.messages import plain_text

_NAME_CHARS = 64
_log = get_logger("kvhearth.admin")
_refusals = LimitedLog(_log)
_BUMPS_A_SECOND = 16
LABEL_BYTES_MAX = 256
_bumps = LimitedLog(get_logger("kvhearth.audit"), Throttle(burst=_BUMPS_A_SECOND))


operator: ContextVar[str] = ContextVar("operator", default="")
"""Name of the identity behind a request; "" for the daemon's own tokens."""


@contextlib.contextmanager
def audited(verb: str, peer: str, **fields: object) -> Iterator[dict[str, object]]:
    """Log ``admin.VERB`` when the block ends, with its result: done, cancelled (the operator hung
    up), failed, or the reason of a refusal.

    Args:
        peer: the requester, as far as the transport knows it.
        fields: parameters of the action; the block may add results to the dict that it receives.
    """
    details = {
        name: plain_text(v, _NAME_CHARS) if isinstance(v, str) else v for name, v in fields.items()
    }
    result = "failed"
    try:
        yield details
        result = "done"
    except KVHearthError as error:
        result = str(error.reason)
        raise
    except asyncio.CancelledError:
        result = "cancelled"
        raise
    finally:
        say = _log.info if result == "done" else _log.warning
        by = named(operator.get())
        say(f"admin.{verb}", result=result, peer=peer, **by, **details)


def check_label(label: str | None) -> None:
    """Refuse names of weights that no log could show.

    Raises:
        KVHearthError: ``bad_message``.
    """
    good = label is None or (len(label.encode()) <= LABEL_BYTES_MAX and label.isprintable())
    require(good, Reason.BAD_MESSAGE, f"a label is printable, of at most {LABEL_BYTES_MAX} bytes")


def bumped(record: SessionRecord, epoch: int) -> None:
    """Log that an engine's process raised its namespace's weights epoch, which voids all blocks."""
    peer = record.peer
    _bumps.warning(
        "engine.bumped",
        kind=record.tenant,
        session=record.number,
        uid=peer.uid,
        pid=peer.pid,
        tenant=record.tenant,
        epoch=epoch,
        **named(record.identity),
    )


def named(identity: str) -> dict[str, str]:
    """Return the log's field for the remote identity behind a session; none if it is local."""
    return {"identity": plain_text(identity, _NAME_CHARS)} if identity else {}


def refused(peer: str) -> None:
    """Log a request without the admin token, once a second at most."""
    _refusals.warning("admin.refused", kind="http", peer=peer, result="not_admin")


@dataclass(frozen=True)
class Version:
    """Versions of the running daemon."""

    version: str
    protocol: int
    boot_id: Annotated[str, Field(description="A new one for each start of the daemon.")]


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
class Sessions:
    """All sessions."""

    boot_id: str
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
class Namespaces:
    """All namespaces."""

    boot_id: str
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
class Leases:
    """Groups that hold leases, the one with the oldest first."""

    boot_id: str
    groups: list[LeaseHolder]


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
class KeyPlaces:
    """Where a key is: in which namespaces and KV groups, and whether it would be served."""

    boot_id: str
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
class ContractPlace:
    """The namespace of a contract, and those of the tenant that are near it."""

    boot_id: str
    namespace: str
    exists: bool
    nearest: list[NamespaceDifference]


@dataclass(frozen=True)
class Books:
    """Whether a recount of everything agrees with the books."""

    boot_id: str
    balanced: bool
    error: Annotated[
        str, Field(description="What disagrees, with both numbers; empty if nothing does.")
    ]


@dataclass(frozen=True)
class Evicted:
    """Blocks that were removed."""

    boot_id: str
    evicted_blocks: Annotated[int, Field(description="From memory.")]
    ssd_blocks: Annotated[int, Field(description="From SSD.")]


@dataclass(frozen=True)
class Bumped:
    """The weights epoch from now on."""

    boot_id: str
    epoch: int


@dataclass(frozen=True)
class Drained:
    """The daemon accepts no more stores and attaches."""

    boot_id: str
    draining: bool


@dataclass(frozen=True)
class Reload:
    """Settings that changed when they were read again."""

    boot_id: str
    changed: Annotated[list[str], Field(description="They hold now.")]
    needs_restart: Annotated[list[str], Field(description="They hold after a restart only.")]


def version(engine: Engine) -> Version:
    """Return the versions of the running daemon."""
    return Version(__version__, PROTOCOL_VERSION, engine.boot_id)


def sessions(engine: Engine) -> Sessions:
    """Return every member of every group."""
    return Sessions(engine.boot_id, list(each_session(engine)))


def each_session(engine: Engine) -> Iterator[Session]:
    """Yield every member of every group; the loop may turn in between."""
    digests = _digests(engine)
    for group in list(engine.core.state.groups):
        for member in list(group.members.values()):
            record = engine.sessions.find(member.session)
            yield Session(
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


def namespaces(engine: Engine) -> Namespaces:
    """Return every namespace with its contract."""
    return Namespaces(engine.boot_id, list(each_namespace(engine)))


def each_namespace(engine: Engine) -> Iterator[Namespace]:
    """Yield every namespace with its contract; the loop may turn in between."""
    for space in engine.core.state.namespaces:
        yield Namespace(
            namespace=space.digest.hex(),
            tenant=space.tenant,
            model=space.model,
            contract=json.loads(space.contract.to_json()),
            epoch=space.epoch,
            blocks=space.blocks,
            used_bytes=space.used_bytes,
            quota_bytes=space.quota_bytes,
            engines=space.groups,
            ended=space.number in engine.core.state.namespaces.ended,
        )


async def leases(engine: Engine) -> Leases:
    """Return the leases that each group's readers hold, the group with the oldest first."""
    digests, found = _digests(engine), list[LeaseHolder]()
    for held in held_by_groups(engine.core.state, engine.now()):
        if held is None:
            await asyncio.sleep(0)
            continue
        found.append(
            LeaseHolder(
                tenant=held.group.tenant,
                engine_id=held.group.engine_id,
                incarnation=held.group.incarnation,
                namespace=digests.get(held.group.namespace, ""),
                leases=held.leases,
                slots=held.slots,
                bytes=held.bytes,
                oldest_s=held.oldest_s,
            )
        )
    return Leases(engine.boot_id, sorted(found, key=lambda holder: -holder.oldest_s))


def key_places(engine: Engine, key: bytes) -> KeyPlaces:
    """Return the places of a key.

    Raises:
        KVHearthError: ``bad_keys`` if nothing of this length can be a key.
    """
    require(
        KEY_BYTES_MIN <= len(key) <= KEY_BYTES_MAX,
        Reason.BAD_KEYS,
        f"a key has {KEY_BYTES_MIN}..{KEY_BYTES_MAX} bytes, this one has {len(key)}",
    )
    in_memory = [
        KeyPlace(
            namespace=place.namespace.digest.hex(),
            tenant=place.namespace.tenant,
            kv_group=place.kv_group,
            state=place.state.name.lower(),
            tier=place.tier.name.lower(),
            epoch=place.epoch,
            namespace_epoch=place.namespace.epoch,
            shard_bytes=place.shard_bytes,
            shards=place.shards,
            why_not=place.why_not,
            leases=place.leases,
            pins=place.pins,
        )
        for place in places(engine.core.state, key)
    ]
    return KeyPlaces(engine.boot_id, [*in_memory, *_on_ssd(engine, key)])


def _on_ssd(engine: Engine, key: bytes) -> Iterator[KeyPlace]:
    """Yield the key's blocks on SSD, in every namespace and KV group."""
    state, tiering = engine.core.state, engine.tiering
    for namespace in state.namespaces if tiering is not None else ():
        for kv_group, spec in enumerate(namespace.contract.groups):
            assert tiering is not None
            if not tiering.present(namespace, kv_group, [key])[0]:
                continue
            here = int(state.index.find(namespace.number, kv_group, [key])[0]) >= 0
            yield KeyPlace(
                namespace=namespace.digest.hex(),
                tenant=namespace.tenant,
                kv_group=kv_group,
                state="saved",
                tier=Tier.SSD.name.lower(),
                epoch=namespace.epoch,
                namespace_epoch=namespace.epoch,
                shard_bytes=spec.page_bytes,
                shards=spec.shards,
                why_not=_IN_MEMORY_TOO if here else _SSD_ONLY,
            )


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


_TIERS: Mapping[str | None, Where | None] = {
    None: None,
    "memory": "memory",
    "ssd": "ssd",
    "all": "all",
}


def _digest(namespace: str) -> bytes:
    """Return the digest that an operator wrote.

    Raises:
        KVHearthError: ``unknown_namespace``.
    """
    try:
        return bytes.fromhex(namespace)
    except ValueError:
        raise KVHearthError(
            Reason.UNKNOWN_NAMESPACE, "a namespace is named by its 64 hex digits"
        ) from None


@dataclass(frozen=True)
class Actions:
    """Operators' actions, each with its line in the audit log.

    Raises:
        KVHearthError: as the functions of ``engine.operations``.
    """

    engine: Engine

    async def evict(self, peer: str, namespace: str, keep_bytes: int, tier: str | None) -> Evicted:
        """Remove blocks of a namespace, coldest first, down to ``keep_bytes``."""
        asked = {"namespace": namespace, "keep_bytes": keep_bytes, "tier": tier}
        with audited("evict", peer, **asked) as details:
            require(tier in _TIERS, Reason.BAD_MESSAGE, f"there is no tier {tier}")
            digest, where = _digest(namespace), _TIERS[tier]
            removed = await operations.evict(self.engine, digest, keep_bytes, where)
            details |= {"evicted_blocks": removed.memory, "ssd_blocks": removed.ssd}
        return Evicted(self.engine.boot_id, removed.memory, removed.ssd)

    async def forget(
        self, peer: str, namespace: str, expected_epoch: int | None, label: str | None = None
    ) -> Bumped:
        """Make all blocks of a namespace invalid at once because its weights have changed;
        ``label`` names the new ones at remotes.
        """
        named = {} if label is None else {"label": label}
        with audited("forget", peer, namespace=namespace, **named) as details:
            check_label(label)
            digest = _digest(namespace)
            epoch = await operations.forget(self.engine, digest, expected_epoch, label)
            details["epoch"] = epoch
        return Bumped(self.engine.boot_id, epoch)

    async def reload(self, peer: str) -> Reload:
        """Read the settings again and apply those that may change while serving."""
        with audited("reload", peer) as details:
            done = await self.engine.reload()
            details |= {"changed": done.changed, "needs_restart": done.needs_restart}
        return Reload(self.engine.boot_id, done.changed, done.needs_restart)

    def drain(self, peer: str) -> Drained:
        """Accept no more stores and attaches, as before a shutdown."""
        with audited("drain", peer):
            self.engine.drain()
        return Drained(self.engine.boot_id, True)
