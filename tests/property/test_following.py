"""Whoever replays a namespace's events, from any cursor, knows which blocks are where."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from support.core_kit import contract, full, keys
from support.follower import Follower, Where
from support.tier_rig import TierRig

from kvhearth.model import Tier
from kvhearth_server.core.events import EventLogs
from kvhearth_server.core.following import Following
from kvhearth_server.core.slot_table import State

NUMBERS = st.lists(st.integers(0, 15), min_size=1, max_size=6, unique=True)
KV_GROUPS = st.integers(0, 1)
LOG_KEYS = 12


class FollowingMachine(RuleBasedStateMachine):
    """Blocks come, move and go while readers read now and then."""

    def __init__(self) -> None:
        super().__init__()
        self.rig = TierRig(5)
        self.rig.state.events = EventLogs(1, LOG_KEYS)
        self.rig.core.following = Following(self.rig.state, slots_at_once=8)
        self.session = self.rig.attach(contract(full(), full(8192)))
        self.steady, *self.readers = [Follower(self.rig, self.session) for _ in range(3)]
        self.fill()

    def teardown(self) -> None:
        self.rig.close()

    def fill(self) -> None:
        """Store blocks of which some are then only on the lower tier."""
        for kv_group, numbers in enumerate((range(8), range(4, 16))):
            self.store(list(numbers), kv_group)
        self.evict(6)

    def there(self) -> Where:
        """Return what is where, as the tables have it."""
        rig, space = self.rig, self.rig.space(self.session)
        found: Where = {
            (group, each): Tier.SSD
            for (_, group, each), block in rig.tier._blocks.items()
            if block.family == rig.tiering.names.family(space, group)
        }
        table = rig.state.table
        for _, group, heads in rig.state.index.items():
            for each, head in heads.items():
                if table.state[head] == State.SUMMED and table.epoch[head] == space.epoch:
                    found[group, each] = Tier.DRAM
        return found

    @rule(numbers=NUMBERS, kv_group=KV_GROUPS)
    def store(self, numbers: list[int], kv_group: int) -> None:
        """Store blocks; others may have to go."""
        self.rig.put(self.session, keys(*numbers), kv_group=kv_group)
        self.rig.settle()

    @rule(keep_blocks=st.integers(0, 8))
    def evict(self, keep_blocks: int) -> None:
        """Evict blocks from memory."""
        digest = self.rig.space(self.session).digest
        self.rig.call(self.rig.core.evict, digest, keep_blocks * 4096)
        self.rig.check()

    @rule(numbers=NUMBERS)
    def evict_below(self, numbers: list[int]) -> None:
        """Let the lower tier drop blocks."""
        self.rig.tier.evict(keys(*numbers))
        self.rig.turn()

    @rule(numbers=NUMBERS, kv_group=KV_GROUPS)
    def promote(self, numbers: list[int], kv_group: int) -> None:
        """Bring blocks back to memory."""
        self.rig.want(self.session, keys(*numbers), kv_group=kv_group)
        self.rig.settle()

    @rule(numbers=NUMBERS, turns=st.integers(0, 2), write_ends=st.booleans())
    def report(self, numbers: list[int], turns: int, *, write_ends: bool) -> None:
        """Remove blocks as corrupt, maybe while they are written to the lower tier."""
        self.rig.put(self.session, keys(*numbers))
        self.rig.tier.held = not write_ends
        self.rig.turn(turns)
        self.rig.tier.held = False
        for each in keys(*numbers):
            if (head := self.rig.head(self.session, each)) >= 0:
                self.rig.remove_bad(head)
        self.known()
        self.rig.settle()

    @rule(copies=st.booleans())
    def void(self, *, copies: bool) -> None:
        """Make all blocks invalid, or drop what the lower tier has; then store others."""
        rig, space = self.rig, self.rig.space(self.session)
        if copies:
            name = rig.tiering.names.name(space)
            rig.core.drop_copies(space.digest)
            while rig.tiering.forget_copies(space, name, 3):
                pass
        else:
            rig.call(rig.core.bump_epoch, self.session, space.epoch, label="")
        self.known()
        self.fill()

    @rule(reader=st.integers(0, 1), blocks_max=st.integers(1, 5))
    def read(self, reader: int, blocks_max: int) -> None:
        """Let a reader read once."""
        self.readers[reader].read(blocks_max, self.rig.now)

    @rule(reader=st.integers(0, 1), blocks_max=st.integers(1, 5))
    def catch_up(self, reader: int, blocks_max: int) -> None:
        """Let a reader read to the end, who lost events if it came late."""
        self.readers[reader].news(blocks_max)
        assert self.readers[reader].there() == self.there()

    @rule()
    def end_unread(self) -> None:
        """Forget the events that nobody has read."""
        self.rig.now += 1
        self.rig.state.events.end_unread(self.rig.now)

    @invariant()
    def known(self) -> None:
        """Whoever reads all the time knows what is there."""
        self.steady.news()
        assert self.steady.there() == self.there()


TestFollowing = FollowingMachine.TestCase
TestFollowing.settings = settings(max_examples=25, stateful_step_count=30, deadline=None)
