"""Requests that return leases, slots and pins: nobody waits for their answers."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from kvhearth.contract import Contract
from kvhearth.fail_open import Caller
from kvhearth.model import Records
from kvhearth.proto.v1 import cache_pb2 as pb
from kvhearth.results import Lease
from kvhearth.session.link import Link
from kvhearth.transports import base
from kvhearth.wire import messages as codec

BadExtents = Mapping[int, Records] | Records | None


class Returns:
    """Puts requests that return leases, slots and pins into the session manager's queue.

    Its methods raise the errors of ``codec``: ``bad_group``, ``bad_extents``.
    """

    def __init__(self, caller: Caller, contract: Contract) -> None:
        self._caller = caller
        self._contract = contract

    def release_id(self, link: Link, lease_id: int, *, promotions: bool = False) -> None:
        """Release a lease by its id; with ``promotions``, cancel its lookup's promotions too."""
        request = pb.ReleaseRequest(lease_ids=[lease_id])
        if promotions:
            request.cancelled_ids.append(lease_id)
        self._caller.post(link, base.RELEASE, request)

    def cancel(self, link: Link, lookup_id: int) -> None:
        """Cancel the promotions of a lookup."""
        self._caller.post(link, base.RELEASE, pb.ReleaseRequest(cancelled_ids=[lookup_id]))

    def release(self, link: Link, lease: Lease, bad: BadExtents) -> None:
        """Release a lease and report its bad extents, as many as one call takes.

        Bad extents that do not fit are found by the next load.
        """
        if bad is None:
            self.release_id(link, lease.id)
            return
        request = pb.ReleaseRequest(lease_ids=[lease.id])
        reported, most = 0, link.welcome.keys_max
        for group, extents in lease.by_group(bad).items():
            some = np.asarray(extents).reshape(-1)[: most - reported]
            if some.size:
                request.bad.append(codec.pack_slots(self._contract, group, some))
                reported += int(some.size)
        # Kept apart from the other releases: an unknown lease among them must not lose a report.
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
        """Give back reserved extents, in as many calls as they need."""
        most = link.welcome.keys_max
        chunks = [
            codec.pack_slots(self._contract, group, flat[start : start + most])
            for group, flat in ((group, each.reshape(-1)) for group, each in groups.items())
            for start in range(0, max(flat.size, 1), most)
        ]
        kind = f"{base.ABORT.name}:in_doubt" if in_doubt else base.ABORT.name
        for slots in chunks:
            request = pb.AbortRequest(groups=[slots], in_doubt=in_doubt)
            weight = len(slots.slots) // 4
            self._caller.post(link, base.ABORT, request, kind=kind, weight=weight, parts=1)

    def abort_reservation(self, link: Link, reservation_id: int) -> None:
        """Give back a reservation whose reply was lost."""
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
