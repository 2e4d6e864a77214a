"""Identities of remote peers: the tenant, role and bounds of a secret or a certificate."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Role(enum.StrEnum):
    """What an identity may do: an ``engine`` stores and loads, an ``operator`` may also use the
    daemon's HTTP.
    """

    ENGINE = "engine"
    OPERATOR = "operator"


@dataclass(frozen=True)
class Bounds:
    """Bounds of one identity over all its sessions; 0 for none.

    Attributes:
        sessions, connections: open at once.
        calls_per_s: calls and data requests, on average over a second.
        held_bytes, held_blocks: bound by its leases and reservations at once.
    """

    sessions: int = 0
    connections: int = 0
    calls_per_s: int = 0
    held_bytes: int = 0
    held_blocks: int = 0


@dataclass(frozen=True)
class Identity:
    """A remote peer's identity.

    Attributes:
        name: for the log; never the secret.
        tenant: the daemon's tenant whose blocks it uses.
    """

    name: str
    tenant: str
    role: Role = Role.ENGINE
    bounds: Bounds = Bounds()
