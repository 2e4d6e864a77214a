"""What a peer of the gRPC socket sends never reaches the log as it came."""

from __future__ import annotations

import json
import socket
import struct

import pytest
from support.daemon import stopped_daemon, until

from kvhearth_lab.harness.daemon import SERVE

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS, PING, GOAWAY = 4, 6, 7
FORGED = b'forged\n\x1b[31m{"event": "ready"}'


def frame(kind: int, payload: bytes) -> bytes:
    """An HTTP/2 frame of the connection."""
    return struct.pack(">I", len(payload))[1:] + bytes([kind, 0]) + bytes(4) + payload


@pytest.mark.parametrize("verbosity", ["", "DEBUG"])
def test_a_goaway_forges_no_line(verbosity: str) -> None:
    """Whatever the environment says: gRPC's C library would print what it is sent."""
    with stopped_daemon(arena=False, starter=SERVE) as daemon:
        daemon.environment = {"GRPC_VERBOSITY": verbosity} if verbosity else {}
        daemon.start()
        with socket.socket(socket.AF_UNIX) as peer:
            peer.settimeout(20)
            peer.connect(str(daemon.socket_dir / "grpc.sock"))
            peer.sendall(PREFACE + frame(SETTINGS, b""))
            assert peer.recv(100)
            for _ in range(100):
                peer.sendall(frame(GOAWAY, struct.pack(">II", 0, 2) + FORGED))
            peer.sendall(frame(PING, b"the last"))
            answer = b""
            while b"the last" not in answer:
                answer += peer.recv(1000)
        assert daemon.stats().boot_id
        until(lambda: '"ready"' in daemon.log_text(), "it has logged")
        lines = daemon.own_lines()
    assert [line for line in lines if "forged" in line] == []
    said = [json.loads(line) for line in lines]
    assert [line for line in said if "event" not in line] == []
