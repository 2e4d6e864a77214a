"""A subscriber to vLLM's own KV events learns what the daemon has."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engines.harness import Engine, arguments, connector, running_engine
from engines.kit import BLOCK_TOKENS, evict, prompt, wait_attached, warm, whole_blocks
from support.daemon import running_daemon, until

LENGTH = 1000
CPU, STORAGE = "CPU", "STORAGE"


class Router:
    """Replays an engine's events.

    Attributes:
        blocks: hashes of the daemon's blocks, by medium.
        events: all events that are about the daemon.
    """

    def __init__(self, engine: Engine, endpoint: str) -> None:
        self._engine = engine
        engine.ask("subscribe", endpoint=endpoint)
        self.blocks: dict[str, list[int]] = {CPU: [], STORAGE: []}
        self.events: list[dict[str, Any]] = []

    def knows(self, medium: str, count: int) -> bool:
        """Read the events; return whether a medium has just as many blocks."""
        for event in self._engine.ask("published"):
            if event["event"] == "AllBlocksCleared":
                self.blocks = {CPU: [], STORAGE: []}
            elif event["medium"] in self.blocks:
                self.events.append(event)
                self._apply(event["event"], self.blocks[event["medium"]], event["block_hashes"])
        return len(self.blocks[medium]) == count

    def _apply(self, kind: str, known: list[int], hashes: Sequence[int]) -> None:
        for each in hashes:
            if kind == "BlockStored":
                assert each not in known, "stored twice"
                known.append(each)
            else:
                known.remove(each)

    def hears(self, medium: str, count: int) -> list[dict[str, Any]]:
        """Wait until a medium has as many blocks; return the events since the last call."""
        until(lambda: self.knows(medium, count), f"{count} blocks on {medium}")
        events, self.events = self.events, []
        return events


def test_a_subscriber_knows_what_the_daemon_has(tmp_path: Path, logs: Path) -> None:
    text = prompt("events", LENGTH)
    count = whole_blocks(LENGTH) // BLOCK_TOKENS
    endpoint = f"ipc://{tmp_path}/events"
    events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": endpoint}
    options = {"ssd_dirs": [f"{tmp_path}/ssd=256MiB"], "ssd_segment_bytes": "2MiB"}
    with running_daemon(arena=False, memory="64MiB", **options) as daemon:
        flags = arguments(
            kv_transfer_config=connector(daemon, promotion_wait_ms=60_000), kv_events_config=events
        )
        with running_engine(logs, **flags) as engine:
            wait_attached(daemon)
            router = Router(engine, endpoint)
            engine.one(text, tokens=1)
            (stored,) = router.hears(CPU, count)
            assert (stored["event"], stored["parent_block_hash"]) == ("BlockStored", None)
            assert stored["token_ids"] == text[: count * BLOCK_TOKENS]
            assert (stored["block_size"], stored.get("ownership")) == (BLOCK_TOKENS, None)
            reach = stored["kv_cache_spec_kind"], stored.get("kv_cache_spec_sliding_window")
            assert reach == ("full_attention", None)
            until(lambda: daemon.counters()["demoted_blocks"] == count, "they are saved")
            evict(daemon, "memory")
            moved = router.hears(STORAGE, count)
            assert not router.blocks[CPU]
            kinds = [each["event"] for each in moved]
            assert kinds == sorted(kinds, reverse=True), "stored before removed"
            tokens = [each["token_ids"] for each in moved if each["event"] == "BlockStored"]
            assert sum(map(len, tokens)) == count * BLOCK_TOKENS
            assert warm(engine, text)["cached"] == whole_blocks(LENGTH)
            router.hears(CPU, count)
            daemon.restart()
            router.hears(STORAGE, count)  # its memory is gone
            evict(daemon, "all")
            assert {each["event"] for each in router.hears(STORAGE, 0)} == {"BlockRemoved"}


def test_events_tell_the_reach_of_each_group_as_vllms_own(tmp_path: Path, logs: Path) -> None:
    endpoint = f"ipc://{tmp_path}/events"
    events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": endpoint}
    with running_daemon(memory="64MiB") as daemon:
        flags = arguments("sliding", kv_transfer_config=connector(daemon), kv_events_config=events)
        with running_engine(logs, **flags) as engine:
            wait_attached(daemon)
            engine.ask("subscribe", endpoint=endpoint)
            reaches: dict[str, dict[int, tuple[str, int | None]]] = {"GPU": {}, CPU: {}}
            numbers = iter(range(1000))

            def both_told() -> bool:
                engine.one(prompt(f"reach {next(numbers)}", LENGTH), tokens=1)
                for each in engine.ask("published"):
                    window = each["kv_cache_spec_sliding_window"]
                    reach = each["kv_cache_spec_kind"], window
                    reaches[each["medium"]][each["group_idx"]] = reach
                return len(reaches[CPU]) == len(reaches["GPU"]) > 1

            until(both_told, "both tell all groups")
    assert reaches[CPU] == reaches["GPU"]
    assert any(kind == "sliding_window" and window for kind, window in reaches[CPU].values())
