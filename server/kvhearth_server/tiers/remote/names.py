"""Names at a remote: HMACs under the fleet's key, which tell nothing and cannot be guessed.

They depend on what all hosts of a fleet agree on, never on a daemon's own numbers of epochs or its
lineage: hosts with the same key, tenant, contract and weights label find each other's blocks.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Sequence

LAYOUT = "3"
"""Version of names and records, a part of every name: records of another one are never found."""
FLEET_KEY_BYTES_MIN = 16
SPACE_BYTES = 16
_KEY_BYTES = 16


def _mac(fleet_key: bytes, *parts: bytes) -> bytes:
    return hmac.digest(fleet_key, _framed(*parts), "sha256")


def _framed(*parts: bytes) -> bytes:
    return b"".join(len(part).to_bytes(8, "little") + part for part in parts)


def space_name(fleet_key: bytes, tenant: str, contract_json: str, label: str, group: int) -> str:
    """Return the name of a namespace's KV group, 32 hexadecimal digits.

    Args:
        contract_json: the contract in its canonical form.
        label: names the weights; hosts share blocks only under the same label.
        group: KV group of the contract.
    """
    parts = (tenant.encode(), contract_json.encode(), label.encode(), str(group).encode())
    return _mac(fleet_key, b"kvhearth remote space", *parts)[:SPACE_BYTES].hex()


def object_names(fleet_key: bytes, space: str, keys: Sequence[bytes]) -> list[str]:
    """Return the names of blocks below a remote's prefix: ``3/SPACE/KEY``."""
    mac = hmac.new(fleet_key, _framed(b"kvhearth remote key", space.encode()), "sha256")
    made = []
    for key in keys:
        each = mac.copy()
        each.update(_framed(key))
        made.append(f"{LAYOUT}/{space}/{each.digest()[:_KEY_BYTES].hex()}")
    return made


def record_key(fleet_key: bytes, name: str, salt: bytes) -> bytes:
    """Return the key, 32 bytes, that one record is sealed under.

    Args:
        name: of its object.
        salt: random bytes of the record's own, since a block may be sent again.
    """
    return _mac(fleet_key, b"kvhearth remote record", name.encode(), salt)


def is_object_name(name: str) -> bool:
    """Whether a name below the prefix has the form of a block's."""
    layout, _, rest = name.partition("/")
    space, _, key = rest.partition("/")
    digits = frozenset("0123456789abcdef")
    whole = len(space) == 2 * SPACE_BYTES and len(key) == 2 * _KEY_BYTES
    return layout == LAYOUT and whole and digits.issuperset(space + key)


def fleet_mark(fleet_key: bytes) -> bytes:
    """Return the content of the object ``MARK_NAME``, which tells a daemon with another key."""
    mark = _mac(fleet_key, b"kvhearth fleet mark").hex()
    return f"kvhearth fleet {LAYOUT} {mark}\n".encode()


def is_probe_name(name: str) -> bool:
    """Whether a name below the prefix is that of a probe's value."""
    return name.startswith(f"{LAYOUT}/probe-")


def probe_name() -> str:
    """Return a new name for a probe's value."""
    return f"{LAYOUT}/probe-{secrets.token_hex(8)}"


MARK_NAME = f"fleet-{LAYOUT}"
"""Beside the blocks, so that a rule that drops old blocks leaves it."""
