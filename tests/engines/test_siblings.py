"""``MultiConnector``: KVHearth beside a connector that loads asynchronously, and may fail."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from engines.harness import MIB, Engine, arguments, connector, running_engine
from engines.kit import (
    Reference,
    all_same,
    prompt,
    same,
    servable,
    wait_attached,
    wait_settled,
    wait_stored,
    whole_blocks,
)
from support.daemon import Daemon, until

from kvhearth_lab.harness import HUNG_S

LENGTH = 1000
BLOCKS = LENGTH // 128
SERVED = whole_blocks(LENGTH)
GENERATED = 120
HITS = "vllm:external_prefix_cache_hits"
NOT_OURS = {"max_offload_tokens": 1}
"""The ``kv_transfer_params`` of a request of which KVHearth stores nothing."""


class Pair:
    """An engine with KVHearth and the sibling, and the sibling's control file."""

    def __init__(self, engine: Engine, control: Path) -> None:
        self.engine = engine
        self._control = control

    def say(self, word: str) -> None:
        """Tells the sibling what to do; see ``engines.loading_sibling``."""
        fresh = self._control.with_suffix(".new")
        fresh.write_text(word)
        fresh.rename(self._control)

    def sibling_learns(self, *texts: list[int]) -> None:
        """Lets only the sibling have the prompts."""
        self.say("go")
        self.engine.generate(*texts, tokens=1, transfer=NOT_OURS)
        self.engine.reset()

    def forget(self) -> None:
        """Leaves prompts to KVHearth alone."""
        self.say("forget")
        self.engine.reset()


@pytest.fixture(scope="module")
def pair(logs: Path, daemon: Daemon, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """A pair whose engine has 40 blocks, so that requests also preempt each other."""
    control = tmp_path_factory.mktemp("sibling") / "control"
    control.write_text("go")
    sibling = {
        "kv_connector": "Sibling",
        "kv_connector_module_path": "engines.loading_sibling",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"control": str(control)},
    }
    both = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": [connector(daemon), sibling]},
    }
    options = arguments(max_model_len=2048, kv_cache_memory_bytes=20 * MIB, kv_transfer_config=both)
    with running_engine(logs, **options) as engine:
        wait_attached(daemon)
        yield Pair(engine, control)


@pytest.fixture(autouse=True)
def _nothing_left_over(pair: Pair, daemon: Daemon) -> Iterator[None]:
    """Checks after each test: nothing is leased, and no block of the engine is held."""
    yield
    pair.say("go")
    wait_settled(daemon)
    pair.forget()


def test_aborted_while_the_sibling_loads(pair: Pair, daemon: Daemon, reference: Reference) -> None:
    """vLLM counts a load as computed from its beginning; its blocks still hold other KV."""
    texts = [prompt(f"sibling, aborted {number}") for number in range(3)]
    expected = reference.answers(texts)
    pair.engine.generate(*[prompt(f"old KV {n}") for n in range(4)], tokens=1, transfer=NOT_OURS)
    pair.sibling_learns(*texts)
    before = servable(daemon)
    pair.say("hold")
    found = pair.engine.generate(*texts, tokens=12, abort_after_s=0.5)
    assert [each["finish"] for each in found] == ["abort"] * 3
    pair.say("go")
    pair.forget()
    found = pair.engine.generate(*texts, tokens=12)
    all_same(found, expected, "after the abort")
    assert [each["cached"] for each in found] == [0] * 3, "unwritten blocks were stored"
    wait_stored(daemon, before + 3 * BLOCKS)


@pytest.mark.parametrize("failure", ["fail", "blocks"])
def test_a_load_of_the_sibling_fails(
    pair: Pair, daemon: Daemon, reference: Reference, failure: str
) -> None:
    text = prompt(f"sibling, {failure}")
    pair.sibling_learns(text)
    before, hits = servable(daemon), pair.engine.metric(HITS)
    pair.say(failure)
    found = pair.engine.begin("generate", requests=[{"prompt": text, "tokens": 12}])
    if failure == "fail":  # vLLM asks again, for the whole prompt
        until(lambda: pair.engine.metric(HITS) > hits, "it loads")
        pair.say("forget")
    [answer] = found.result(HUNG_S)
    same(answer, reference.answer(text), "recomputed")
    wait_stored(daemon, before + BLOCKS)
    pair.forget()
    answer = pair.engine.one(text)
    same(answer, reference.answer(text), "what was stored after the failure")
    assert answer["cached"] == SERVED


def test_finished(pair: Pair, daemon: Daemon, reference: Reference) -> None:
    """Blocks loaded by the sibling are stored once the request is computed further."""
    text = prompt("sibling, finished")
    pair.sibling_learns(text)
    before = servable(daemon)
    found = pair.engine.one(text)
    same(found, reference.answer(text), "loaded by the sibling")
    assert found["cached"] == SERVED
    wait_stored(daemon, before + BLOCKS)
    pair.forget()
    found = pair.engine.one(text)
    same(found, reference.answer(text), "loaded by KVHearth")
    assert found["cached"] == SERVED


def test_preempted(pair: Pair, daemon: Daemon, reference: Reference) -> None:
    texts = [prompt(f"sibling, preempted {number}", 500 + 37 * number) for number in range(8)]
    expected = reference.answers(texts, GENERATED)
    pair.sibling_learns(*texts)
    before = pair.engine.metric("vllm:num_preemptions")
    all_same(pair.engine.generate(*texts, tokens=GENERATED), expected, "with the sibling's loads")
    assert pair.engine.metric("vllm:num_preemptions") > before, "the engine was to be too small"
    wait_settled(daemon)
    pair.forget()
    found = pair.engine.generate(*texts, tokens=GENERATED)
    all_same(found, expected, "from what was stored")
    assert all(each["cached"] for each in found), [each["cached"] for each in found]
