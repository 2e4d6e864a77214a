"""Names of blocks at a remote, of which nobody without the fleet's key can make any."""

from __future__ import annotations

import hashlib
import hmac

NAME_BYTES = 16


def space_name(fleet_key: bytes, tenant: str, contract_json: str, label: str, group: int) -> str:
    """Return the name of a namespace's KV group at a remote, 32 hexadecimal digits.

    Args:
        fleet_key: secret of all daemons that share the remote.
        label: name of the weights, of ``bump_epoch``; empty for those of the contract.
    """
    parts = [tenant.encode(), contract_json.encode(), label.encode(), str(group).encode()]
    text = b"".join(len(part).to_bytes(4, "little") + part for part in parts)
    return hmac.new(fleet_key, text, hashlib.sha256).digest()[:NAME_BYTES].hex()
