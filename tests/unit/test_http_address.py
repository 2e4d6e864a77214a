"""The setting ``http``: accepted forms of an address, and rejected ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvhearth.errors import KVHearthError, Reason
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


def test_yaml_reads_off_as_false(tmp_path: Path) -> None:
    path = tmp_path / "kvhearth.yaml"
    path.write_text("http: off\n")
    assert load_settings({}, path).http_address is None


@pytest.mark.parametrize(
    "text", ["", "9460", "localhost", ":9460", "::1:9460", "a:b", "h:65536", "h:-1", "h:", "h:1²"]
)
def test_what_is_not_an_address(text: str) -> None:
    with pytest.raises(KVHearthError) as caught:
        load_settings({"http": text})
    assert caught.value.reason is Reason.CONFIG_INVALID
    assert "write 127.0.0.1:9460" in caught.value.message


@pytest.mark.parametrize("text", ["0.0.0.0:9460", "[::]:1", "192.168.0.1:1", "example.org:1"])
def test_routable_addresses_are_for_those_who_ask_for_them(text: str) -> None:
    with pytest.raises(KVHearthError, match="other machines may reach"):
        load_settings({"http": text})
    assert Settings(http=text, http_insecure=True).http == text
