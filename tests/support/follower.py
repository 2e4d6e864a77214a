"""Somebody who follows a namespace's blocks."""

from __future__ import annotations

from kvhearth.connectors.core.block_feed import KnownBlocks
from kvhearth.model import Tier
from kvhearth.results import BlockEvent, EventsResult
from kvhearth_server.core.events import Cursor, Event
from kvhearth_server.core.following import Told
from support.core_kit import Rig

Where = dict[tuple[int, bytes], Tier]


class Follower:
    """Reads a namespace's events, and replays the changes that a client takes from them."""

    def __init__(self, rig: Rig, session: int) -> None:
        self._rig, self._session = rig, session
        self.cursor: Cursor | None = None
        self._known, self._tiers = KnownBlocks(), Where()

    def read(self, blocks_max: int = 1000, now: float = 0.0) -> Told:
        """Read once."""
        epoch = self._rig.epoch(self._session)
        told = self._rig.core.following.read(self._session, epoch, self.cursor, blocks_max, now)
        self.cursor = told.cursor
        events = [
            BlockEvent(each.kind, each.kv_group, list(each.keys), each.tier, each.cause)
            for each in told.events
        ]
        listing = told.cursor.place >= 0
        self._known.apply(EventsResult(events, str(told.cursor), told.lost, listing))
        return told

    def news(self, blocks_max: int = 1000) -> list[Event]:
        """Read all there is; return the events."""
        events, before = list[Event](), None
        while self.cursor is None or self.cursor != before:
            before = self.cursor
            events += self.read(blocks_max).events
        return events

    def there(self) -> Where:
        """Return what is somewhere, as far as was read."""
        for change in self._known.take():
            name = change.group, change.key
            assert change.before == self._tiers.get(name, Tier.NOWHERE) != change.now
            self._tiers[name] = change.now
        return {name: tier for name, tier in self._tiers.items() if tier}
