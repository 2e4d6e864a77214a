"""How much a run of ``kvhearth bench ttft`` measures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

BLOCK_TOKENS = 128
PROBE_TOKENS = 64
"""Less than a block: what a readiness probe asks for leaves nothing in a cache."""
TAIL_TOKENS = 32
"""Of a prompt behind its whole blocks: computed by everyone, also warm."""
MODEL = "mid"
KV_BYTES_PER_TOKEN = {"float32": 16 << 10, "bfloat16": 8 << 10}
LONGEST = "4k"


def prompt_tokens(label: str) -> int:
    """Tokens of a prompt that the table calls ``1k``, ``2k``, ..."""
    return int(label.removesuffix("k")) * 1024 + TAIL_TOKENS


@dataclass(frozen=True)
class Sizes:
    """Counts of one run.

    Attributes:
        lengths: prompt tokens by label; ``4k`` is among them.
        rounds: prompts of each length.
        repeats: of what is warm, for each prompt.
        restarts: of the engines; each prompt is asked for once after each.
        pairs: blocks of the zero-hit part, before and after the restarts each. All sides run twice
            in a block, there and back, so that a drift of the machine hits all alike.
        pair_tokens: of a run's prompt. vLLM's worker spins for a second behind its last step, so
            that a run of a short prompt would measure that.
        output_tokens: of each answer.
        dtype: of weights and KV.
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
        """Of a daemon: all prompts that are asked for again, twice. Those of the zero-hit part may
        be evicted.
        """
        prompts = self.rounds * sum(self.lengths.values())
        proof = 4 * self.lengths[LONGEST]
        return 2 * (prompts + proof) * KV_BYTES_PER_TOKEN[self.dtype] + (256 << 20)


def sizes_of(*, quick: bool, dtype: str) -> Sizes:
    """The sizes of a run.

    Args:
        quick: a smoke test.
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
