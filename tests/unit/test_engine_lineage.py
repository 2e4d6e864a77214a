"""The lineage, which lasts as long as the arena, distinguishes a cold start from a warm one."""

from __future__ import annotations

import json
import re

import numpy as np
from support.core_kit import contract, refused
from support.core_shell import Shell

from kvhearth.errors import Reason
from kvhearth.session.link import WeightsEpoch
from kvhearth.wire.handshake import Welcome, encode_frame
from kvhearth_server.core.actions import SlabSized
from kvhearth_server.core.slot_table import Geometry, State
from kvhearth_server.core.state import Limits
from kvhearth_server.memory.journal import READERS, STATE_WORDS, owner_check


def shell() -> Shell:
    """An engine over an empty arena."""
    return Shell(Geometry.of([("t", 2 * 64 * 1024)], 64 * 1024, 4096), Limits())


def welcome(world: Shell, engine_id: str = "e") -> Welcome:
    """A session's welcome, as a client reads it."""
    message = world.attach(contract(), "t", engine_id=engine_id).welcome.to_message()
    encode_frame(message)
    return Welcome.from_message(json.loads(json.dumps(message)))


def hear(epochs: WeightsEpoch, said: Welcome) -> None:
    """Attaches a client that receives the welcome."""
    epochs.attached(said.boot_id, said.epoch, said.lineage)


def test_a_warm_restart_keeps_the_lineage_a_cold_one_draws_another() -> None:
    world = shell()
    first = welcome(world)
    assert re.fullmatch("[0-9a-f]{32}", first.lineage)
    assert welcome(shell()).lineage != first.lineage
    for _ in range(2):
        world.restart()
        again = welcome(world)
        assert (again.lineage, again.boot_id != first.boot_id) == (first.lineage, True)
    world.arena.text = ""
    world.restart()
    assert welcome(world).lineage not in (first.lineage, first.boot_id)


def test_anothers_bump_before_a_warm_restart_leaves_old_weights_old() -> None:
    world, epochs = shell(), WeightsEpoch()
    said = welcome(world)
    hear(epochs, said)
    core = world.engine.core
    world.engine.call(core.bump_namespace, bytes.fromhex(said.namespace))
    world.restart()
    hear(epochs, welcome(world))
    assert (epochs.own, epochs.daemon) == (said.epoch, said.epoch + 1)


def test_a_cold_start_takes_along_who_was_up_to_date() -> None:
    world, fresh, old = shell(), WeightsEpoch(), WeightsEpoch()
    said = welcome(world)
    hear(fresh, said)
    hear(old, said)
    old.heard(said.boot_id, said.epoch + 1)
    world.arena.text = ""
    world.restart()
    later = welcome(world)
    hear(fresh, later)
    hear(old, later)
    assert fresh.own == later.epoch
    assert old.own == said.epoch


def test_a_catalogue_without_a_lineage_is_damaged() -> None:
    for lineage in ({}, {"lineage": ""}, {"lineage": 7}):
        world = shell()
        content = json.loads(world.arena.text)
        del content["lineage"]
        world.arena.text = json.dumps({**content, **lineage})
        with refused(Reason.ARENA_UNUSABLE):
            world.restart()


def test_a_daemon_that_says_no_lineage_is_understood() -> None:
    message = welcome(shell()).to_message()
    del message["lineage"]
    assert Welcome.from_message(message).lineage == ""


def test_what_is_dropped_is_free_in_the_journal_also_without_a_group() -> None:
    world = shell()
    journal = world.engine.journal
    assert journal is not None
    journal.slab(SlabSized(0, 4096))
    header = journal.headers[0:1]
    header["owner"] = READERS
    header["owner_check"] = owner_check(np.array([READERS], np.uint32))
    header["state"] = STATE_WORDS[State.QUARANTINED]
    world.restart()
    assert world.engine.journal is not None
    assert world.engine.journal.headers["state"][0] == STATE_WORDS[State.FREE]
