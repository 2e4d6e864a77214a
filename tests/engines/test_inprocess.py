"""An engine in the caller's process releases its blocks when its last request ends."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pytest
from engines.harness import LOAD_S, arguments, connector, end_tree, engine_nursery
from engines.kit import (
    Reference,
    all_same,
    prompt,
    reserved_bytes,
    servable,
    wait_attached,
    wait_settled,
    wait_stored,
    whole_blocks,
)
from support.daemon import Daemon, until

LENGTHS = (1013, 757, 1525)
"""Prompt lengths; the last of 12 steps fills a block of each."""


@pytest.mark.parametrize("ranks", [1, 2])
def test_reset_and_sleep_after_the_last_request(
    daemon: Daemon, reference: Reference, logs: Path, ranks: int
) -> None:
    texts = [prompt(f"in-process {ranks} {length}", length) for length in LENGTHS]
    expected = reference.answers(texts)
    before = servable(daemon)
    # Sleep resets connectors, too, and this engine is the only one in its namespace.
    options = arguments(
        tensor_parallel_size=ranks, kv_transfer_config=connector(daemon, on_reset="keep")
    )
    with led(daemon, logs, options, texts) as (answers, go):
        go.write(b"!")
        reported = json.loads(answers.readline() or "{}")
        all_same(reported["first"], expected, "cold")
        assert reported["reset"] is True, "blocks were held after the last step"
        # The engine takes no further step.
        wait_stored(daemon, before + sum((length + 11) // 128 for length in LENGTHS))
        go.write(b"!")
        reported = json.loads(answers.readline() or "{}")
        all_same(reported["second"], expected, "after sleep")
        assert [each["cached"] for each in reported["second"]] == [
            whole_blocks(each) for each in LENGTHS
        ]
        assert reported["reset_again"] is True
    wait_settled(daemon)


@contextlib.contextmanager
def led(
    daemon: Daemon, logs: Path, options: dict[str, Any], texts: list[list[int]]
) -> Iterator[tuple[IO[str], IO[bytes]]]:
    """Runs ``engines.inprocess`` in a separate process; yields its answers and the pipe that lets
    it continue.
    """
    log_path = logs / "in-process.log"
    out, reported = os.pipe()
    waits, go = os.pipe()
    with log_path.open("ab") as log:
        files = [reported, waits, log.fileno()]
        child = engine_nursery().birth(
            "engines.inprocess:run", files, options=options, prompts=texts
        )
    os.close(reported)
    os.close(waits)
    try:
        with open(out) as answers, open(go, "wb", buffering=0) as door:
            wait_attached(daemon)
            until(lambda: reserved_bytes(daemon), "the engine has slots in hand", LOAD_S)
            yield answers, door
    except BaseException:
        print(log_path.read_text(errors="replace")[-6000:])
        raise
    finally:
        end_tree(child.pid)
        child.wait(LOAD_S)
