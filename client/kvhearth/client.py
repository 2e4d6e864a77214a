"""``KVClient``, an engine's interface to KVHearth. It fails open and never raises to the engine."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping

import numpy as np

from kvhearth import portions
from kvhearth.clock import REAL_TIME, Clock
from kvhearth.contract import CONTRACT_JSON_BYTES_MAX, Contract
from kvhearth.counters import Counters
from kvhearth.errors import KVHearthError, NoReason, Reason, reason_of
from kvhearth.fail_open import BadExtents, Caller, Returns, T, outcome_unknown, parse_arguments
from kvhearth.model import Ids, Records
from kvhearth.native import library
from kvhearth.numa import own_node
from kvhearth.proto.v1 import cache_pb2 as pb
from kvhearth.results import (
    CommitGroup,
    CommitResult,
    EventsResult,
    Lease,
    LookupResult,
    Pin,
    PrefetchResult,
    Reservation,
)
from kvhearth.session.link import EPOCH_UNKNOWN, Arena, Link
from kvhearth.session.manager import Attached, Drain, SessionManager
from kvhearth.shared_index import MappedLeases, find_mapped
from kvhearth.transports import base
from kvhearth.url import DaemonUrl, UnixUrl, parse_url
from kvhearth.version import PROTOCOL_VERSION
from kvhearth.wire import messages as codec
from kvhearth.wire.handshake import NAMELESS, Hello, Run
from kvhearth.wire.messages import KeysByGroup, Query

_NAME_BYTES = 256
_SHORT = frozenset({Reason.HELD_CAP, Reason.NO_SPACE, Reason.QUOTA_EXCEEDED, Reason.STOCK_CAP})
"""Bounds that leave nothing to reserve: the answer of a full cache, not a failure."""


class Decisions:
    """The calls of ``KVClient`` that ask the daemon; its docstring holds for all methods."""

    def __init__(self, url: DaemonUrl, contract: Contract, hello: Hello, clock: Clock) -> None:
        self.clock = clock
        self._contract = contract
        self._ids = Ids()
        self._lookup_s = url.lookup_ms / 1000
        self._call_s = url.call_ms / 1000
        self._counters = Counters()
        self._session_manager = SessionManager(url, hello, self._counters, clock)
        self._caller = Caller(self._session_manager, self._counters, clock, decides=hello.scheduler)
        self._returns = Returns(self._caller, contract)
        self._leases = MappedLeases(contract, clock)

    @property
    def epoch(self) -> int:
        """Weights epoch that this engine runs with; -1 while it is not known.

        It is the daemon's at the first attach and follows only ``bump_epoch`` and ``use_epoch``: an
        engine does not get new weights because another one did. Under another epoch than the
        daemon's all answers are misses. A daemon that started without its old blocks begins at a
        new epoch, which an engine that was up to date until then takes over.
        """
        return self._session_manager.epochs.own

    def lookup(
        self,
        groups: KeysByGroup,
        *,
        lease: bool = True,
        prefetch: bool = False,
        wait_s: float = 0,
    ) -> LookupResult:
        """Look up a request's blocks and lease those that a load needs.

        Args:
            groups: by group, the keys of the request in chain order, as many as it has.
            lease: hold the blocks that may be loaded, until ``release``.
            prefetch: start promoting blocks on slower tiers.
            wait_s: seconds for which the caller will wait for these; the daemon loads none from a
                remote that would come later. 0: any time.
        """
        lease_id = self._ids.new_id() if lease else 0
        own = parse_arguments(codec.snapshot_keys, groups)

        def work() -> LookupResult:
            link = self._caller.link_to_ask()
            query = self._query(own)
            if not query.key_count:
                boot_id = self._caller.link().boot_id
                return LookupResult(0, None, codec.absent(own or {}), boot_id=boot_id)
            if link.tables and (mapped := self._find_mapped(link, query, lease_id)) is not None:
                return mapped
            if lease and link.tables:
                self._leases.wait(link, query, self._lookup_s)
            request = pb.LookupRequest(
                epoch=self._own_epoch(), lease_id=lease_id, prefetch=prefetch
            )
            request.wait_us = max(0, round(wait_s * 1e6))
            long = query.key_count > link.welcome.keys_max
            try:
                result = (self._look_up_long if long else self._look_up)(link, query, request)
            except KVHearthError as error:
                # Portions before one that failed may hold blocks.
                if lease_id and (long or outcome_unknown(error)):
                    self._returns.release_id(link, lease_id, promotions=prefetch)
                raise
            self._counters.add_all(
                {"lookup_keys": query.key_count, "lookup_hit_tokens": result.hit_tokens}
            )
            return result

        return self._caller.decide(
            "lookup", work, lambda why: LookupResult(0, None, codec.absent(own or {}), 0, why)
        )

    def lookup_mapped(self, groups: KeysByGroup) -> LookupResult | None:
        """Look up as ``lookup`` with a lease, without a call; None if only ``lookup`` can tell."""
        own = parse_arguments(codec.snapshot_keys, groups)

        def work() -> LookupResult | None:
            link = self._caller.held_link()
            count = sum(map(len, _require_valid(own).values()))
            # A longer search would hold up the engine's scheduler.
            if not 0 < count <= link.welcome.keys_max:
                return None
            return self._find_mapped(link, self._query(own), self._ids.new_id())

        return self._caller.decide("lookup_mapped", work, lambda why: None)

    def _find_mapped(self, link: Link, query: Query, lease_id: int) -> LookupResult | None:
        """Answer from the mapped index; the daemon hears of it later, for the lease and its use."""
        found = find_mapped(link, self._contract, query, self.epoch, lease_id)
        if found is None or (posts := self._leases.posts(link, query, found, self.epoch)) is None:
            return None
        kind = f"{base.LOOKUP.name}:{lease_id or self._ids.new_id()}"
        for number, post in enumerate(posts):
            self._caller.post(
                link,
                base.LOOKUP,
                post.request,
                kind=f"{kind}:{number}",
                weight=post.query.key_count,
                parts=len(post.query.blobs),
                answered=post.answered,
            )
        self._counters.add_all(
            {"lookup_keys": query.key_count, "lookup_hit_tokens": found.hit_tokens}
        )
        return found

    def holds(self, found: LookupResult) -> bool:
        return self._leases.holds(found)

    def prefetch(self, groups: KeysByGroup) -> PrefetchResult:
        """Request the promotion of blocks on slower tiers; leases nothing."""
        own = parse_arguments(codec.snapshot_keys, groups)

        def work() -> PrefetchResult:
            link = self._caller.link()
            whole, found, eta_us = self._query(own), [], 0
            for query in portions.queries(whole, link.welcome.keys_max):
                request = pb.PrefetchRequest(epoch=self._own_epoch())
                query.put_into(request.groups)
                reply = self._caller.call(link, base.PREFETCH, request, self._lookup_s)
                found.append(
                    codec.parse_presence(self._contract, link.welcome, query, reply.groups)
                )
                eta_us = max(eta_us, reply.eta_us)
            groups = portions.joined_presence(whole.counts, found)
            return PrefetchResult(groups, eta_us, boot_id=link.boot_id)

        return self._caller.decide(
            "prefetch", work, lambda why: PrefetchResult(codec.absent(own or {}), 0, why)
        )

    def reserve(self, groups: Mapping[int, int]) -> Reservation:
        """Reserve empty slots for the given number of blocks by group; fewer may be granted."""
        own = parse_arguments(codec.own_counts, groups)

        def work() -> Reservation:
            link = self._caller.link()
            wanted = _require_valid(own)
            extents = codec.no_extents(self._contract, wanted)
            short: Reason | NoReason = ""
            for counts in portions.counts(wanted, link.welcome.keys_max):
                try:
                    part, short = self._reserve(link, counts)
                except KVHearthError:
                    self._returns.abort(link, extents, in_doubt=False)
                    raise
                extents |= {
                    group: np.concatenate((extents[group], some)) for group, some in part.items()
                }
                if short:
                    break
            return Reservation(link.boot_id, extents, short)

        return self._caller.decide(
            "reserve",
            work,
            lambda why: Reservation("", codec.no_extents(self._contract, own or {}), why, why),
        )

    def _reserve(
        self, link: Link, counts: Mapping[int, int]
    ) -> tuple[dict[int, Records], Reason | NoReason]:
        """Make one call; return extents by group, and why less was granted than asked for."""
        request = pb.ReserveRequest(
            reservation_id=self._ids.new_id(),
            epoch=self._own_epoch(),
            groups=codec.pack_counts(self._contract, counts),
        )
        try:
            reply = self._caller.call(link, base.RESERVE, request, self._call_s)
            parsed = codec.parse_reservation(self._contract, link.welcome, counts, reply.groups)
        except KVHearthError as error:
            if error.reason in _SHORT:
                return codec.no_extents(self._contract, counts), error.reason
            if outcome_unknown(error):
                self._returns.abort_reservation(link, request.reservation_id)
            raise
        return parsed, reason_of(reply.short_reason) if reply.short_reason else ""

    def commit(
        self,
        groups: Mapping[int, CommitGroup],
        *,
        boot_id: str,
        epoch: int | None = None,
    ) -> CommitResult:
        """Bind keys to written slots; afterwards the extents are no longer the caller's.

        Args:
            groups: blocks that all ranks have finished writing.
            boot_id: boot of the reservations that the extents come from. Extents of another boot
                are dropped.
            epoch: epoch of the weights that computed the blocks. None stands for the engine's
                current epoch, which is right only if the weights cannot have changed since.
        """
        own = parse_arguments(codec.own_commits, groups)

        def work() -> CommitResult:
            link = self._caller.link_to_ask()
            _check_boot(link, boot_id)
            commits = _require_valid(own)
            stored = []
            try:
                computed = self._own_epoch() if epoch is None else epoch
                for part in portions.commits(commits, link.welcome.keys_max):
                    request = pb.CommitRequest(epoch=computed)
                    for group, item in part.items():
                        codec.put_commit(self._contract, request.groups, group, item)
                    reply = self._caller.call(link, base.COMMIT, request, self._call_s)
                    sizes = {group: len(item.keys) for group, item in part.items()}
                    stored.append(codec.parse_bitmaps(sizes, reply.stored))
                return CommitResult(portions.joined(commits, stored))
            except KVHearthError:
                # Slots that were not bound are given back; bound slots are no longer the group's to
                # abort.
                extents = {group: item.extents for group, item in commits.items()}
                self._returns.abort(link, extents, in_doubt=False)
                raise

        def miss(reason: Reason) -> CommitResult:
            sizes = {group: len(item.keys) for group, item in (own or {}).items()}
            nothing = {group: np.zeros(size, np.bool_) for group, size in sizes.items()}
            return CommitResult(nothing, reason)

        return self._caller.decide("commit", work, miss)

    def abort(
        self, groups: Mapping[int, Records], *, boot_id: str, in_doubt: bool = False
    ) -> Reason | NoReason:
        """Give reserved slots back, in the background.

        Args:
            groups: extents by group, of any shape.
            boot_id: boot of the reservations that they come from; extents of another boot are
                dropped.
            in_doubt: a worker may still be writing. The daemon quarantines the slots until all
                ranks are drained or the same slots are aborted again without this flag.

        Returns:
            The reason why nothing was queued (such as ``stale_boot``), or empty.
        """
        own = parse_arguments(codec.own_extents, groups)

        def work() -> Reason | NoReason:
            link = self._caller.link()
            _check_boot(link, boot_id)
            self._returns.abort(link, _require_valid(own), in_doubt=in_doubt)
            return ""

        return self._caller.decide("abort", work, lambda why: why)

    def release(self, lease: Lease | None, bad: BadExtents = None) -> None:
        """Release a lease, in the background, after the loads under it have finished.

        Args:
            lease: lease of a lookup; None and leases of another boot are ignored.
            bad: extents of the lease whose bytes did not match their checksum; the daemon checks
                them itself.
        """
        if lease is None:
            return

        def work() -> None:
            # A dead daemon holds no lease; the session manager notices its death soon enough.
            link = self._caller.held_link()
            if lease.boot_id != link.boot_id:
                return
            if lease.grant.heard or bad is not None or not self._leases.forget(lease.id):
                self._returns.release(link, lease, bad)

        self._caller.decide("release", work, _nothing)

    def pin(self, groups: KeysByGroup, ttl_s: float, session: str = "") -> Pin:
        """Have blocks evicted last for ``ttl_s`` seconds, or until ``unpin``.

        Args:
            session: name of what wants them, by which an operator may end the pin; what is not
                printable or beyond 256 bytes is left out.
        """
        own = parse_arguments(codec.snapshot_keys, groups)

        def work() -> Pin:
            link = self._caller.link()
            whole = self._query(own)
            name = (
                "".join(filter(str.isprintable, session))
                .encode()[:_NAME_BYTES]
                .decode(errors="ignore")
            )
            ids, pinned = list[int](), []
            try:
                for query in portions.queries(whole, link.welcome.keys_max):
                    request = pb.PinRequest(
                        pin_id=self._ids.new_id(),
                        epoch=self._own_epoch(),
                        ttl_ms=max(round(ttl_s * 1000), 0),
                        session=name,
                    )
                    query.put_into(request.groups)
                    ids.append(request.pin_id)
                    reply = self._caller.call(link, base.PIN, request, self._call_s)
                    pinned.append(codec.parse_bitmaps(query.counts, reply.pinned))
            except KVHearthError as error:
                self._returns.unpin(link, ids if outcome_unknown(error) else ids[:-1])
                raise
            return Pin(tuple(ids), link.boot_id, portions.joined(whole.counts, pinned))

        def miss(reason: Reason) -> Pin:
            nothing = {group: np.zeros(len(keys), np.bool_) for group, keys in (own or {}).items()}
            return Pin((), "", nothing, reason)

        return self._caller.decide("pin", work, miss)

    def unpin(self, pin: Pin) -> None:
        """End a pin early, in the background."""

        def work() -> None:
            link = self._caller.link()
            if pin.boot_id == link.boot_id:
                self._returns.unpin(link, pin.ids)

        self._caller.decide("unpin", work, _nothing)

    def events(
        self, cursor: str = "", blocks_max: int = 0, *, tokens: bool = False
    ) -> EventsResult:
        """Read what changed among the namespace's blocks since the last call.

        The first answers list the blocks that are there, as ``stored``. The daemon keeps events
        only while somebody reads them at least once a minute, and only so many.

        Args:
            cursor: that of the last result; empty to begin.
            blocks_max: about how many blocks the result may name; 0 is the daemon's own bound.
            tokens: ask what the blocks hold, too.
        """

        def work() -> EventsResult:
            request = pb.EventsRequest(
                cursor=cursor, blocks_max=blocks_max, epoch=self._own_epoch(), tokens=tokens
            )
            reply = self._caller.call(self._caller.link(), base.EVENTS, request, self._call_s)
            return codec.parse_events(self._contract, reply)

        return self._caller.decide(
            "events", work, lambda why: EventsResult(cursor=cursor, reason=why)
        )

    def touch(self, groups: KeysByGroup) -> None:
        """Mark blocks as used, in the background."""
        own = parse_arguments(codec.snapshot_keys, groups)

        def work() -> None:
            link = self._caller.link()
            for query in portions.queries(self._query(own), link.welcome.keys_max):
                self._returns.touch(link, query, self._own_epoch())

        self._caller.decide("touch", work, _nothing)

    def bump_epoch(self, expected: int | None = None, *, label: str | None = None) -> int:
        """Invalidate all older blocks of the namespace: this engine has new weights.

        Args:
            expected: the epoch to move on from; None takes the daemon's current one.
            label: name of the new weights, such as a training step, by which hosts share blocks
                on remote tiers; None keeps the namespace off these until a bump with a label.

        Returns:
            The new epoch, which is this client's from now on; or -1 on failure. The weights then
            have no epoch: all answers are misses until ``bump_epoch`` succeeds or ``use_epoch``
            sets one.
        """
        self._session_manager.epochs.use(EPOCH_UNKNOWN)

        def work() -> int:
            link = self._caller.link()
            current = expected
            if current is None:
                self._session_manager.beat(link)
                current = self._session_manager.epochs.daemon
            return self._bump(link, current, only_alone=False, label=label)

        return self._caller.decide("bump_epoch", work, lambda _: EPOCH_UNKNOWN)

    def drop_if_alone(self) -> bool:
        """Invalidate all blocks of the namespace if no other engine is attached to it.

        The weights stay the same: where another engine is attached, or the daemon cannot be asked,
        nothing changes. If the daemon's reply is lost, all answers are misses until ``bump_epoch``.
        """
        before, label = self.epoch, self._session_manager.epochs.label

        def work() -> bool:
            link = self._caller.link()
            self._session_manager.beat(link)
            current = self._session_manager.epochs.daemon
            try:
                # The epoch is unknown until the reply arrives.
                self._session_manager.epochs.use(EPOCH_UNKNOWN)
                self._bump(link, current, only_alone=True)
            except KVHearthError as error:
                if not outcome_unknown(error):
                    self._session_manager.epochs.use(before, label)
                raise
            return True

        return self._caller.decide("drop_if_alone", work, lambda _: False)

    def _bump(
        self, link: Link, expected: int, *, only_alone: bool, label: str | None = None
    ) -> int:
        request = pb.BumpEpochRequest(expected_epoch=expected, only_alone=only_alone, label=label)
        reply = self._caller.call(link, base.BUMP_EPOCH, request, self._call_s)
        self._session_manager.epochs.bumped(link.boot_id, reply.epoch, label)
        return int(reply.epoch)

    def use_epoch(self, epoch: int, *, label: str | None = None) -> None:
        """Declare that this engine now has the weights of ``epoch``, which another engine set, with
        this label.
        """
        self._session_manager.epochs.use(epoch, label)

    def _own_epoch(self) -> int:
        epoch = self._session_manager.epochs.own
        if epoch < 0:
            raise KVHearthError(
                Reason.STALE_EPOCH, "the weights' epoch is not known: bump_epoch failed"
            )
        return epoch

    def _query(self, groups: KeysByGroup | None) -> Query:
        return codec.pack_query(self._contract, _require_valid(groups))

    def _look_up_long(self, link: Link, query: Query, request: pb.LookupRequest) -> LookupResult:
        """Look up more keys than one call takes."""

        def ask(portion: pb.LookupRequest) -> pb.LookupResponse:
            return self._caller.call(link, base.LOOKUP, portion, self._lookup_s)

        return portions.LongLookup(self._contract, link.welcome, query, request, ask).run()

    def _look_up(self, link: Link, query: Query, request: pb.LookupRequest) -> LookupResult:
        """Look up by one call."""
        query.put_into(request.groups)
        lease_id = request.lease_id
        reply = self._caller.call(link, base.LOOKUP, request, self._lookup_s)
        result = codec.parse_lookup(self._contract, link.welcome, query, lease_id, reply)
        if reply.lease_id and result.lease is None:
            self._returns.release_id(link, lease_id)
        return result


def _check_boot(link: Link, boot_id: str) -> None:
    if boot_id != link.boot_id:
        raise KVHearthError(Reason.STALE_BOOT, "these extents are another boot's: they are void")


def _require_valid(argument: T | None) -> T:
    if argument is None:
        raise KVHearthError(Reason.BAD_MESSAGE, "the call's argument is not what it should be")
    return argument


def _nothing(_: str) -> None:
    return None


ENGINE_ID_CHARS_MAX = 128


def connect(  # noqa: PLR0913 - options of an attach, each by name
    url: str,
    contract: Contract,
    *,
    engine_id: str,
    scheduler: bool = True,
    rank: int = 0,
    map_arena: bool = True,
    numa_node: int = -1,
    run: Run = NAMELESS,
    clock: Clock = REAL_TIME,
) -> KVClient:
    """Return a client that attaches in the background; the daemon may be away.

    Args:
        url: ``kvhearth+unix:`` for this user's daemon, else the system's, or ``kvhearth://host``
            for a daemon on another host; forms and options as in ``kvhearth.url``.
        contract: properties of this engine's KV bytes.
        engine_id: the engine's name, the same in its scheduler and all its ranks.
        scheduler: whether this process takes the engine's decisions.
        rank: this process's rank, or -1 if it moves no bytes.
        map_arena: map the arena into this process.
        numa_node: NUMA node of this rank's GPU, whose memory the daemon prefers for its slots; -1
            for that of this process's processors.
        run: the engine's processes and its model's name.
        clock: times all waits but those for sockets.

    Raises:
        KVHearthError: ``bad_url``, ``bad_contract`` or ``bad_message`` for arguments that cannot be
            right.
    """
    address = parse_url(url)
    local = isinstance(address, UnixUrl)
    text = contract.to_json()
    if len(text) > CONTRACT_JSON_BYTES_MAX:
        raise KVHearthError(Reason.BAD_CONTRACT, "the contract's texts are too long")
    if not -1 <= rank < contract.world_size or (rank < 0 and not scheduler):
        raise KVHearthError(
            Reason.BAD_CONTRACT,
            f"rank {rank} is not one of {contract.world_size} ranks, nor -1 of a scheduler",
        )
    if not 0 < len(engine_id) <= ENGINE_ID_CHARS_MAX:
        raise KVHearthError(
            Reason.BAD_MESSAGE, f"engine_id must have 1..{ENGINE_ID_CHARS_MAX} characters"
        )
    hello = Hello(
        protocol=PROTOCOL_VERSION,
        engine_id=engine_id,
        contract=text,
        scheduler=scheduler,
        rank=rank,
        map_arena=map_arena,
        pid=os.getpid(),
        numa_node=-1 if not local else own_node() if numa_node < 0 else numa_node,
        shared_index=local and scheduler and library() is not None,
        process_group=run.process_group,
        model_name=run.model_name,
    )
    return KVClient(address, contract, hello, clock)


class KVClient(Decisions):
    """Client of one attached process; made by ``connect``. Thread-safe.

    No method raises because of the daemon or its absence: the result is then a miss, or nothing,
    with a reason. In a forked child a client answers ``closed``; the child must connect itself.
    """

    def __init__(
        self, url: DaemonUrl, contract: Contract, hello: Hello, clock: Clock = REAL_TIME
    ) -> None:
        super().__init__(url, contract, hello, clock)
        self._closing = threading.Lock()
        self._finished = False
        self._session_manager.start()

    @property
    def arena(self) -> Arena | None:
        """Arena of the current boot, mapped or on another host; None while detached or if
        ``map_arena`` is off.
        """
        link = None if self._caller.closed else self._session_manager.link
        return None if link is None else link.mapping

    @property
    def index_mapped(self) -> bool:
        """Whether the daemon shares its index, so that ``lookup_mapped`` may answer."""
        return bool(getattr(self._session_manager.link, "tables", None))

    @property
    def boot_id(self) -> str:
        """Boot id of the daemon that this client is attached to, or "" while detached."""
        link = None if self._caller.closed else self._session_manager.link
        return "" if link is None else link.boot_id

    @property
    def session_id(self) -> str:
        """Id of the current session, or "" while detached.

        Leases and reservations of other sessions are void. A session can end and another begin
        under one boot id.
        """
        link = None if self._caller.closed else self._session_manager.link
        return "" if link is None else link.session_id

    @property
    def contract(self) -> Contract:
        """Contract that was passed to ``connect``."""
        return self._contract

    @property
    def refusal(self) -> KVHearthError | None:
        """The daemon's permanent refusal of this engine, or None."""
        return self._session_manager.refusal

    def wait_ready(self, timeout_s: float) -> bool:
        """Wait until attached with all ranks; False at once when refused or closed."""
        return not self._caller.closed and self._session_manager.wait_ready(timeout_s)

    def cancel(self, found: LookupResult) -> None:
        """Release the lease of an abandoned request and cancel its promotions, in the background.

        Promotions that another request also wants continue. Lookups of another boot are ignored. A
        lookup that was made without a lease has no id: its promotions continue.
        """

        def work() -> None:
            link = self._caller.link()
            if found.boot_id != link.boot_id:
                return
            if found.lease is not None:
                self._returns.release_id(link, found.lease.id, promotions=found.eta_us > 0)
            elif found.id and found.eta_us:
                self._returns.cancel(link, found.id)

        self._caller.decide("cancel", work, lambda _: None)

    def add_quiesce_hook(self, drain: Drain) -> None:
        """Register a drain that waits for this process's copies.

        ``drain(deadline_s)`` returns True when no copy is under way. It is called on the session
        manager's thread before a lost session is closed, and by ``close``; until all drains return
        True the old mapping stays and no new session begins. Copiers of the old mapping should be
        closed by then, or drop their arrays.
        """
        self._session_manager.quiesce_hooks.add(drain)

    def add_attached(self, attached: Attached) -> None:
        """Register a callback that prepares a new session.

        ``attached()`` is called on the session manager's thread each time a session has begun, and
        immediately if there is one. It may be called twice for the same session, and must not wait.
        """
        self._session_manager.add_attached(attached)

    def counters(self) -> dict[str, int]:
        """Return the counters since the start, by name; heartbeats carry them to the daemon."""
        return {} if self._caller.foreign else self._counters.snapshot()

    def count(self, name: str, amount: int = 1) -> None:
        """Add to a counter of the caller (failed loads, bytes copied, ...)."""
        if amount > 0 and not self._caller.foreign:
            self._counters.add(name, amount)

    def close(self, deadline_s: float = 5.0) -> bool:
        """Drain copies, send queued requests, say goodbye. Idempotent.

        Returns:
            False if copies did not drain. The session then stays open, since its end would tell the
            daemon that no one writes. Call it again, or let the process end.
        """
        if self._caller.foreign:
            return True
        with self._closing:
            if not self._finished:
                self._caller.close()
                self._session_manager.stop(deadline_s)
                self._finished = self._session_manager.finish(deadline_s)
            return self._finished
