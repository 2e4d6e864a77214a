"""Lookups from the mapped index, beside a daemon that is stopped, killed, or removes the blocks."""

from __future__ import annotations

import contextlib
import mmap
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.daemon import Daemon, running_daemon, stopped_daemon, until
from support.native import without_native
from support.raw_door import OTHER_UID, RawSession, as_root, as_user, new_keys
from support.scripted_engine import scripted_engine

from kvhearth import native
from kvhearth.client import KVClient
from kvhearth.contract import Contract, GroupKind, GroupSpec, namespace_digest
from kvhearth.native.table import NAMESPACES, Shape
from kvhearth.results import CommitGroup, LookupResult
from kvhearth.shared_index import find_mapped
from kvhearth.url import parse_url
from kvhearth.version import PROTOCOL_VERSION
from kvhearth.wire.handshake import Hello
from kvhearth.wire.messages import pack_query
from kvhearth_lab.harness.engine import Engine, contract_of, engine_of

pytestmark = pytest.mark.skipif(native.available() is not None, reason="no native module")
PAGE = 16 << 10
CONTRACT = contract_of(PAGE)
SHARDS = contract_of(PAGE, shards=2, model="s")
GROUPS = Contract(
    "g",
    "r",
    "uint8",
    (
        GroupSpec(GroupKind.FULL, 16, PAGE),
        GroupSpec(GroupKind.SLIDING_WINDOW, 16, PAGE, window_tokens=50),
        GroupSpec(GroupKind.MAMBA, 32, PAGE),
    ),
)


@contextlib.contextmanager
def ready(daemon: Daemon, contract: Contract = CONTRACT, name: str = "e") -> Iterator[Engine]:
    """An engine that is attached, with the shared index."""
    with engine_of(daemon.url(), contract, name) as engine:
        engine.wait_ready()
        yield engine


def mapped(engine: Engine, keys: list[bytes]) -> LookupResult:
    """The answer of the mapped index; fails if the daemon would have to be asked."""
    found = engine.client.lookup_mapped({0: keys})
    assert found is not None
    return found


def heard(found: LookupResult) -> bool:
    """Whether the daemon has told what it leases of an answer."""
    return found.lease is not None and found.lease.grant.heard


def right(engine: Engine, keys: list[bytes], found: LookupResult) -> int:
    """How many of the found blocks are copied; no byte of theirs may be wrong."""
    extents = found.groups[0].extents.reshape(len(keys), -1)
    good = np.ones(len(keys), np.bool_)
    for rank in engine.ranks:
        done = rank.load(found.boot_id, keys, engine.epoch, extents[:, rank.number])
        assert done is not None
        assert not done.wrong.any()
        good &= done.ok
    return int(np.count_nonzero(good))


def evict(daemon: Daemon) -> None:
    """Remove all blocks that nobody holds."""
    daemon.operator().evict(namespace_digest("default", CONTRACT).hex(), 0, None)


@pytest.mark.parametrize("contract", [CONTRACT, SHARDS], ids=["one shard", "two shards"])
def test_a_hit_is_found_and_loaded_while_the_daemon_stands_still(contract: Contract) -> None:
    with (
        running_daemon(arena=False, shared_index=True) as daemon,
        ready(daemon, contract) as engine,
    ):
        keys = new_keys(40)
        assert engine.store(keys).bound == keys
        daemon.stop()
        try:
            found = engine.client.lookup({0: keys})
            assert found.hit_tokens == 40 * 16
            assert found.lease is not None
            assert right(engine, keys, found) == 40
            part = mapped(engine, [*keys[:10], *new_keys(5), *keys[20:]])
            assert part.hit_tokens == 10 * 16
            assert part.groups[0].present.tolist() == [True] * 10 + [False] * 5 + [True] * 20
            assert part.groups[0].leased.sum() == 10
            assert mapped(engine, new_keys(3)).lease is None
        finally:
            daemon.go_on()
        # The lease follows, and its release too.
        until(lambda: daemon.stats().leases == 2, "leases were posted")
        engine.client.release(found.lease)
        engine.client.release(part.lease)
        until(lambda: not daemon.stats().leases, "leases end")
        assert daemon.counters()["lookups"] >= 3


def test_sums_of_the_daemon_publish_blocks_too() -> None:
    with running_daemon(arena=False, shared_index=True) as daemon, ready(daemon, SHARDS) as engine:
        keys = new_keys(20)
        assert engine.store(keys, sums=False).bound == keys
        until(lambda: mapped(engine, keys).hit_tokens == 20 * 16, "all blocks are summed")
        assert right(engine, keys, mapped(engine, keys)) == 20


def test_a_block_that_is_evicted_before_its_copy_is_a_miss_even_in_the_same_slot() -> None:
    with running_daemon(arena=False, shared_index=True) as daemon, ready(daemon) as engine:
        keys, others = new_keys(40), new_keys(40)
        first = engine.store(keys)
        found = mapped(engine, keys)
        until(lambda: heard(found), "the lease is there")
        engine.client.release(found.lease)
        until(lambda: not daemon.stats().leases, "leases end")
        evict(daemon)
        assert mapped(engine, keys).hit_tokens == 0
        assert right(engine, keys, found) == 0
        assert engine.store(others).slots & first.slots
        assert right(engine, keys, found) == 0
        assert mapped(engine, keys).hit_tokens == 0
        assert right(engine, others, mapped(engine, others)) == 40


def test_no_more_is_told_leased_than_the_daemon_leases() -> None:
    requests = [new_keys(40) for _ in range(24)]  # 15 MiB of 16; 80 % of them can be leased
    with running_daemon(arena=False, shared_index=True) as daemon, ready(daemon) as engine:
        client = engine.client
        for keys in requests:
            assert engine.store(keys).bound == keys
        answers = [
            client.lookup_mapped({0: keys}) or client.lookup({0: keys}, lease=True)
            for keys in requests
        ]
        leases = [each.lease for each in answers if each.lease is not None]
        until(lambda: all(each.grant.heard for each in leases), "the daemon tells all")
        told = sum(int(each.groups[0].leased.sum()) for each in answers)
        assert 700 < told <= daemon.counters()["leased_keys"]
        assert not any(each.grant.short for each in leases)
        for keys in (new_keys(40) for _ in range(12)):
            engine.store(keys)
        for keys, found in zip(requests, answers, strict=True):
            assert client.holds(found)
            if count := int(found.groups[0].leased.sum()):
                assert right(engine, keys[:count], found) == count


def test_leases_that_end_before_the_daemon_hears_of_them_take_no_room() -> None:
    with running_daemon(arena=False, shared_index=True) as daemon, ready(daemon) as engine:
        keys = new_keys(40)
        assert engine.store(keys).bound == keys
        daemon.stop()
        try:
            # More than the daemon may lease, and than wait in the outbox.
            for _ in range(1000):
                engine.client.release(mapped(engine, keys).lease)
            last = mapped(engine, keys)
        finally:
            daemon.go_on()
        until(lambda: heard(last), "the daemon tells")
        assert last.lease is not None
        assert last.lease.sure
        until(lambda: daemon.stats().leases == 1, "no other lease is left")


def test_a_lease_that_comes_too_late_is_known() -> None:
    with running_daemon(arena=False, shared_index=True) as daemon, ready(daemon) as engine:
        client, keys = engine.client, new_keys(40)
        assert engine.store(keys).bound == keys
        daemon.stop()
        try:
            found = mapped(engine, keys)
            assert client.holds(found), "as far as anybody knows"
            assert not heard(found)
        finally:
            daemon.go_on()
        until(lambda: heard(found), "the daemon tells")
        assert client.holds(found)
        client.release(found.lease)
        until(lambda: not daemon.stats().leases, "the lease ends")
        again = mapped(engine, keys)
        until(lambda: heard(again), "the daemon tells")
        client.release(again.lease)
        until(lambda: not daemon.stats().leases, "the lease ends")
        evict(daemon)
        late = again.lease
        assert late is not None
        late.grant.heard = False
        assert not client.holds(again), "its blocks are gone"


def test_a_new_epoch_voids_all_entries_at_once() -> None:
    with (
        running_daemon(arena=False, shared_index=True) as daemon,
        ready(daemon) as one,
        ready(daemon, name="b") as b,
    ):
        keys = new_keys(20)
        assert one.store(keys).bound == keys
        assert mapped(b, keys).hit_tokens == 20 * 16
        assert one.client.bump_epoch() > 0
        # The other engine still has the old weights: only the daemon may tell it so.
        assert b.client.lookup_mapped({0: keys}) is None
        assert b.client.lookup({0: keys}).reason == "stale_epoch"
        assert mapped(one, keys).hit_tokens == 0
        assert one.store(keys[:5]).bound == keys[:5]
        assert mapped(one, keys).hit_tokens == 5 * 16
        assert right(one, keys[:5], mapped(one, keys[:5])) == 5


def test_a_successor_shares_the_adopted_blocks() -> None:
    with stopped_daemon(shared_index=True) as daemon:
        daemon.start()
        with ready(daemon, SHARDS) as engine:
            keys = new_keys(40)
            assert engine.store(keys).bound == keys
            boot_id = engine.client.boot_id
            before = mapped(engine, keys)
            daemon.kill()
            assert engine.client.lookup_mapped({0: keys}) is None
            assert engine.client.lookup({0: keys}).reason
            assert right(engine, keys, before) == 0
            daemon.start()
            until(lambda: engine.client.boot_id not in ("", boot_id), "attached again")
            engine.wait_ready()
            assert mapped(engine, keys).hit_tokens == 40 * 16
            assert right(engine, keys, mapped(engine, keys)) == 40


def test_a_dead_daemons_index_is_not_read() -> None:
    link: Any = SimpleNamespace(tables=[None], session=SimpleNamespace(alive=lambda: False))
    query = pack_query(CONTRACT, {0: new_keys(1)})
    assert find_mapped(link, CONTRACT, query, 1, 0) is None


def test_a_scheduler_gets_its_answer_at_once() -> None:
    with (
        running_daemon(arena=False, shared_index=True) as daemon,
        scripted_engine(daemon.url()) as engine,
    ):
        assert engine.run("a", "stored", 160) == 0
        daemon.stop()
        try:
            whole, part, none = (
                engine.add(name, text, tokens)
                for name, text, tokens in (
                    ("b", "stored", 175),
                    ("c", "stored", 320),
                    ("d", "?", 80),
                )
            )
            assert engine.half.matched(whole, 0) == 160
            assert engine.half.matched(part, 0) == 160
            assert engine.half.matched(none, 0) == 0
        finally:
            daemon.go_on()
        assert engine.admit(whole) == 160
        assert engine.wait_loaded(whole)
        assert all(engine.holds(whole, 0, block) for block in range(10))
        engine.finish(whole)


def test_tokens_are_not_offered_once_the_daemon_has_refused_their_lease() -> None:
    with (
        running_daemon(arena=False, shared_index=True, leases_max=1) as daemon,
        scripted_engine(daemon.url()) as engine,
    ):
        assert engine.run("a", "stored", 160) == 0
        first, second = (engine.add(name, "stored", 175) for name in ("b", "c"))

        def refused() -> bool:
            state = engine.half._requests.find("c")
            assert state is not None
            assert state.lookup is not None
            found = state.lookup.result
            return found is not None and found.lease is not None and found.lease.grant.short

        until(refused, "the daemon holds one lease at most")
        assert engine.admit(second) == 0
        assert engine.admit(first) == 160
        assert engine.wait_loaded(first)
        for request in (first, second):
            engine.finish(request)


LOOKS_UP_FOR_EVER = """
import sys
from kvhearth.client import connect
from kvhearth.contract import Contract
client = connect(sys.argv[1], Contract.from_json(sys.argv[2]), engine_id="child")
client.wait_ready(20)
while True:
    client.lookup_mapped({0: [bytes.fromhex(each) for each in sys.argv[3:]]})
"""


def test_a_client_that_is_killed_leaves_nothing() -> None:
    with running_daemon(arena=False, shared_index=True) as daemon, ready(daemon) as engine:
        keys = new_keys(20)
        assert engine.store(keys).bound == keys
        before = daemon.descriptor_count()
        words = [daemon.url(), CONTRACT.to_json(), *(key.hex() for key in keys)]
        with subprocess.Popen([sys.executable, "-c", LOOKS_UP_FOR_EVER, *words]) as child:
            until(lambda: daemon.stats().leases > 1, "the child looks up")
            child.kill()
        until(lambda: not daemon.stats().leases, "its leases end")
        until(lambda: daemon.descriptor_count() <= before, "its descriptors are closed")
        found = mapped(engine, keys)
        assert right(engine, keys, found) == 20
        engine.client.release(found.lease)


@as_root
def test_a_table_has_no_word_of_another_tenants_keys() -> None:
    """The same contract, engine and keys: each tenant maps a table of its own segment."""
    tenants = f"a={OTHER_UID}:8MiB b={os.getuid()}:8MiB"
    with (
        running_daemon(arena=False, tenants=tenants, shared_index=True) as daemon,
        contextlib.ExitStack() as ends,
    ):
        ours = ends.enter_context(ready(daemon))
        with as_user(daemon):
            theirs = ends.enter_context(ready(daemon))
            seen = _table_of(daemon, ends)
        own = _table_of(daemon, ends)
        keys, others = new_keys(40), new_keys(40)
        assert ours.store(keys).bound == keys
        assert theirs.store(others).bound == others
        for engine, known, unknown in ((ours, keys, others), (theirs, others, keys)):
            assert right(engine, known, mapped(engine, known)) == 40
            assert not mapped(engine, unknown).groups[0].present.any()
            assert not engine.client.lookup({0: unknown}).groups[0].present.any()
        for memory, known, unknown in ((own, keys, others), (seen, others, keys)):
            data = bytes(memory)
            assert all(data.count(key) == 1 for key in known)
            assert not any(key[at : at + 8] in data for key in unknown for at in (0, 8, 16, 24))
            # The first 8 bytes of the rows count blocks without room; one namespace has a row.
            rows = np.frombuffer(data[8 : 8 * NAMESPACES], np.uint64)
            assert np.count_nonzero(rows) == 1


def _table_of(daemon: Daemon, ends: contextlib.ExitStack) -> mmap.mmap:
    """The memory of the table that the present user gets, as long as ``ends`` is open."""
    session = ends.enter_context(
        RawSession(daemon, contract=CONTRACT.to_json(), engine_id="raw", shared_index=True)
    )
    (table,) = session.welcome["tables"]
    _, index = session.line.descriptors
    return ends.enter_context(mmap.mmap(index, Shape(**table).bytes, prot=mmap.PROT_READ))


def test_a_clients_memory_of_the_index_is_read_only() -> None:
    with (
        running_daemon(arena=False, shared_index=True) as daemon,
        RawSession(daemon, map_arena=True, shared_index=True) as session,
    ):
        (table,) = session.welcome["tables"]
        size = Shape(**table).bytes
        index = session.line.descriptors[2]
        assert os.fstat(index).st_size == size
        mmap.mmap(index, size, prot=mmap.PROT_READ).close()
        with pytest.raises(PermissionError):
            mmap.mmap(index, size)
        for change in (os.ftruncate, os.posix_fallocate):
            with pytest.raises(OSError, match="not permitted"):
                change(index, *((size // 2,) if change is os.ftruncate else (0, 2 * size)))
        with pytest.raises(OSError, match="not permitted"):
            os.pwrite(index, b"x", 0)


@pytest.mark.parametrize("hello", [{}, {"shared_index": True}])
def test_without_the_setting_or_the_wish_there_is_no_table(hello: dict[str, bool]) -> None:
    with (
        running_daemon(arena=False, shared_index=not hello) as daemon,
        RawSession(daemon, map_arena=True, **hello) as session,
    ):
        assert "tables" not in session.welcome
        assert len(session.line.descriptors) == 2
    with (
        running_daemon(arena=False, shared_index=False) as daemon,
        ready(daemon) as engine,
    ):
        keys = new_keys(5)
        assert engine.store(keys).bound == keys
        assert engine.client.lookup_mapped({0: keys}) is None
        assert engine.client.lookup({0: keys}).hit_tokens == 5 * 16


@pytest.mark.parametrize("side", ["daemon", "client"])
def test_without_the_native_module_on_one_side_lookups_are_calls(
    side: str,
) -> None:
    with stopped_daemon(arena=False) as daemon, contextlib.ExitStack() as ends:
        if side == "daemon":
            daemon.environment[native.VARIABLE] = "0"
        daemon.start()
        if side == "client":
            ends.enter_context(without_native())
        engine = ends.enter_context(ready(daemon))
        keys = new_keys(5)
        assert engine.store(keys).bound == keys
        assert not engine.client.index_mapped
        assert engine.client.lookup_mapped({0: keys}) is None
        assert right(engine, keys, engine.client.lookup({0: keys})) == 5
        said = "turned off by KVHEARTH_NATIVE=0"
        logged = [line for line in daemon.log_text().splitlines() if "shared_index.off" in line]
        assert [said in line for line in logged] == ([True] if side == "daemon" else [])


def test_the_index_answers_as_the_daemon_does() -> None:
    """Random presence and questions over all kinds of groups, against a client that asks."""
    random_ = random.Random(3)
    with running_daemon(arena=False, shared_index=True) as daemon, contextlib.ExitStack() as ends:
        clients = [_client(daemon, ends, shared_index=each) for each in (True, False)]
        keys = new_keys(24)
        for group, count in ((0, 24), (1, 24), (2, 12)):
            _commit(clients[0], group, random_.sample(keys[:count], random_.randrange(count)))
        answered = 0
        for _ in range(150):
            blocks = random_.randrange(1, 13) * 2
            groups = random_.sample(range(3), random_.randrange(1, 4))
            asked = {
                group: keys[: blocks // 2] if group == 2 else keys[:blocks] for group in groups
            }
            if random_.random() < 0.3:
                asked = {group: random_.sample(names, len(names)) for group, names in asked.items()}
            by_call = clients[1].lookup(asked)
            by_map = clients[0].lookup_mapped(asked)
            if by_map is not None:
                answered += 1
                assert by_map.hit_tokens == by_call.hit_tokens
                assert (by_map.lease is None) == (by_call.lease is None)
                for group, found in by_call.groups.items():
                    mine = by_map.groups[group]
                    for name in ("present", "ready", "leased", "tiers"):
                        assert (getattr(mine, name) == getattr(found, name)).all(), name
                    assert mine.extents.tobytes() == found.extents.tobytes()
            for client, found in zip(clients, (by_map, by_call), strict=True):
                client.release(None if found is None else found.lease)
        assert answered > 15


def _client(daemon: Daemon, ends: contextlib.ExitStack, *, shared_index: bool) -> KVClient:
    """A client that maps the index or asks, and maps no arena."""
    hello = Hello(
        protocol=PROTOCOL_VERSION,
        engine_id=f"mapped {shared_index}",
        contract=GROUPS.to_json(),
        rank=0,
        map_arena=False,
        shared_index=shared_index,
    )
    client = KVClient(parse_url(daemon.url()), GROUPS, hello)
    ends.callback(client.close)
    assert client.wait_ready(20)
    assert client.index_mapped == shared_index
    return client


def _commit(client: KVClient, group: int, keys: list[bytes]) -> None:
    taken = client.reserve({group: len(keys)})
    extents = taken.groups[group]
    sums = np.random.default_rng(1).integers(0, 255, (len(keys), 1, 16)).astype(np.uint8)
    result = client.commit({group: CommitGroup(keys, extents, sums)}, boot_id=taken.boot_id)
    assert not result.reason
