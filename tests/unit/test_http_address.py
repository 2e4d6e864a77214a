"""The setting ``http``: accepted forms of an address, and rejected ones."""

from __future__ import annotations

import pytest

from kvhearth.errors import KVHearthError
from kvhearth_server.config.load import Settings, load_settings


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("off", None),
        ("OFF", None),
        ("127.0.0.1:9460", ("127.0.0.1", 9460)),
        ("127.8.0.1:0", ("127.8.0.1", 0)),
        ("[::1]:65535", ("::1", 65535)),
        ("localhost:80", ("localhost", 80)),
    ],
)
def test_addresses(text: str, address: object) -> None:
    assert Settings(http=text).http_address == address


@pytest.mark.parametrize("text", ["0.0.0.0:9460", "[::]:1", "192.168.0.1:1", "example.org:1"])
def test_routable_addresses_are_for_those_who_ask_for_them(text: str) -> None:
    with pytest.raises(KVHearthError, match="other machines may reach"):
        load_settings({"http": text})
    assert Settings(http=text, http_insecure=True).http == text
