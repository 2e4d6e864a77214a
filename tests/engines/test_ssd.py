"""The real engine on a daemon whose memory holds a part of its SSD's blocks."""

from __future__ import annotations

from pathlib import Path

from engines.harness import Engine, arguments, connector, running_engine
from engines.kit import (
    BLOCK_TOKENS,
    Reference,
    prompt,
    reserved_bytes,
    same,
    wait_attached,
    warm,
    whole_blocks,
)
from support.daemon import Daemon, running_daemon, until

LENGTH = 1000
BLOCKS = LENGTH // BLOCK_TOKENS
TEXTS = [prompt(f"ssd {number}", LENGTH) for number in range(10)]
"""Prompts with blocks of 512 KiB: twice what the memory holds."""
STOCK_TOKENS = 1024


def from_disk(engine: Engine) -> float:
    """Returns prompt tokens that had to be promoted, by vLLM's own count."""
    name = "vllm:prompt_tokens_cached_by_source"
    found: dict[str, float] = engine.ask("labelled", name=name, label="source")
    return found.get("disk", 0.0)


def write_back(engine: Engine, daemon: Daemon, reference: Reference) -> None:
    """Runs all prompts for the first time; then all are on SSD, the first of them only there."""
    for number, text in enumerate(TEXTS):
        until(lambda: reserved_bytes(daemon), "the engine has slots in hand")
        found = engine.one(text)
        assert found["cached"] == 0
        same(found, reference.answer(text), f"cold {number}")
        saved = BLOCKS * (number + 1)
        until(
            lambda saved=saved: daemon.counters().get("demoted_blocks", 0) >= saved,
            f"{saved} blocks are on SSD",
        )


def test_a_prompt_from_ssd_is_the_computed_one(
    tmp_path: Path, reference: Reference, logs: Path
) -> None:
    """Also if only the SSD has outlived the daemon."""
    options = {"ssd_dirs": [f"{tmp_path}/ssd=256MiB"], "ssd_segment_bytes": "2MiB"}
    with running_daemon(arena=False, memory="20MiB", **options) as daemon:
        flag = connector(daemon, pool_tokens=STOCK_TOKENS, promotion_wait_ms=60_000)
        over = arguments(max_num_batched_tokens=STOCK_TOKENS, kv_transfer_config=flag)
        with running_engine(logs, **over) as engine:
            wait_attached(daemon)
            write_back(engine, daemon, reference)
            assert from_disk(engine) == 0
            for number in range(3):
                found = warm(engine, TEXTS[number])
                assert found["cached"] == whole_blocks(LENGTH)
                same(found, reference.answer(TEXTS[number]), f"from SSD {number}")
            promoted = from_disk(engine)
            assert promoted >= 2 * whole_blocks(LENGTH)

            daemon.restart()
            wait_attached(daemon)
            until(lambda: daemon.read_back, "the log is read back")
            # The daemon lists a rank before that has the new arena; until then its loads fail.
            until(lambda: warm(engine, TEXTS[-1])["cached"], "the rank loads again")
            promoted = from_disk(engine)
            for number in range(3, 6):
                found = warm(engine, TEXTS[number])
                assert found["cached"] == whole_blocks(LENGTH)
                same(found, reference.answer(TEXTS[number]), f"after the kill {number}")
            assert from_disk(engine) == promoted + 3 * whole_blocks(LENGTH)
            assert engine.ask("healthy")
        daemon.wait_quiet()
