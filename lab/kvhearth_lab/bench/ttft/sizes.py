"""Sizes of a run of ``kvhearth bench ttft``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

BLOCK_TOKENS = 128
PROBE_TOKENS = 64
"""Prompt of a readiness probe: less than a block, so that it leaves nothing in a cache."""
TAIL_TOKENS = 32
"""Tokens of a prompt after its whole blocks; every side computes them, even when warm."""
MODEL = "mid"
KV_BYTES_PER_TOKEN = {"float32": 16 << 10, "bfloat16": 8 << 10}
LONGEST = "4k"


def prompt_tokens(label: str) -> int:
    """Return the tokens of a prompt that the table calls ``1k``, ``2k``, ..."""
    return int(label.removesuffix("k")) * 1024 + TAIL_TOKENS


@dataclass(frozen=True)
class Sizes:
    """Counts of one run.

    Attributes:
        lengths: prompt tokens by label; ``4k`` is among them.
        rounds: prompts of each length.
        repeats: warm requests for each prompt.
        restarts: restarts of the engines; each prompt is sent once after each.
        pairs: blocks of the zero-hit part, before and after the restarts each. All sides run twice
            in a block, in both orders, so that a drift of the machine hits all alike.
        pair_tokens: tokens of a run's prompt. vLLM's worker spins for a second after its last step,
            which would dominate the run of a short prompt.
        output_tokens: tokens of each answer.
        dtype: dtype of weights and KV.
    """

    lengths: Mapping[str, int]
    rounds: int
    repeats: int
    restarts: int
    pairs: int
    pair_tokens: int
    output_tokens: int
    dtype: str

    @property
    def memory_bytes(self) -> int:
        """Memory of a daemon: room for all repeated prompts, twice. Prompts of the zero-hit part
        may be evicted.
        """
        prompts = self.rounds * sum(self.lengths.values())
        proof = 4 * self.lengths[LONGEST]
        return 2 * (prompts + proof) * KV_BYTES_PER_TOKEN[self.dtype] + (256 << 20)


def sizes_of(*, quick: bool, dtype: str) -> Sizes:
    """Return the sizes of a run.

    Args:
        quick: True for a smoke test.
        dtype: a key of ``KV_BYTES_PER_TOKEN``.
    """
    labels = (LONGEST,) if quick else ("1k", "2k", LONGEST)
    return Sizes(
        lengths={label: prompt_tokens(label) for label in labels},
        rounds=2 if quick else 5,
        repeats=1 if quick else 3,
        restarts=1 if quick else 3,
        pairs=2 if quick else 8,
        pair_tokens=prompt_tokens("1k" if quick else "2k"),
        output_tokens=8,
        dtype=dtype,
    )
