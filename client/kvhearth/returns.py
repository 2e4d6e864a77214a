"""What an engine gives back without waiting: leases, reserved slots, pins; and touches."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from kvhearth import codec
from kvhearth.caller import Caller
from kvhearth.contract import Contract
from kvhearth.link import Link
from kvhearth.model import Records
from kvhearth.proto.v1 import cache_pb2 as pb
from kvhearth.results import Lease
from kvhearth.transports import base

BadExtents = Mapping[int, Records] | Records | None


class Returns:
    """Puts errands of a link into the keeper's queue.

    Errors of its methods are ``codec``'s: ``bad_group``, ``bad_extents``.
    """

    def __init__(self, caller: Caller, contract: Contract) -> None:
        self._caller = caller
        self._contract = contract

    def release_id(self, link: Link, lease_id: int, *, climbs: bool = False) -> None:
        """End a lease of which only the id is known, and what may climb for its lookup."""
        request = pb.ReleaseRequest(lease_ids=[lease_id])
        if climbs:
            request.cancelled_ids.append(lease_id)
        self._caller.post(link, base.RELEASE, request)

    def cancel(self, link: Link, lookup_id: int) -> None:
        """Nobody waits any more for what climbs for a lookup."""
        self._caller.post(link, base.RELEASE, pb.ReleaseRequest(cancelled_ids=[lookup_id]))

    def release(self, link: Link, lease: Lease, bad: BadExtents) -> None:
        """End a lease and report extents of it whose bytes were wrong, as many as one call takes.

        What is left out the next load finds.
        """
        if bad is None:
            self.release_id(link, lease.id)
            return
        request = pb.ReleaseRequest(lease_ids=[lease.id])
        reported, most = 0, link.welcome.keys_max
        for group, extents in _by_group(lease, bad).items():
            some = np.asarray(extents).reshape(-1)[: most - reported]
            if some.size:
                request.bad.append(codec.pack_slots(self._contract, group, some))
                reported += int(some.size)
        # Apart from the others: a report must not be lost with somebody else's unknown lease.
        kind = f"{base.RELEASE.name}:bad" if request.bad else base.RELEASE.name
        self._caller.post(
            link,
            base.RELEASE,
            request,
            kind=kind,
            weight=max(reported, 1),
            parts=len(request.bad),
        )

    def abort(self, link: Link, groups: Mapping[int, Records], *, in_doubt: bool) -> None:
        """Give back reserved extents."""
        slots = [
            codec.pack_slots(self._contract, group, extents) for group, extents in groups.items()
        ]
        request = pb.AbortRequest(groups=slots, in_doubt=in_doubt)
        kind = f"{base.ABORT.name}:in_doubt" if in_doubt else base.ABORT.name
        weight = sum(int(extents.size) for extents in groups.values())
        self._caller.post(link, base.ABORT, request, kind=kind, weight=weight, parts=len(slots))

    def abort_reservation(self, link: Link, reservation_id: int) -> None:
        """Give back a reservation whose answer was lost."""
        request = pb.AbortRequest(reservation_ids=[reservation_id])
        self._caller.post(link, base.ABORT, request)

    def unpin(self, link: Link, pin_id: int) -> None:
        """End a pin."""
        self._caller.post(link, base.UNPIN, pb.UnpinRequest(pin_ids=[pin_id]))

    def touch(self, link: Link, query: codec.Query, epoch: int) -> None:
        """Mark blocks as used."""
        request = pb.TouchRequest(epoch=epoch)
        query.put_into(request.groups)
        kind = f"{base.TOUCH.name}:{epoch}"
        self._caller.post(
            link,
            base.TOUCH,
            request,
            kind=kind,
            weight=query.key_count,
            parts=len(query.blobs),
        )


def _by_group(lease: Lease, bad: Mapping[int, Records] | Records) -> dict[int, Records]:
    """Bad extents by group; plain records are assigned by the slots of the lease."""
    if isinstance(bad, Mapping):
        return dict(bad)
    flat = np.asarray(bad).reshape(-1)
    return {group: flat[np.isin(flat["slot"], slots)] for group, slots in lease.slots.items()}
