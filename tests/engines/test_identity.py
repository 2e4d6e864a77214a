"""A prompt that KVHearth serves gets the same answer as without a cache."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from engines.harness import MIB, Engine, arguments, connector, running_engine
from engines.kit import (
    BLOCK_TOKENS,
    Reference,
    all_same,
    cold,
    prompt,
    same,
    servable,
    wait_attached,
    wait_settled,
    wait_stored,
    warm,
    whole_blocks,
)
from support.daemon import Daemon, running_daemon

LENGTH = 1000
SERVED = whole_blocks(LENGTH)


@pytest.fixture(autouse=True)
def _nothing_left_over(request: pytest.FixtureRequest) -> Iterator[None]:
    """Checks after each test: no lease is out, no engine block is pinned, the books balance."""
    yield
    used = {"daemon", "engine"} & set(request.fixturenames)
    if "daemon" in used:
        wait_settled(request.getfixturevalue("daemon"))
        request.getfixturevalue("daemon").stats()
    if "engine" in used:
        request.getfixturevalue("engine").reset()


def test_cold_and_warm(engine: Engine, daemon: Daemon, reference: Reference) -> None:
    text = prompt("cold and warm")
    expected = reference.answer(text)
    same(cold(engine, daemon, text), expected, "cold")
    hits = engine.metric("vllm:external_prefix_cache_hits")
    found = warm(engine, text)
    same(found, expected, "warm")
    assert found["cached"] == SERVED
    assert engine.metric("vllm:external_prefix_cache_hits") - hits == SERVED
    sources: dict[str, float] = engine.ask(
        "labelled", name="vllm:prompt_tokens_cached_by_source", label="source"
    )
    assert sources.get("host", 0) >= SERVED, sources


@pytest.mark.parametrize("length", [127, 128, 129, 1023, 1024, 1025])
def test_lengths_about_a_block(
    engine: Engine, daemon: Daemon, reference: Reference, length: int
) -> None:
    text = prompt(f"length {length}", length)
    expected = reference.answer(text)
    same(cold(engine, daemon, text), expected, "cold")
    found = warm(engine, text)
    same(found, expected, "warm")
    # A prompt that ends with its block: the engine recomputes the last token.
    assert found["cached"] in {whole_blocks(length), length // BLOCK_TOKENS * BLOCK_TOKENS}


def test_what_was_generated_is_stored_too(
    engine: Engine, daemon: Daemon, reference: Reference
) -> None:
    text = prompt("decode", 300)
    before = servable(daemon)
    first = engine.one(text, tokens=300)
    same(first, reference.answer(text, 300), "first turn")
    wait_stored(daemon, before + 599 // BLOCK_TOKENS)
    longer = [*text, *first["tokens"], *prompt("second turn", 50)]
    second = warm(engine, longer)
    same(second, reference.answer(longer), "second turn")
    assert second["cached"] == 512


def test_another_engine_and_one_started_again(
    engine: Engine, daemon: Daemon, reference: Reference, logs: Path
) -> None:
    """An engine that starts beside or after the one that stored finds the blocks; it may cut
    prompts into chunks differently.
    """
    text = prompt("restart", 1500)
    expected = reference.answer(text)
    same(cold(engine, daemon, text), expected, "cold")
    options = arguments(max_num_batched_tokens=512, kv_transfer_config=connector(daemon))
    with running_engine(logs, **options) as other:
        wait_attached(daemon, 2)
        found = other.one(text)
        same(found, expected, "fresh engine")
        assert found["cached"] == whole_blocks(1500)
        chunked = prompt("chunked", 1500)
        same(cold(other, daemon, chunked), reference.answer(chunked), "chunked, cold")
        other.kill()
    found = warm(engine, chunked)
    same(found, reference.answer(chunked), "stored in chunks by an engine that was killed")
    assert found["cached"] == whole_blocks(1500)


def test_concurrent_shared_prefixes(engine: Engine, daemon: Daemon, reference: Reference) -> None:
    shared = prompt("shared", 640)
    texts = [[*shared, *prompt(f"tail {number}", 60 * number)] for number in range(1, 9)]
    expected = reference.answers(texts)
    all_same(engine.generate(*texts, tokens=12), expected, "cold")
    wait_stored(daemon, 5)
    wait_settled(daemon)
    for _ in range(2):
        engine.reset()
        found = engine.generate(*texts, tokens=12)
        all_same(found, expected, "warm")
        assert all(each["cached"] >= 640 for each in found), [each["cached"] for each in found]


def test_a_salt_keeps_prompts_apart(engine: Engine, daemon: Daemon, reference: Reference) -> None:
    text = prompt("salt")
    expected = reference.answer(text)
    same(cold(engine, daemon, text), expected, "without salt")
    engine.reset()
    salted = engine.one(text, tokens=12, salt="somebody")
    same(salted, expected, "salted")
    assert salted["cached"] == 0


def test_prompt_logprobs_are_computed(engine: Engine, daemon: Daemon, reference: Reference) -> None:
    """Prompt log-probabilities need every position computed, so no cache may serve the prompt."""
    text = prompt("prompt logprobs")
    same(cold(engine, daemon, text), reference.answer(text), "cold")
    engine.reset()
    options = {"tokens": 4, "sampling": {"prompt_logprobs": 0}}
    found = engine.one(text, **options)
    expected = reference.engine.one(text, **options)
    same(found, expected)
    assert len(found["prompt_logprobs"]) == len(text)
    pairs = zip(found["prompt_logprobs"][1:], expected["prompt_logprobs"][1:], strict=True)
    assert max(abs(one - other) for one, other in pairs) < 1e-3
    assert found["cached"] == 0


def test_without_the_engines_own_prefix_cache_and_with_preemption(
    daemon: Daemon, reference: Reference, logs: Path
) -> None:
    """An engine of 20 blocks, prompts in chunks, requests that preempt each other."""
    texts = [prompt(f"preempted {number}", 500 + 37 * number) for number in range(6)]
    expected = reference.answers(texts, 200)
    options = arguments(
        max_model_len=1024,
        max_num_batched_tokens=256,
        kv_cache_memory_bytes=10 * MIB,
        enable_prefix_caching=False,
        kv_transfer_config=connector(daemon),
    )
    with running_engine(logs, **options) as small:
        wait_attached(daemon)
        all_same(small.generate(*texts, tokens=200), expected, "cold")
        assert small.metric("vllm:num_preemptions") > 0, "the engine was to be too small"
        wait_settled(daemon)
        found = small.generate(*texts, tokens=200)
        all_same(found, expected, "warm")
        assert all(each["cached"] > 0 for each in found), [each["cached"] for each in found]
        small.reset()


def test_tensor_parallel(daemon: Daemon, reference: Reference, logs: Path) -> None:
    text = prompt("two ranks")
    expected = reference.answer(text)
    options = arguments(tensor_parallel_size=2, kv_transfer_config=connector(daemon))
    with running_engine(logs, **options) as pair:
        wait_attached(daemon)
        same(cold(pair, daemon, text), expected, "cold")
        found = warm(pair, text)
        same(found, expected, "warm")
        assert found["cached"] == SERVED


SPECULATIVE = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}


@dataclass(frozen=True)
class Kind:
    """A model and its options; the least number of prompt tokens that the cache serves, and the
    number of stored blocks (0: one for each 128 tokens).
    """

    name: str
    over: dict[str, Any] = field(default_factory=dict)
    served_min: int = 1024
    blocks: int = 0
    length: int = 1500


KINDS = {
    "sliding-window": Kind("sliding"),
    # Its CPU backend cannot continue from cached KV: vLLM disables chunked prefill, we refuse.
    "mla": Kind("mla", served_min=0),
    "fp8": Kind("tiny", {"kv_cache_dtype": "fp8"}),
    "speculative": Kind("tiny", {"speculative_config": SPECULATIVE}),
    # The CPU build runs Mamba-2 only without prefix caching and then keeps no state to store.
    "mamba": Kind("mamba", {"enable_prefix_caching": False}, served_min=0),
    # Its CPU kernels need bfloat16. Blocks have 256 tokens, but vLLM's scheduler cuts prefills at
    # the last multiple of 128: it keeps a state only where that is a multiple of 256, too.
    "gated-delta": Kind(
        "gated-delta", {"dtype": "bfloat16"}, served_min=1280, blocks=8, length=1400
    ),
}


def _has_wide_vectors() -> bool:
    flags = Path("/proc/cpuinfo").read_text()
    return any(flag in flags for flag in ("avx512f", "amx_tile"))


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_other_kinds_of_engine(daemon: Daemon, logs: Path, kind: Kind) -> None:
    """Compares each with itself without a cache: cold, warm, and in an engine started later."""
    if "kv_cache_dtype" in kind.over and not _has_wide_vectors():
        pytest.skip("vLLM has no fp8 caches on a processor without AVX-512 or AMX")
    text = prompt(f"{kind.name} {sorted(kind.over)}", kind.length)
    served = []
    answers = []
    for number in range(2):
        options = arguments(kind.name, **kind.over, kv_transfer_config=connector(daemon))
        with running_engine(logs, **options) as one:
            if kind.served_min:
                wait_attached(daemon)
            if number == 0 and kind.served_min:
                answers.append(cold(one, daemon, text, blocks=kind.blocks))
            elif number == 0:
                answers.append(one.one(text))
            answers.append(warm(one, text))
            served.append(answers[-1]["cached"])
            one.reset()
            wait_settled(daemon)
    with running_engine(logs, **arguments(kind.name, **kind.over)) as plain:
        expected = plain.one(text)
    all_same(answers, [expected] * len(answers), "cold, warm, restarted")
    same(answers[2], answers[1], "warm in another engine")
    assert min(served) >= kind.served_min, served


@pytest.mark.parametrize(
    ("name", "over", "shared_index"),
    [
        ("tiny", {"tensor_parallel_size": 2}, True),
        ("sliding", {}, True),
        ("sliding", {"max_num_batched_tokens": 512}, False),
    ],
    ids=["two ranks", "two groups", "two groups, asked"],
)
def test_a_prompt_of_more_blocks_than_one_call_takes(
    logs: Path, name: str, over: dict[str, Any], shared_index: bool
) -> None:
    """A call takes 3 of its 31 blocks, as one of 8,192 takes a sixteenth of 131,072 others."""
    text = prompt("many calls", 4000)
    settings = {"memory": "256MiB", "keys_max": 3, "shared_index": shared_index}
    with running_daemon(**settings) as own:
        options = arguments(name, **over, kv_transfer_config=connector(own))
        with running_engine(logs, **options) as one:
            wait_attached(own)
            first = cold(one, own, text)
            wait_settled(own)
            found = warm(one, text)
            same(found, first, "warm")
            assert found["cached"] == whole_blocks(4000)
            assert one.metric("vllm:kvhearth_store_skipped") == 0
            one.reset()
        wait_settled(own)
