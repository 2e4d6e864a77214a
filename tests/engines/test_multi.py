"""KVHearth beside another connector, under vLLM's ``MultiConnector``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engines.harness import Engine, arguments, connector, inside, model, running_engine
from engines.kit import (
    TOKENS,
    Reference,
    cold,
    prompt,
    same,
    servable,
    wait_attached,
    wait_stored,
    warm,
    whole_blocks,
)
from support.daemon import Daemon, until
from support.manifests import ENGINES, recipes

MET = "the sibling met its workers"
SIBLING = {
    "kv_connector": "SiblingConnector",
    "kv_connector_module_path": "engines.sibling",
    "kv_role": "kv_both",
}

OURS = {
    "kv_connector": "KVHearthConnector",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
}


def multi(*connectors: dict[str, Any]) -> dict[str, Any]:
    """The flag for several connectors."""
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": list(connectors)},
    }


@pytest.mark.parametrize(("ours", "ranks"), [("first", 1), ("second", 2)])
def test_either_order(
    logs: Path, daemon: Daemon, reference: Reference, ours: str, ranks: int
) -> None:
    """Both connectors get their own workers' handshakes. Ours attaches before any request, stores
    and loads.
    """
    children = [connector(daemon), SIBLING]
    transfer = multi(*(children if ours == "first" else reversed(children)))
    text = prompt(f"ours is {ours}")
    options = arguments(kv_transfer_config=transfer, tensor_parallel_size=ranks)
    with running_engine(logs, **options) as engine:
        assert MET in engine.log_text()
        same(cold(engine, daemon, text), reference.answer(text), "cold")
        found = warm(engine, text)
        same(found, reference.answer(text), "warm")
        assert found["cached"] == whole_blocks(len(text))
        until(lambda: engine.metric("vllm:kvhearth_hit_tokens") >= found["cached"], "it is counted")


# -- the recipes of docs/engines.md ----------------------------------------------------------------


def replaced(recipe: dict[str, Any], daemon: Daemon) -> dict[str, Any]:
    """A recipe with our sibling in place of NIXL, on a daemon of the test."""
    text = json.dumps(recipe)
    found: dict[str, Any] = json.loads(text.replace('"NixlConnector"', '"SiblingConnector"'))
    for child in found["kv_connector_extra_config"]["connectors"]:
        if child["kv_connector"] == "SiblingConnector":
            child["kv_connector_module_path"] = SIBLING["kv_connector_module_path"]
        else:
            options = connector(daemon)["kv_connector_extra_config"]
            child["kv_connector_extra_config"] = options
    return found


@pytest.fixture(scope="module")
def conversing(logs: Path, daemon: Daemon) -> Iterator[list[Engine]]:
    """The engines of the first two recipes: one prefills and one decodes."""
    prefill, decode = (replaced(recipe, daemon) for recipe in recipes()[:2])
    with (
        running_engine(logs, **arguments(kv_transfer_config=prefill)) as first,
        running_engine(logs, **arguments(kv_transfer_config=decode)) as second,
    ):
        wait_attached(daemon, 2)
        yield [first, second]


def test_the_next_turn_finds_what_the_consumer_decoded(
    conversing: list[Engine], daemon: Daemon, reference: Reference
) -> None:
    prefill, decode = conversing
    turn = prompt("first turn", 500)
    cold(prefill, daemon, turn, tokens=1)
    before = servable(daemon)
    answer = decode.one(turn, tokens=140)
    assert answer["cached"] == 0, "the consumer loads nothing from the daemon"
    # 500 + 140 tokens have one whole block more than 500; the last token's KV is never computed.
    wait_stored(daemon, before + 1)
    following = [*turn, *answer["tokens"], *prompt("second turn", 100)]
    found = prefill.one(following, tokens=TOKENS)
    same(found, reference.answer(following), "the second turn")
    assert found["cached"] == whole_blocks(len(turn) + 140)


def test_vllm_takes_the_recipes(logs: Path) -> None:
    """Each is a valid vLLM configuration whose children demand one layout on CUDA, NIXL's, and
    whose KVHearth child can be made.
    """
    assert len(recipes()) == 3
    made = inside(logs, "children", engine=arguments(), transfers=recipes())
    assert made == [
        ["NixlPullConnector", "KVHearthConnector"],
        ["NixlPullConnector", "KVHearthConnector"],
        ["OffloadingConnector", "KVHearthConnector"],
    ]
    assert inside(logs, "layouts", engine=arguments(), transfers=recipes()) == ["LBHNC"] * 3


def test_layouts(logs: Path) -> None:
    """Layouts that vLLM demands on CUDA: of ours alone, and beside the real classes of others."""

    def ours(layout: str | None) -> dict[str, Any]:
        extra = {} if layout is None else {"layout": layout}
        return {**OURS, "kv_connector_extra_config": extra}

    others = ("NixlConnector", "MooncakeConnector", "OffloadingConnector")
    pairs = [{"kv_connector": other, "kv_role": "kv_both"} for other in others]
    cases: list[tuple[dict[str, Any], str | None]] = [
        (ours(None), "BLHNC"),
        (ours("auto"), "BLHNC"),
        (ours("BLHNC"), "BLHNC"),
        (ours("none"), None),
        (multi(ours(None)), None),
        (multi(ours("BLHNC")), "BLHNC"),
        *((multi(ours(None), pair), "LBHNC") for pair in pairs),
        *((multi(pair, ours("none")), "LBHNC") for pair in pairs),
        (multi(ours("BLHNC"), pairs[0]), "ValueError"),
    ]
    found = inside(logs, "layouts", engine=arguments(), transfers=[one for one, _ in cases])
    assert [str(one).partition(":")[0] for one in found] == [str(one) for _, one in cases]


# -- deploy/ ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ENGINES)
def test_vllm_takes_the_arguments_of_a_deployed_engine(logs: Path, name: str) -> None:
    """Uses a local model in place of the hub's."""
    engine = ENGINES[name]()
    words = [str(model("tiny")), *engine.words[1:]]
    found = inside(logs, "served", environment=engine.environment, words=words)
    assert found == {"connector": "KVHearthConnector", "url": engine.environment["KVHEARTH_URL"]}
