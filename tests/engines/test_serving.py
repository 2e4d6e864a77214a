"""The README's flag on ``vllm serve``: three processes, HTTP, and ``/metrics``."""

from __future__ import annotations

from pathlib import Path

from engines.harness import MIB, connector, model
from engines.kit import Reference, prompt, wait_attached, wait_settled, wait_stored, whole_blocks
from engines.serving import running_server
from support.daemon import Daemon

LENGTH = 2000
SERVED = whole_blocks(LENGTH)


def test_serve_and_serve_again(daemon: Daemon, reference: Reference, logs: Path) -> None:
    text = prompt("served", LENGTH)
    expected = reference.answer(text)["tokens"]
    options = {
        "model": str(model("tiny")),
        "dtype": "float32",
        "max_model_len": 4096,
        "kv_cache_memory_bytes": 128 * MIB,
        "enforce_eager": True,
        "enable_prompt_tokens_details": True,
        "kv_transfer_config": connector(daemon, on_reset="keep"),
    }
    with running_server(logs, **options) as server:
        wait_attached(daemon)
        first = server.complete(text)
        assert (first["tokens"], first["cached"]) == (expected, 0)
        wait_stored(daemon, LENGTH // 128)
        server.reset()
        again = server.complete(text)
        assert (again["tokens"], again["cached"]) == (expected, SERVED)
        metrics = server.metrics()
        hits = [v for n, v in metrics.items() if n.startswith("vllm:external_prefix_cache_hits_t")]
        assert sum(hits) == SERVED
        assert any(name.startswith("vllm:kvhearth_") for name in metrics), sorted(metrics)
        # It forgets shared blocks, and those it was told to keep, only locally, and logs that.
        server.reset(external=True)
        assert server.complete(text)["cached"] == SERVED
        assert "are kept" in server.log_text()
        server.stop()
    wait_settled(daemon)
    options["kv_transfer_config"] = connector(daemon)
    with running_server(logs, **options) as server:
        wait_attached(daemon)
        after = server.complete(text)
        assert (after["tokens"], after["cached"]) == (expected, SERVED)
        assert after["text"] == first["text"]
        wait_settled(daemon)
        server.reset(external=True)
        assert server.complete(text)["cached"] == 0
        server.stop()
    daemon.wait_quiet()
