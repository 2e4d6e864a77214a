"""The README's flag on ``vllm serve``: three processes, HTTP, and ``/metrics``."""

from __future__ import annotations

from pathlib import Path

from engines.harness import connector, model
from engines.hub import running_hub
from engines.kit import (
    Reference,
    prompt,
    servable,
    wait_attached,
    wait_settled,
    wait_stored,
    whole_blocks,
)
from engines.serving import running_server, served
from support.daemon import Daemon, until

LENGTH = 2000
SERVED = whole_blocks(LENGTH)


def test_serve_and_serve_again(
    daemon: Daemon, reference: Reference, logs: Path, tmp_path: Path
) -> None:
    """A model named in a hub, without a revision; vLLM finds the commit."""
    with running_hub(model("tiny"), tmp_path / "hub") as environment:
        serve_twice(daemon, reference, logs, environment)


def serve_twice(
    daemon: Daemon, reference: Reference, logs: Path, environment: dict[str, str]
) -> None:
    text = prompt("served", LENGTH)
    expected = reference.answer(text)["tokens"]
    flag = connector(daemon, on_reset="keep")
    options = served(daemon, flag, model="example/tiny", environment=environment)
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


def test_two_api_servers_have_one_series_of_each_metric(daemon: Daemon, logs: Path) -> None:
    count, before, keep = 6, servable(daemon), connector(daemon, on_reset="keep")
    with running_server(logs, **served(daemon, keep, api_server_count=2)) as server:
        wait_attached(daemon)
        texts = [prompt(f"two servers {number}", LENGTH) for number in range(count)]
        for text in texts:
            server.complete(text)
        wait_stored(daemon, before + count * (LENGTH // 128))
        server.reset()
        for text in texts:
            assert server.complete(text)["cached"] == SERVED

        def ours() -> dict[str, float]:
            found = server.metrics().items()
            return {
                n: v for n, v in found if n.startswith("vllm:kvhearth_") and "_created" not in n
            }

        until(lambda: any(n.startswith("vllm:kvhearth_load_requests_t") for n in ours()), "stats")
        names = [name.partition("{")[0] for name in ours()]
        assert len(names) == len(set(names)), sorted(ours())
        assert {f"vllm:kvhearth_{name}" for name in ("attached", "held_blocks")} <= set(names)

        def counted(name: str) -> float:
            return sum(v for n, v in ours().items() if n.startswith(f"vllm:kvhearth_{name}"))

        # Whichever server answers and whichever was told: each count once.
        until(lambda: counted("load_requests_total") == count, "the last load is told")
        assert counted("load_tokens_total") == count * SERVED
        assert counted("lookups_total") == 2 * count
        assert counted("attached") == 1
        server.stop()
    wait_settled(daemon)
