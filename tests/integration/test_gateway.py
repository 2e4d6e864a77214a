"""The gateway with a real daemon, and a client of raw sockets."""

from __future__ import annotations

from support.daemon import running_daemon
from support.remote_raw import PAGE_BYTES, RawSession, gateway, keys_of

from kvhearth.wire.remote import Outcome


def test_blocks_are_stored_and_loaded_over_tcp() -> None:
    with running_daemon() as daemon, gateway(daemon.socket_dir) as served:
        far = RawSession(served.port)
        keys = keys_of(4)
        payload = far.store(keys)
        lease, extents = far.look_up(keys)
        before, found, after = far.get(extents)
        assert set(before + after) == {Outcome.OK}
        assert found == payload
        assert len(found) == 4 * PAGE_BYTES
        far.release(lease)
        far.bye()
        daemon.wait_quiet()
