"""Keys by their last 8 bytes, as engines' events name blocks to routers."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvhearth.contract import KEY_BYTES_MAX
from kvhearth_server.core.events import Cursor
from kvhearth_server.core.following import Following
from kvhearth_server.core.namespaces import Namespace
from kvhearth_server.core.state import CoreState

KEYS_MAX = 1 << 20
"""Most keys that are known, of all namespaces: each takes 200 bytes. Further ones are not found."""
READ_BLOCKS = 1024
"""Blocks that one read enters: about a millisecond."""
_NOBODY = secrets.token_bytes(KEY_BYTES_MAX)


def short_key(key: bytes) -> int:
    """Return the last 8 bytes of a key as an unsigned number, big-endian: vLLM's events have it."""
    return int.from_bytes(key[-8:])


@dataclass
class _Known:
    """A namespace's keys by KV group and short key, as its events tell up to a cursor."""

    cursor: Cursor | None = None
    keys: dict[tuple[int, int], bytes] = field(default_factory=dict)


class ShortKeys:
    """Follows the namespaces whose short keys somebody asks for."""

    def __init__(self, state: CoreState, following: Following, keys_max: int = KEYS_MAX) -> None:
        self._state, self._following, self._keys_max = state, following, keys_max
        self._known: dict[int, _Known] = {}

    def read(self, namespace: Namespace, now: float) -> bool:
        """Learn of some blocks that came or went; return whether there may be more."""
        known = self._known.setdefault(namespace.number, _Known())
        told = self._following.read_of(namespace, known.cursor, READ_BLOCKS, now)
        if told.lost or known.cursor is None:
            known.keys.clear()
        known.cursor, blocks = told.cursor, 0
        others = sum(len(each.keys) for each in self._known.values()) - len(known.keys)
        for event in told.events:
            blocks += len(event.keys)
            for key in event.keys:
                name = event.kv_group, short_key(key)
                if not event.tier:
                    known.keys.pop(name, None)
                elif name in known.keys or len(known.keys) + others < self._keys_max:
                    known.keys[name] = key
        return told.cursor.place >= 0 or blocks > READ_BLOCKS // 2

    def find(self, namespace: Namespace, kv_group: int, shorts: Sequence[int]) -> list[bytes]:
        """Return the keys of short keys; one that no block has in place of an unknown one."""
        keys = self._known[namespace.number].keys
        nobody = _NOBODY[: namespace.contract.hash_bytes]
        return [keys.get((kv_group, short), nobody) for short in shorts]

    def end_unread(self) -> None:
        """Forget the namespaces whose events nobody has read lately."""
        for number in [each for each in self._known if each not in self._state.events]:
            del self._known[number]
