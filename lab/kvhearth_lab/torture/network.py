"""The way of a world's remote clients to its gateway: a port that lasts, and a relay for each."""

from __future__ import annotations

import contextlib
import random
import socket
from collections.abc import Iterable

from kvhearth.errors import KVHearthError, Reason
from kvhearth_lab.harness.relay import Relay
from kvhearth_lab.torture.world_config import GATEWAY_HOST

_PORTS = range(20000, 32000)
"""Below the ports that the kernel gives to clients: while the daemon is away, none may take its."""
_TRIES = 100


class Network:
    """Relays of remote clients. Client ``number`` uses 127.0.0.(2 + number).

    Args:
        remote: numbers of the clients.

    Attributes:
        port: the gateway's, and that of all relays; 0 without clients.
        relays: by client.

    Raises:
        KVHearthError: ``socket_unusable`` if no port is free.
    """

    def __init__(self, remote: Iterable[int]) -> None:
        self.port = 0
        self.relays: dict[int, Relay] = {}
        numbers = list(remote)
        for _ in range(_TRIES if numbers else 0):
            port = random.choice(_PORTS)
            with contextlib.suppress(OSError):
                socket.create_server((GATEWAY_HOST, port)).close()
                for number in numbers:
                    self.relays[number] = Relay(port, f"127.0.0.{2 + number}")
                self.port = port
                return
            self.stop()
        if numbers:
            raise KVHearthError(
                Reason.SOCKET_UNUSABLE, f"no port from {_PORTS[0]} on is free for a gateway"
            )

    def url(self, number: int, options: str, *, direct: bool) -> str:
        """Return the URL for a client, past its relay if ``direct``."""
        host = GATEWAY_HOST if direct else self.relays[number].host
        return f"kvhearth://{host}:{self.port}?{options}"

    def stop(self) -> None:
        """End the relays."""
        for relay in self.relays.values():
            relay.stop()
        self.relays.clear()
