"""An engine across restarts of its daemon: is it attached again, and what is it served?"""

from __future__ import annotations

from kvhearth_lab.harness.engine import Engine
from support.daemon import until


def served(engine: Engine, keys: list[bytes]) -> int:
    """Return how many of the keys are served; no byte may be wrong."""
    seen = engine.check(keys)
    assert seen.bad == []
    return len(seen.right)


def back(engine: Engine, boot_id: str) -> None:
    """Wait until the engine is attached to another boot."""
    until(lambda: engine.ready and engine.client.boot_id != boot_id, "the engine attaches again")
