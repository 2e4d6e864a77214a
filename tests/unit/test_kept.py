"""The budget of bytes that connections keep: who loses which connection, and when memory goes
back.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvhearth_server.transport.kept import Kept

MIB = 1 << 20


@dataclass(eq=False)
class Line:
    """A connection."""

    owner: str
    kept_bytes: int
    ended: bool = False

    def end_for_memory(self) -> None:
        self.ended, self.kept_bytes = True, 0


def test_the_owner_with_the_most_loses_its_largest_connection() -> None:
    freed = list[int]()
    kept = Kept[Line](20 * MIB, lambda: freed.append(kept.total_bytes))
    good = Line("b", 6 * MIB)
    many = [Line("a", size * MIB) for size in (3, 4, 3)]
    for each in (good, *many):
        kept.note(each)
    assert not any(each.ended for each in (good, *many))
    assert kept.total_bytes == 16 * MIB
    more = Line("b", 5 * MIB)
    kept.note(more)
    assert [each.ended for each in many] == [False] * 3
    assert (good.ended, more.ended) == (True, False), "b has the most now"
    many[0].kept_bytes = 9 * MIB
    kept.note(many[0])
    assert (many[0].ended, kept.total_bytes) == (True, 12 * MIB)
    for each in (more, *many):
        assert freed == []
        each.kept_bytes = 0
        kept.note(each)
    assert (freed, kept.total_bytes) == ([0], 0)


def test_what_peers_have_read_meanwhile_costs_nobody_a_connection() -> None:
    kept = Kept[Line](10 * MIB, lambda: None)
    reading, other = Line("a", 9 * MIB), Line("b", 4 * MIB)
    kept.note(reading)
    reading.kept_bytes = 1 * MIB
    kept.note(other)
    assert (reading.ended, other.ended, kept.total_bytes) == (False, False, 5 * MIB)
