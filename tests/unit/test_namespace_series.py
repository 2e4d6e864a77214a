"""Series of namespaces for metrics: bounded, and never falling."""

from __future__ import annotations

from support.core_kit import contract

from kvhearth_server.core.namespaces import Namespace
from kvhearth_server.engine.namespace_series import OTHER, NamespaceSeries


def space(number: int, *, blocks: int = 1, used: int = 0) -> Namespace:
    digest = number.to_bytes(32, "big")
    return Namespace(number, digest, "t", contract(), blocks=blocks, used_bytes=used)


def name(number: int) -> str:
    return number.to_bytes(32, "big").hex()[:12]


def test_the_fullest_are_named_and_the_rest_is_other() -> None:
    spaces = [space(number << 208, used=number) for number in (1, 2, 3, 4)]
    for each in spaces:
        each.traffic.hit_keys = each.used_bytes * 10
    found = NamespaceSeries(shown_max=2).look(spaces)
    assert [(now.name, now.traffic.hit_keys) for now in found] == [
        (name(3 << 208), 30),
        (name(4 << 208), 40),
        (OTHER, 30),
    ]
    assert found[-1].blocks == 2
    assert found[0].model == contract().model


def test_a_name_stays_while_there_is_something_under_it() -> None:
    series, old = NamespaceSeries(shown_max=1), space(1 << 208, used=1)
    series.look([old])
    new = space(2 << 208, used=100)
    new.traffic.hit_keys = 5
    found = series.look([old, new])
    assert [now.name for now in found] == [old.digest.hex()[:12], OTHER]
    assert found[1].traffic.hit_keys == 5


def test_an_empty_idle_one_gives_its_name_and_nothing_falls() -> None:
    series, new = NamespaceSeries(shown_max=1), space(2 << 208, used=9)
    old = space(1 << 208, used=99)
    old.traffic.hit_keys, new.traffic.hit_keys = 7, 5
    series.look([old, new])
    old.blocks = 0
    new.traffic.hit_keys += 1
    found = series.look([old, new])
    assert [(now.name, now.traffic.hit_keys) for now in found] == [
        (new.digest.hex()[:12], 1),
        (OTHER, 5),
    ]


def test_a_forgotten_namespace_leaves_its_series() -> None:
    series, gone = NamespaceSeries(shown_max=4), space(1 << 208)
    assert len(series.look([gone])) == 1
    assert series.look([]) == []
