"""An engine's decisions about its cached blocks; every one fails open."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from kvhearth import codec
from kvhearth.caller import Caller, T, outcome_unknown, understood
from kvhearth.codec import KeysByGroup, Query
from kvhearth.contract import Contract
from kvhearth.epochs import EPOCH_UNKNOWN
from kvhearth.errors import KVHearthError, Reason
from kvhearth.ids import Ids
from kvhearth.keeper import Keeper
from kvhearth.link import Link
from kvhearth.meters import Counters
from kvhearth.model import Records
from kvhearth.proto.v1 import cache_pb2 as pb
from kvhearth.results import (
    CommitGroup,
    CommitResult,
    Lease,
    LookupResult,
    Pin,
    PrefetchResult,
    Reservation,
)
from kvhearth.returns import BadExtents, Returns
from kvhearth.transports import base
from kvhearth.url import DaemonUrl
from kvhearth.wire import Hello

_SHORT = frozenset({Reason.HELD_CAP, Reason.NO_SPACE, Reason.QUOTA_EXCEEDED, Reason.STOCK_CAP})
"""Bounds that leave nothing to reserve: an answer of a full cache, not a failure."""


class Decisions:
    """The half of ``KVClient`` that asks the daemon; see there for what holds for all methods."""

    def __init__(self, url: DaemonUrl, contract: Contract, hello: Hello) -> None:
        self._contract = contract
        self._ids = Ids()
        self._lookup_s = url.lookup_ms / 1000
        self._call_s = url.call_ms / 1000
        self._counters = Counters()
        self._keeper = Keeper(url, hello, self._counters)
        self._caller = Caller(self._keeper, self._counters, decides=hello.scheduler)
        self._returns = Returns(self._caller, contract)

    @property
    def epoch(self) -> int:
        """The weights epoch that this engine runs with; -1 while that is not known.

        It is the daemon's at the first attach and follows only ``bump_epoch`` and ``use_epoch``:
        an engine does not get new weights because another one did. Under another epoch than the
        daemon's all answers are misses. A daemon that started without its old blocks has an epoch
        of its own, which an engine that was up to date until then takes over.
        """
        return self._keeper.epochs.own

    def lookup(
        self, groups: KeysByGroup, *, lease: bool = True, prefetch: bool = False
    ) -> LookupResult:
        """Which blocks of a request are there, and a lease on those that a load needs.

        Args:
            groups: by group, the keys of the request in chain order. More than the daemon takes in
                one call are cut to the first ones of each group; the rest is absent in the answer.
            lease: hold what may be loaded, until ``release``.
            prefetch: let blocks on slower tiers begin to climb.
        """
        lease_id = self._ids.draw() if lease else 0
        own = understood(codec.own_keys, groups)

        def work() -> LookupResult:
            link = self._caller.link_to_ask()
            query = self._query(link, own)
            if not query.key_count:
                boot_id = self._caller.link().boot_id
                return LookupResult(0, None, codec.absent(own or {}), boot_id=boot_id)
            request = pb.LookupRequest(
                epoch=self._own_epoch(), lease_id=lease_id, prefetch=prefetch
            )
            query.put_into(request.groups)
            try:
                reply = self._caller.call(link, base.LOOKUP, request, self._lookup_s)
                result = self._lookup_result(link, query, lease_id, reply)
            except KVHearthError as error:
                if lease_id and outcome_unknown(error):
                    self._returns.release_id(link, lease_id, climbs=prefetch)
                raise
            if reply.lease_id and result.lease is None:
                self._returns.release_id(link, lease_id)
            self._counters.add_all(
                {"lookup_keys": query.key_count, "lookup_hit_tokens": result.hit_tokens}
            )
            return result

        return self._caller.decide(
            "lookup", work, lambda why: LookupResult(0, None, codec.absent(own or {}), 0, why)
        )

    def prefetch(self, groups: KeysByGroup) -> PrefetchResult:
        """Ask for blocks on slower tiers to climb; leases nothing."""
        own = understood(codec.own_keys, groups)

        def work() -> PrefetchResult:
            link = self._caller.link()
            query = self._query(link, own)
            request = pb.PrefetchRequest(epoch=self._own_epoch())
            query.put_into(request.groups)
            reply = self._caller.call(link, base.PREFETCH, request, self._lookup_s)
            found = codec.parse_presence(self._contract, link.welcome, query, reply.groups)
            return PrefetchResult(found, reply.eta_us, boot_id=link.boot_id)

        return self._caller.decide(
            "prefetch", work, lambda why: PrefetchResult(codec.absent(own or {}), 0, why)
        )

    def reserve(self, groups: Mapping[int, int]) -> Reservation:
        """Empty slots to write: by group, how many blocks. Less may be granted."""
        reservation_id = self._ids.draw()
        own = understood(codec.own_counts, groups)

        def work() -> Reservation:
            link = self._caller.link()
            counts = _readable(own)
            request = pb.ReserveRequest(
                reservation_id=reservation_id,
                epoch=self._own_epoch(),
                groups=codec.pack_counts(self._contract, counts),
            )
            try:
                reply = self._caller.call(link, base.RESERVE, request, self._call_s)
                extents = codec.parse_reservation(
                    self._contract, link.welcome, counts, reply.groups
                )
            except KVHearthError as error:
                if error.reason in _SHORT:
                    nothing = codec.no_extents(self._contract, counts)
                    return Reservation(link.boot_id, nothing, error.reason, id=reservation_id)
                if outcome_unknown(error):
                    self._returns.abort_reservation(link, reservation_id)
                raise
            return Reservation(link.boot_id, extents, reply.short_reason, id=reservation_id)

        return self._caller.decide(
            "reserve",
            work,
            lambda why: Reservation("", codec.no_extents(self._contract, own or {}), why, why),
        )

    def commit(
        self, groups: Mapping[int, CommitGroup], *, boot_id: str, epoch: int | None = None
    ) -> CommitResult:
        """Bind keys to written slots; afterwards the extents are no longer the caller's.

        Args:
            groups: what all ranks have finished writing.
            boot_id: of the reservations that the extents come from. Extents of another boot are
                dropped.
            epoch: of the weights that computed the blocks; None for the engine's epoch now, which
                is right only if the weights cannot have changed since.
        """

        own = understood(codec.own_commits, groups)

        def work() -> CommitResult:
            link = self._caller.link_to_ask()
            _check_boot(link, boot_id)
            commits = _readable(own)
            try:
                query = codec.count_commits(commits, link.welcome.keys_max)
                computed = self._own_epoch() if epoch is None else epoch
                request = pb.CommitRequest(epoch=computed)
                for group, item in commits.items():
                    codec.put_commit(self._contract, request.groups, group, item)
                reply = self._caller.call(link, base.COMMIT, request, self._call_s)
                return CommitResult(codec.parse_bitmaps(query, reply.stored))
            except KVHearthError:
                # Whatever was not bound goes back; slots that were are not the group's to abort
                # any more.
                extents = {group: item.extents for group, item in commits.items()}
                self._returns.abort(link, extents, in_doubt=False)
                raise

        def miss(reason: str) -> CommitResult:
            sizes = {group: len(item.keys) for group, item in (own or {}).items()}
            nothing = {group: np.zeros(size, np.bool_) for group, size in sizes.items()}
            return CommitResult(nothing, reason)

        return self._caller.decide("commit", work, miss)

    def abort(self, groups: Mapping[int, Records], *, boot_id: str, in_doubt: bool = False) -> str:
        """Give reserved slots back, in the background.

        Args:
            groups: extents by group, of any shape.
            boot_id: of the reservations that they come from; of another boot they are dropped.
            in_doubt: a worker may still be writing. The daemon keeps the slots aside until all
                ranks are drained or the same slots are aborted again without this.

        Returns:
            Why nothing was queued (such as ``stale_boot``), or empty.
        """
        own = understood(_own_extents, groups)

        def work() -> str:
            link = self._caller.link()
            _check_boot(link, boot_id)
            self._returns.abort(link, _readable(own), in_doubt=in_doubt)
            return ""

        return self._caller.decide("abort", work, str)

    def release(self, lease: Lease | None, bad: BadExtents = None) -> None:
        """End a lease, in the background, after the loads under it have finished.

        Args:
            lease: of a lookup; None and leases of another boot are ignored.
            bad: extents of it whose bytes did not match their checksum; the daemon looks for
                itself.
        """
        if lease is None:
            return

        def work() -> None:
            # Of a daemon that has died nothing is left to release: it is soon enough that the
            # keeper finds it out.
            link = self._caller.held_link()
            if lease.boot_id == link.boot_id:
                self._returns.release(link, lease, bad)

        self._caller.decide("release", work, _nothing)

    def pin(self, groups: KeysByGroup, ttl_s: float) -> Pin:
        """Keep blocks from eviction for ``ttl_s`` seconds, or until ``unpin``."""
        pin_id = self._ids.draw()
        own = understood(codec.own_keys, groups)

        def work() -> Pin:
            link = self._caller.link()
            query = self._query(link, own)
            request = pb.PinRequest(
                pin_id=pin_id, epoch=self._own_epoch(), ttl_ms=max(round(ttl_s * 1000), 0)
            )
            query.put_into(request.groups)
            try:
                reply = self._caller.call(link, base.PIN, request, self._call_s)
                return Pin(pin_id, link.boot_id, codec.parse_bitmaps(query, reply.pinned))
            except KVHearthError as error:
                if outcome_unknown(error):
                    self._returns.unpin(link, pin_id)
                raise

        def miss(reason: str) -> Pin:
            nothing = {group: np.zeros(len(keys), np.bool_) for group, keys in (own or {}).items()}
            return Pin(pin_id, "", nothing, reason)

        return self._caller.decide("pin", work, miss)

    def unpin(self, pin: Pin) -> None:
        """End a pin before its time, in the background."""

        def work() -> None:
            link = self._caller.link()
            if pin.boot_id == link.boot_id:
                self._returns.unpin(link, pin.id)

        self._caller.decide("unpin", work, _nothing)

    def touch(self, groups: KeysByGroup) -> None:
        """Mark blocks as used, in the background."""
        own = understood(codec.own_keys, groups)

        def work() -> None:
            link = self._caller.link()
            query = self._query(link, own)
            self._returns.touch(link, query, self._own_epoch())

        self._caller.decide("touch", work, _nothing)

    def bump_epoch(self, expected: int | None = None) -> int:
        """Make all older blocks of the namespace invalid: this engine has new weights.

        Args:
            expected: the epoch to move on from; None takes the daemon's current one.

        Returns:
            The new epoch, with which this client goes on; or -1. Then the weights have no epoch:
            all answers are misses until ``bump_epoch`` succeeds or ``use_epoch`` says otherwise.
        """
        self._keeper.epochs.use(EPOCH_UNKNOWN)

        def work() -> int:
            link = self._caller.link()
            current = expected
            if current is None:
                self._keeper.beat(link)
                current = self._keeper.epochs.daemon
            return self._bump(link, current, only_alone=False)

        return self._caller.decide("bump_epoch", work, lambda _: EPOCH_UNKNOWN)

    def drop_if_alone(self) -> bool:
        """Make all blocks of the namespace invalid, if no other engine is attached to it.

        The weights stay the same: where another engine is attached, or the daemon cannot be asked,
        nothing changes. If its answer is lost, all answers are misses until ``bump_epoch``.
        """
        before = self.epoch

        def work() -> bool:
            link = self._caller.link()
            self._keeper.beat(link)
            current = self._keeper.epochs.daemon
            try:
                # From here on nobody knows until the answer is there.
                self._keeper.epochs.use(EPOCH_UNKNOWN)
                self._bump(link, current, only_alone=True)
            except KVHearthError as error:
                if not outcome_unknown(error):
                    self._keeper.epochs.use(before)
                raise
            return True

        return self._caller.decide("drop_if_alone", work, lambda _: False)

    def _bump(self, link: Link, expected: int, *, only_alone: bool) -> int:
        request = pb.BumpEpochRequest(expected_epoch=expected, only_alone=only_alone)
        reply = self._caller.call(link, base.BUMP_EPOCH, request, self._call_s)
        self._keeper.epochs.bumped(link.boot_id, reply.epoch)
        return int(reply.epoch)

    def use_epoch(self, epoch: int) -> None:
        """This engine now has the weights of ``epoch``, which somebody else bumped to."""
        self._keeper.epochs.use(epoch)

    def _own_epoch(self) -> int:
        epoch = self._keeper.epochs.own
        if epoch < 0:
            raise KVHearthError(
                Reason.STALE_EPOCH, "the weights' epoch is not known: bump_epoch failed"
            )
        return epoch

    def _query(self, link: Link, groups: KeysByGroup | None) -> Query:
        query = codec.pack_query(self._contract, _readable(groups), link.welcome.keys_max)
        if query.cut_count:
            self._counters.add("keys_cut", query.cut_count)
        return query

    def _lookup_result(
        self, link: Link, query: Query, lease_id: int, reply: pb.LookupResponse
    ) -> LookupResult:
        if reply.lease_id not in (0, lease_id):
            raise KVHearthError(Reason.BAD_MESSAGE, "the daemon answers with another lease's id")
        found = codec.parse_presence(self._contract, link.welcome, query, reply.groups)
        slots = {group: item.extents["slot"] for group, item in found.items() if item.extents.size}
        lease = Lease(lease_id, link.boot_id, slots) if slots and reply.lease_id else None
        # By position, which costs half of what names do.
        return LookupResult(
            reply.hit_tokens,
            lease,
            found,
            reply.eta_us,
            "",
            reply.lease_short,
            link.boot_id,
            lease_id,
        )


def _check_boot(link: Link, boot_id: str) -> None:
    if boot_id != link.boot_id:
        raise KVHearthError(Reason.STALE_BOOT, "these extents are another boot's: they are void")


def _readable(argument: T | None) -> T:
    if argument is None:
        raise KVHearthError(Reason.BAD_MESSAGE, "the call's argument is not what it should be")
    return argument


def _own_extents(groups: Mapping[int, Records]) -> dict[int, Records]:
    return {group: np.asarray(extents) for group, extents in groups.items()}


def _nothing(_: str) -> None:
    return None
