"""Premises of the other tests: without a connector equal is equal, and wrong blocks show."""

from __future__ import annotations

from pathlib import Path

from engines.harness import arguments, running_engine
from engines.kit import BLOCK_TOKENS, LOGPROB_SPREAD, Reference, prompt, same, whole_blocks


def test_a_fresh_engine_says_the_same(logs: Path, reference: Reference) -> None:
    with running_engine(logs, **arguments()) as engine:
        first = engine.one(prompt("base"), tokens=12)
        again = engine.one(prompt("base"), tokens=12)
    assert (first["cached"], again["cached"]) == (0, whole_blocks(1000))
    same(first, reference.answer(prompt("base")), "fresh engine")
    same(again, reference.answer(prompt("base")), "its own prefix cache")


def test_a_wrong_block_far_away_shows(reference: Reference) -> None:
    """Otherwise the comparisons of the other tests could not fail."""
    right = reference.answer(prompt("base"))
    for block in (0, 3, 6):
        other = prompt("base")
        other[block * BLOCK_TOKENS : (block + 1) * BLOCK_TOKENS] = prompt("other", BLOCK_TOKENS)
        wrong = reference.answer(other)
        spread = max(
            abs(one - two) for one, two in zip(wrong["logprobs"], right["logprobs"], strict=True)
        )
        assert wrong["tokens"] != right["tokens"] or spread > 50 * LOGPROB_SPREAD
