"""Texts that came from a peer, made fit to be sent on: of bounded length, and encodable.

JSON lets a string hold half of a surrogate pair, which no UTF-8 codec and no protobuf string takes,
and lets 60,000 characters stand where one word belongs.
"""

from __future__ import annotations

from kvhearth.errors import KVHearthError

TEXT_BYTES_MAX = 1024
DETAIL_NAME_BYTES_MAX = 64
DETAILS_MAX = 4


def plain_text(text: str, bytes_max: int = TEXT_BYTES_MAX) -> str:
    """``text`` cut to ``bytes_max`` bytes of UTF-8, half surrogate pairs written as escapes."""
    data = text[:bytes_max].encode("utf-8", "backslashreplace")
    return data[:bytes_max].decode("utf-8", "ignore")


def plain_error(error: KVHearthError) -> KVHearthError:
    """The same refusal with texts that fit into every frame and header."""
    details = list(error.details.items())[:DETAILS_MAX]
    return KVHearthError(
        error.reason,
        plain_text(error.message),
        **{plain_text(name, DETAIL_NAME_BYTES_MAX): plain_text(value) for name, value in details},
    )
