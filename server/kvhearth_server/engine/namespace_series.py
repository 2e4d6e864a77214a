"""Series of namespaces for metrics: the busiest ones by name, all others together."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from operator import attrgetter

from kvhearth_server.core.namespaces import Namespace, Traffic

NAMESPACES_SHOWN_MAX = 32
"""Upper bound on namespaces listed separately; the others are summed up as one."""
OTHER = "other"
NAMESPACE_DIGITS = 12
"""Digits of a digest that name a namespace wherever people see it."""
_COUNTED = [each.name for each in fields(Traffic)]
_ZEROS = (0,) * len(_COUNTED)
_counts: Callable[[Traffic], tuple[int, ...]] = attrgetter(*_COUNTED)


@dataclass(frozen=True)
class NamespaceNow:
    """One namespace by the first digits of its digest, or all others together.

    ``traffic`` is counted since it has this name. ``epoch`` is 0, and the texts are empty, for the
    others together; ``quota_bytes`` is None without a quota.
    """

    name: str
    blocks: int
    used_bytes: int
    tenant: str = ""
    model: str = ""
    revision: str = ""
    kv_dtype: str = ""
    epoch: int = 0
    quota_bytes: int | None = None
    traffic: Traffic = field(default_factory=Traffic)


class NamespaceSeries:
    """Names at most ``shown_max`` namespaces at a time.

    No series falls while it lasts: a rise goes to the name that the namespace has when it is seen.
    A namespace keeps its name until it is empty and idle while another one needs the place.
    """

    def __init__(self, shown_max: int = NAMESPACES_SHOWN_MAX) -> None:
        self._shown_max = shown_max
        self._seen: dict[bytes, tuple[int, ...]] = {}
        self._sums: dict[bytes, list[int]] = {}
        self._others = list(_ZEROS)

    def look(self, spaces: Iterable[Namespace]) -> list[NamespaceNow]:
        """Return the named namespaces, oldest first, and the others as one if there are any."""
        found = {space.digest: space for space in spaces}
        for digest in self._seen.keys() - found.keys():
            del self._seen[digest]
            self._sums.pop(digest, None)
        totals = {digest: _counts(space.traffic) for digest, space in found.items()}
        busy = {each for each, total in totals.items() if total != self._seen.get(each, _ZEROS)}
        self._name(found, busy)
        for digest in busy:
            sums, last = self._sums.get(digest, self._others), self._seen.get(digest, _ZEROS)
            for place, (total, old) in enumerate(zip(totals[digest], last, strict=True)):
                sums[place] += total - old
        self._seen = totals
        shown = sorted((found[each] for each in self._sums), key=lambda space: space.number)
        named = [_named(space, self._sums[space.digest]) for space in shown]
        rest = [space for digest, space in found.items() if digest not in self._sums]
        if not rest and not any(self._others):
            return named
        blocks, used = sum(s.blocks for s in rest), sum(s.used_bytes for s in rest)
        return [*named, NamespaceNow(OTHER, blocks, used, traffic=Traffic(*self._others))]

    def _name(self, found: dict[bytes, Namespace], busy: set[bytes]) -> None:
        """Give free names, and those of idle namespaces, to the fullest that have none."""
        waiting = [space for digest, space in found.items() if digest not in self._sums]
        if not waiting:
            return
        idle = [
            each
            for each in self._sums
            if each not in busy and not found[each].blocks and not found[each].groups
        ]
        waiting.sort(key=lambda space: (-space.used_bytes, space.number))
        for space in waiting:
            if len(self._sums) >= self._shown_max:
                if not idle or not (space.blocks or space.groups):
                    return
                del self._sums[idle.pop()]
            self._sums[space.digest] = list(_ZEROS)


def _named(space: Namespace, sums: list[int]) -> NamespaceNow:
    contract = space.contract
    return NamespaceNow(
        name=space.digest.hex()[:NAMESPACE_DIGITS],
        blocks=space.blocks,
        used_bytes=space.used_bytes,
        tenant=space.tenant,
        model=space.model,
        revision=contract.revision,
        kv_dtype=contract.kv_dtype,
        epoch=space.epoch,
        quota_bytes=space.quota_bytes,
        traffic=Traffic(*sums),
    )
