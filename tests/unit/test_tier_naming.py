"""Blocks of old weights, or of weights without a label, have no identity at shared tiers."""

from __future__ import annotations

from support.core_kit import Rig

from kvhearth_server.engine.tiering.naming import BlockNaming


def test_only_labelled_blocks_of_now_may_be_shared() -> None:
    rig = Rig()
    session = rig.attach()
    naming = BlockNaming(rig.core, "lineage")
    (namespace,) = rig.state.namespaces
    first = naming.family(namespace, 0)
    identity = naming.identify(first)
    assert identity is not None
    assert (identity.tenant, identity.label) == (namespace.tenant, "")
    rig.core.bump_epoch(session, rig.epoch(session), label="new")
    assert naming.identify(first) is None
    second = naming.identify(naming.family(namespace, 0))
    assert second is not None
    assert second.label == "new"
    rig.core.bump_epoch(session, rig.epoch(session))
    assert naming.identify(naming.family(namespace, 0)) is None
