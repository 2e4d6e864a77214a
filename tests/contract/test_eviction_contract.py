"""Contract tests of ``S3FifoPolicy``, run against every policy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from support.eviction_model import nothing_leased

from kvhearth.model import I64, U32
from kvhearth_server.core.s3fifo import S3FifoPolicy
from kvhearth_server.core.slot_rings import PolicyArrays

SLOT_COUNT = 6000


def marks_of(slots: I64) -> U32:
    return (slots.astype(np.uint64) * 2654435761 % (1 << 32)).astype(np.uint32)


class PolicyMachine(RuleBasedStateMachine):
    """Two policies over the same arrays, compared with two sets."""

    def __init__(self, slot_count: int) -> None:
        super().__init__()
        self.slot_count = slot_count
        arrays = PolicyArrays(slot_count)
        self.policies = [S3FifoPolicy(arrays) for _ in range(2)]
        self.members: list[set[int]] = [set(), set()]
        self.leased: set[int] = set()

    def pick(self, seed: int, slots: set[int], count: int) -> I64:
        ordered = np.array(sorted(slots), np.int64)
        return np.random.default_rng(seed).permutation(ordered)[:count]

    def evictable(self, slot: int) -> bool:
        return slot not in self.leased

    which = st.integers(0, 1)
    seeds = st.integers(0, 1 << 32)
    counts = st.one_of(st.integers(0, 5), st.integers(0, 60), st.integers(0, 2500))

    @rule(which=which, seed=seeds, count=counts, known=st.booleans())
    def insert(self, which: int, seed: int, count: int, known: bool) -> None:
        free = set(range(self.slot_count)) - self.members[0] - self.members[1]
        slots = self.pick(seed, free, count)
        self.policies[which].insert(slots, marks_of(slots) if known else None)
        self.members[which].update(slots.tolist())

    @rule(which=which, seed=seeds)
    def insert_one(self, which: int, seed: int) -> None:
        free = set(range(self.slot_count)) - self.members[0] - self.members[1]
        for slot in self.pick(seed, free, 1).tolist():
            self.policies[which].insert_one(slot, int(marks_of(np.array([slot]))[0]))
            self.members[which].add(slot)

    @rule(which=which, seed=seeds, count=counts)
    def remove(self, which: int, seed: int, count: int) -> None:
        slots = self.pick(seed, self.members[which], count)
        self.policies[which].remove(slots)
        self.members[which].difference_update(slots.tolist())

    @rule(which=which, seed=seeds, count=counts)
    def touch_slots_of_anybody(self, which: int, seed: int, count: int) -> None:
        self.policies[which]._arrays.touch(self.pick(seed, set(range(self.slot_count)), count))

    @rule(seed=seeds, count=counts)
    def lease(self, seed: int, count: int) -> None:
        self.leased = set(self.pick(seed, self.members[0] | self.members[1], count).tolist())

    @rule(which=which)
    def touch_all(self, which: int) -> None:
        self.policies[which]._arrays.touch(np.arange(self.slot_count))

    @rule(which=which, seed=seeds, left=st.integers(0, 3))
    def lease_nearly_all(self, which: int, seed: int, left: int) -> None:
        free = set(self.pick(seed, self.members[which], left).tolist())
        self.leased = (self.members[0] | self.members[1]) - free

    @rule()
    def lease_all(self) -> None:
        self.leased = self.members[0] | self.members[1]

    @rule(which=which, count=st.integers(1, 200))
    def evict_victims(self, which: int, count: int) -> None:
        policy, members = self.policies[which], self.members[which]
        for _ in range(count):
            victim = policy.victim(self.evictable)
            assert (victim is None) == (members <= self.leased)
            if victim is None:
                break
            assert victim in members
            assert self.evictable(victim)
            policy.evict(victim)
            members.remove(victim)

    @rule(which=which)
    def propose_twice(self, which: int) -> None:
        policy = self.policies[which]
        first = policy.victim(self.evictable)
        policy.check()
        assert policy.victim(self.evictable) == first
        assert (policy.age_rank() is None) == (not self.members[which])

    @rule(which=which, seed=seeds, count=st.integers(1, 300))
    def evict_others_than_the_victim(self, which: int, seed: int, count: int) -> None:
        for slot in self.pick(seed, self.members[which], count).tolist():
            self.policies[which].evict(slot)
            self.members[which].remove(slot)

    @invariant()
    def agrees_with_the_sets(self) -> None:
        for policy, members in zip(self.policies, self.members, strict=True):
            policy.check()
            slots = policy.slots().tolist()
            assert len(slots) == len(members) == len(policy)
            assert set(slots) == members


class TestEviction:
    """Tests of any policy."""

    @pytest.fixture
    def arrays(self) -> PolicyArrays:
        return PolicyArrays(SLOT_COUNT)

    @pytest.fixture
    def policy(self, arrays: PolicyArrays) -> S3FifoPolicy:
        return S3FifoPolicy(arrays)

    @pytest.mark.parametrize("slot_count", [60, SLOT_COUNT])
    def test_membership_is_a_set(self, slot_count: int) -> None:
        run_state_machine_as_test(
            lambda: PolicyMachine(slot_count),
            settings=settings(
                max_examples=settings.default.max_examples,
                stateful_step_count=40,
                deadline=None,
                print_blob=True,
            ),
        )

    def test_nothing_is_colder_than_the_first_come_unused(self, policy: S3FifoPolicy) -> None:
        policy.insert(np.array([5, 3, 9, 1]))
        for expected in (5, 3, 9, 1):
            assert policy.victim(nothing_leased) == expected
            policy.evict(expected)
        assert policy.victim(nothing_leased) is None
        assert policy.age_rank() is None

    def test_a_scan_of_leased_blocks_is_bounded(self, policy: S3FifoPolicy) -> None:
        asked = []
        policy.insert(np.arange(500))
        policy._arrays.touch(np.arange(0, 500, 3))
        assert policy.victim(lambda slot: bool(asked.append(slot))) is None
        assert len(asked) <= 6 * 500

    def test_a_scan_of_used_blocks_can_be_left_and_goes_on(self, policy: S3FifoPolicy) -> None:
        passed = 0

        def pass_over(_slot: int, used: bool) -> bool:
            nonlocal passed
            passed += used
            return used and passed % 50 == 0

        policy.insert(np.arange(500))
        for _ in range(2):  # where new blocks are, and where used ones went
            for _ in range(3):
                policy._arrays.touch(np.arange(500))
            first, victim = passed, None
            while victim is None:
                before = passed
                victim = policy.victim(nothing_leased, pass_over)
                policy.check()
                assert passed - before <= 50
            assert 500 - 500 // 10 <= passed - first <= 4 * 500
        assert len(policy) == 500

    def test_a_block_does_not_inherit_the_uses_of_the_former(self, policy: S3FifoPolicy) -> None:
        policy.insert(np.array([1]))
        policy._arrays.touch(np.array([1]))
        policy.remove(np.array([1]))
        policy.insert(np.array([1, 2]))
        assert policy.victim(nothing_leased) == 1

    def test_the_older_policy_has_the_smaller_rank(
        self, policy: S3FifoPolicy, arrays: PolicyArrays
    ) -> None:
        younger = S3FifoPolicy(arrays)
        policy.insert(np.arange(100))
        younger.insert(np.arange(100, 200))
        old, young = policy.age_rank(), younger.age_rank()
        assert old is not None
        assert young is not None
        assert old < young
        policy.remove(np.arange(100))
        policy.insert(np.arange(100))
        again = policy.age_rank()
        assert again is not None
        assert again > young

    def test_a_refused_call_changes_nothing(
        self, policy: S3FifoPolicy, arrays: PolicyArrays
    ) -> None:
        other = S3FifoPolicy(arrays)
        other.insert(np.array([3]))
        policy.insert(np.array([4]))
        before = arrays.position.copy()
        for call, refused in (
            (policy.insert, [[7, 7], [1, 3], [-1], [SLOT_COUNT]]),
            (policy.remove, [[3], [4, 4], [4, 5], [-1], [SLOT_COUNT]]),
        ):
            for slots in refused:
                with pytest.raises(ValueError, match="slots"):
                    call(np.array(slots))
        with pytest.raises(ValueError, match="1 fingerprints for 2 slots"):
            policy.insert(np.array([1, 2]), np.zeros(1, np.uint32))
        for slot in (3, 5):
            with pytest.raises(ValueError, match="not a member"):
                policy.evict(slot)
        assert np.array_equal(arrays.position, before)
        assert policy.slots().tolist() == [4]
        policy.check()
        other.check()

    def test_check_finds_a_lost_position(self, policy: S3FifoPolicy, arrays: PolicyArrays) -> None:
        policy.insert(np.arange(10))
        arrays.position[4] = 0
        with pytest.raises(ValueError, match="1 slots"):
            policy.check()

    def test_a_thinned_out_queue_gives_its_memory_back(
        self, policy: S3FifoPolicy, arrays: PolicyArrays
    ) -> None:
        for turn in range(50):
            slots = np.arange(3000 * (turn % 2), 3000 * (turn % 2) + 3000)
            policy.insert(slots, marks_of(slots))
            policy.remove(slots[np.arange(3000) % 100 > 0])
            policy.check()
            policy.remove(slots[::100])
        assert len(arrays.chunks) <= 8
