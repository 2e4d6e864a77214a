"""What the peers that keep a file a block have in common: the folder, the blocks, the measures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from kvhearth_server.bench.peers.adapters.harness import U8, Config, fill, huge_or_not, order


class FilePeer:
    """A part of ``harness.Peer``; the rest, and the two measures, are each peer's own."""

    source: U8
    target: U8
    pages: Sequence[int] = ()

    def __init__(self) -> None:
        self.folder = Path()

    def prepare(self, config: Config) -> str:
        """Make the folder and the blocks; the kind of pages they lie in."""
        self.folder = config.folder / "blocks"
        self.folder.mkdir()
        self.source, kind = huge_or_not(config.batch, config.page_bytes, config.hugepages)
        self.target, _ = huge_or_not(config.batch, config.page_bytes, config.hugepages)
        fill(self.source)
        self.target[:] = 0
        self.pages = order(config.batch)
        return kind

    def measures(self) -> Mapping[str, Callable[[int], float]]:
        """As ``harness.Peer`` says."""
        return {"store": lambda _: self.store(), "load": lambda _: self.load()}

    def store(self) -> float:
        """Store the source as blocks of new names; the seconds."""
        raise NotImplementedError

    def load(self) -> float:
        """Load what was stored last into the target; the seconds."""
        raise NotImplementedError

    def drop(self) -> None:
        """As ``harness.Peer`` says."""
        for path in self.folder.rglob("*"):
            if path.is_file():
                path.unlink()

    def lookups(self, count: int) -> list[float]:
        """As ``harness.Peer`` says; there is no such part."""
        raise RuntimeError("no lookups are measured")
