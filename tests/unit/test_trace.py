"""The trace file and its simulation."""

from __future__ import annotations

import contextlib
import hashlib
import json
import random
import zlib
from pathlib import Path

import numpy as np
import pytest
from support.core_kit import refused

from kvhearth.errors import KVHearthError, Reason
from kvhearth_server.cli import app
from kvhearth_server.traces.format import (
    CHUNK_HEAD,
    HEAD,
    Trace,
    TraceSpace,
    TraceWriter,
    key_blob,
    read_trace,
)
from kvhearth_server.traces.simulate import POLICIES, Miniature, sample_rate, simulate

BLOCK = 64 << 10
SPACE = TraceSpace("ab" * 32, "t", 1, 0, BLOCK, {"model": "m", "hash_bytes": 32})


def key(name: str, at: int = 0) -> bytes:
    """A key of 32 bytes."""
    return hashlib.sha256(f"{name}/{at}".encode()).digest()


def chain(name: str, count: int) -> bytes:
    """Keys of a chain, side by side."""
    return b"".join(key(name, at) for at in range(count))


def written(path: Path, uses: list[tuple[bool, bytes]], salt: bytes = b"salt") -> Trace:
    """A trace of lookups (True) and stores, a millisecond apart."""
    path.unlink(missing_ok=True)
    with TraceWriter(path, {"memory_bytes": 100 * BLOCK, "ssd_bytes": 0}, salt) as writer:
        writer.space(0, SPACE)
        for number, (looked_up, blob) in enumerate(uses):
            writer.use(0, 1000 * number, blob, 32, store=not looked_up)
    return read_trace(path)


def numbers(trace: Trace, use: int) -> list[int]:
    """The numbers of a use's keys."""
    runs = range(trace.first_runs[use], trace.first_runs[use + 1])
    return [n for r in runs for n in range(trace.starts[r], trace.starts[r] + trace.lengths[r])]


# -- the file ----------------------------------------------------------------------------------


def test_uses_come_back_as_they_were_written(tmp_path: Path) -> None:
    chooser = random.Random(3)
    names = [key("k", at) for at in range(300)]
    uses = [
        (chooser.random() < 0.6, b"".join(chooser.sample(names, chooser.randrange(1, 40))))
        for _ in range(500)
    ]
    trace = written(tmp_path / "t", uses)
    assert len(trace) == 500
    assert trace.stores.tolist() == [not looked_up for looked_up, _ in uses]
    assert trace.at_us.tolist() == [1000 * n for n in range(500)]
    assert trace.spaces == {0: SPACE}
    assert not trace.cut
    known: dict[int, bytes] = {}
    for use, (_, blob) in enumerate(uses):
        for number, name in zip(
            numbers(trace, use), (blob[at : at + 32] for at in range(0, len(blob), 32)), strict=True
        ):
            assert known.setdefault(number, name) == name
    assert len(set(known.values())) == len(known) == len(trace.hashes) == len(set(trace.hashes))
    assert trace.asked_keys == sum(len(blob) // 32 for looked_up, blob in uses if looked_up)


def test_a_chain_that_is_asked_for_again_takes_a_few_bytes(tmp_path: Path) -> None:
    once = written(tmp_path / "a", [(True, chain("c", 1000))])
    often = written(tmp_path / "b", [(True, chain("c", 1000))] * 1000)
    assert often.asked_keys == 1000 * once.asked_keys
    growth = (tmp_path / "b").stat().st_size - (tmp_path / "a").stat().st_size
    assert growth < 10 * 1000


def test_keys_are_salted_and_nothing_else_of_them_is_written(tmp_path: Path) -> None:
    uses = [(True, chain("secret", 50))]
    same = [written(tmp_path / name, uses, b"one").hashes for name in ("a", "b")]
    other = written(tmp_path / "c", uses, b"two").hashes
    assert same[0].tolist() == same[1].tolist()
    assert not set(other.tolist()) & set(same[0].tolist())
    with TraceWriter(tmp_path / "d", {}) as writer:
        writer.space(0, SPACE)
        writer.use(0, 0, chain("secret", 50), 32, store=False)
    fresh = read_trace(tmp_path / "d").hashes
    assert not set(fresh.tolist()) & {*same[0].tolist(), *other.tolist()}
    data = (tmp_path / "a").read_bytes()
    _, _, _, size = HEAD.unpack_from(data)
    at, content = HEAD.size + size, b""
    while at < len(data):
        packed, _, _ = CHUNK_HEAD.unpack_from(data, at)
        content += zlib.decompress(data[at + CHUNK_HEAD.size : at + CHUNK_HEAD.size + packed])
        at += CHUNK_HEAD.size + packed
    for position in range(50):
        name = key("secret", position)
        assert all(name[start : start + 8] not in content for start in range(25))


def test_a_file_that_was_cut_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    path = tmp_path / "t"
    with TraceWriter(path, {}) as writer:
        writer.space(0, SPACE)
        for number in range(3):
            writer.use(0, 0, chain(f"c{number}", 20), 32, store=False)
            writer.flush()
    whole = path.read_bytes()
    path.write_bytes(whole[:-30])
    trace = read_trace(path)
    assert trace.cut
    assert trace.lookups == 2


@pytest.mark.parametrize("seed", range(4))
def test_damaged_files_are_refused_or_read_and_nothing_else(tmp_path: Path, seed: int) -> None:
    path = tmp_path / "t"
    written(path, [(True, chain("a", 30)), (False, chain("b", 9)), (True, chain("a", 12))])
    good, chooser = path.read_bytes(), random.Random(seed)
    refusals = 0
    for _ in range(150):
        bad = bytearray(good)
        for _ in range(chooser.randrange(1, 4)):
            bad[chooser.randrange(len(bad))] = chooser.randrange(256)
        path.write_bytes(bad)
        with contextlib.suppress(KVHearthError):
            read_trace(path)
            refusals -= 1
        refusals += 1
    assert refusals > 50


@pytest.mark.parametrize(
    "content",
    [
        b"\x01\x00\x00\x01\x00\x05",  # keys that were never written
        b"\x03\x05abc",  # fewer hashes than announced
        b"\x09",  # an unknown kind
        b"\x01\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01",  # a number without an end
        b"\x00\x00\x02{}",  # a space without fields
    ],
)
def test_malformed_records_are_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "t"
    written(path, [(True, chain("a", 3))])
    packed = zlib.compress(content)
    head = CHUNK_HEAD.pack(len(packed), len(content), zlib.crc32(content))
    path.write_bytes(path.read_bytes() + head + packed)
    with refused(Reason.CONFIG_INVALID):
        read_trace(path)


def test_a_bomb_is_not_unpacked(tmp_path: Path) -> None:
    path = tmp_path / "t"
    written(path, [(True, chain("a", 3))])
    packed = zlib.compress(bytes(64 << 20))
    path.write_bytes(path.read_bytes() + CHUNK_HEAD.pack(len(packed), 100, 0) + packed)
    with refused(Reason.CONFIG_INVALID):
        read_trace(path)


def test_other_files_are_no_traces(tmp_path: Path) -> None:
    path = tmp_path / "t"
    path.write_bytes(b"hello" * 10)
    with refused(Reason.CONFIG_INVALID):
        read_trace(path)
    with refused(Reason.CONFIG_INVALID):
        read_trace(tmp_path / "none")
    with refused(Reason.CONFIG_INVALID):
        TraceWriter(path, {})


def test_keys_of_a_length_are_made_from_hashes() -> None:
    hashes = np.array([1, 2**63], np.uint64)
    assert len(key_blob(hashes, 20)) == 40
    assert key_blob(hashes, 20)[:8] == (1).to_bytes(8, "little")


# -- the simulation ----------------------------------------------------------------------------


def loops(rounds: int, chains: int, length: int) -> list[tuple[bool, bytes]]:
    """Chains that are asked for in turn, again and again."""
    return [(True, chain(f"c{n}", length)) for _ in range(rounds) for n in range(chains)]


@pytest.mark.parametrize("policy", POLICIES)
def test_what_fits_is_always_hit_but_the_first_time(tmp_path: Path, policy: str) -> None:
    part = Miniature(written(tmp_path / "t", loops(10, 20, 30)), 1.0)
    assert simulate(part, policy, 1000 * BLOCK).hit_ratio == pytest.approx(0.9)


def test_a_loop_that_does_not_fit(tmp_path: Path) -> None:
    part = Miniature(written(tmp_path / "t", loops(10, 20, 30)), 1.0)
    assert simulate(part, "lru", 400 * BLOCK).hit_ratio == 0
    assert simulate(part, "sieve", 400 * BLOCK).evicted_blocks > 1000
    below = simulate(part, "sieve", 400 * BLOCK, 1000 * BLOCK)
    assert below.hit_ratio == pytest.approx(0.9)
    assert below.memory_hit_ratio == 0


def test_stores_are_found_by_the_first_lookup(tmp_path: Path) -> None:
    part = Miniature(written(tmp_path / "t", [(False, chain("a", 50)), (True, chain("a", 50))]), 1)
    for policy in POLICIES:
        assert simulate(part, policy, 200 * BLOCK).hit_ratio == 1


def test_a_miniature_has_the_hit_ratio_of_the_whole(tmp_path: Path) -> None:
    chooser = np.random.default_rng(5)
    names = chooser.zipf(1.2, 4000) % 2000
    trace = written(tmp_path / "t", [(True, chain(f"c{n}", 10)) for n in names.tolist()])
    whole, part = Miniature(trace, 1.0), Miniature(trace, 0.25)
    assert 0.2 < len(part.hashes) / len(trace.hashes) < 0.3
    for policy in POLICIES:
        exact = simulate(whole, policy, 2000 * BLOCK).hit_ratio
        assert simulate(part, policy, 2000 * BLOCK).hit_ratio == pytest.approx(exact, abs=0.04)


def test_the_rate_bounds_the_work() -> None:
    columns = {
        "facts": {},
        "spaces": {0: SPACE},
        "use_spaces": np.zeros(10, np.int64),
        "at_us": np.zeros(10, np.int64),
        "lost_keys": 0,
        "cut": False,
    }
    trace = Trace(
        stores=np.zeros(10, np.bool_),
        first_runs=np.arange(11),
        starts=np.zeros(10, np.int64),
        lengths=np.full(10, 1_000_000),
        hashes=np.zeros(1_000_000, np.uint64),
        **columns,
    )
    assert sample_rate(trace, 1_000_000 * BLOCK) == pytest.approx(0.025)
    assert sample_rate(trace, 2560 * BLOCK) == pytest.approx(0.1)
    assert sample_rate(trace, 100 * BLOCK) == 1


def test_several_block_sizes_share_the_memory(tmp_path: Path) -> None:
    path = tmp_path / "t"
    large = TraceSpace("cd" * 32, "t", 1, 0, 3 * BLOCK, {"model": "n", "hash_bytes": 32})
    with TraceWriter(path, {}) as writer:
        writer.space(0, SPACE)
        writer.space(1, large)
        for _ in range(5):
            for n in range(10):
                writer.use(n % 2, 0, chain(f"c{n}", 20), 32, store=False)
    part = Miniature(read_trace(path), 1.0)
    # 100 blocks of one and 100 of three.
    assert simulate(part, "s3fifo", 600 * BLOCK).hit_ratio == pytest.approx(0.8)
    assert simulate(part, "lru", 390 * BLOCK).hit_ratio == 0
    assert simulate(part, "lru", 430 * BLOCK).hit_ratio == pytest.approx(0.8)


def test_bad_questions_are_refused(tmp_path: Path) -> None:
    part = Miniature(written(tmp_path / "t", loops(1, 2, 3)), 1.0)
    with refused(Reason.CONFIG_INVALID):
        simulate(part, "magic", 100 * BLOCK)
    with refused(Reason.CONFIG_INVALID):
        simulate(part, "sieve", BLOCK)


# -- the command -------------------------------------------------------------------------------


def test_simulate_prints_a_table_json_and_a_plot(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "t"
    written(path, loops(10, 20, 10))
    assert app.run(["trace", "simulate", str(path), "--policy", "sieve,lru", "--plot"]) == 0
    shown = capsys.readouterr().out
    assert "200 lookups of 2000 keys" in shown
    assert "* sieve" in shown
    assert "o lru" in shown
    assert "the present memory" in shown
    words = ["--memory", "16MiB,32MiB", "--ssd", "0,1GiB", "--json"]
    assert app.run(["trace", "simulate", str(path), *words]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["distinct_keys"] == 200
    assert len(found["results"]) == 8
    assert {each["hit_ratio"] for each in found["results"]} == {0.9}
    assert app.run(["trace", "simulate", str(path), "--memory", "lots"]) == app.EXIT_CONFIG
    assert app.run(["trace", "simulate", str(tmp_path / "no")]) == app.EXIT_CONFIG


def test_an_empty_trace_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written(tmp_path / "t", [])
    assert app.run(["trace", "simulate", str(tmp_path / "t")]) == app.EXIT_CONFIG
    assert "has no lookups" in capsys.readouterr().err
