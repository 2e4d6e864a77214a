"""Byte movers between an engine's pages and the arena; ``cuda`` imports torch on first use."""

from kvhearth.copiers.base import ArenaView, BlockFailure, Copier, CopyKind, Done, Ticket
from kvhearth.copiers.host import HostCopier

__all__ = ["ArenaView", "BlockFailure", "Copier", "CopyKind", "Done", "HostCopier", "Ticket"]
