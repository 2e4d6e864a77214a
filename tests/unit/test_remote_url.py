"""URLs of daemons on other hosts: options, files, and no secret in any message."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.cases import cases

from kvhearth.connectors.core.settings import Settings, parse_settings
from kvhearth.errors import KVHearthError, Reason
from kvhearth.url import TOKEN_ENV, RemoteUrl, UnixUrl, parse_url


def test_defaults() -> None:
    assert parse_url("kvhearth://cache.example") == RemoteUrl("cache.example")
    assert parse_url("kvhearth://cache.example/") == RemoteUrl("cache.example", 9461)
    assert parse_url("kvhearths://10.0.0.7") == RemoteUrl("10.0.0.7", tls=True)


def test_all_options() -> None:
    url = (
        "kvhearths://[fd00::7]:99?lookup_ms=1&call_ms=2&attach_ms=3&heartbeat_ms=4&calls=frames"
        "&token_file=/t&ca=/a&cert=/c&key=/k&connections=7&staging=16MiB"
    )
    assert parse_url(url) == RemoteUrl(
        "fd00::7",
        99,
        tls=True,
        token_file="/t",
        ca="/a",
        cert="/c",
        key="/k",
        connections=7,
        staging_bytes=16 << 20,
        lookup_ms=1,
        call_ms=2,
        attach_ms=3,
        heartbeat_ms=4,
    )
    assert parse_url("kvhearth://[::1]").place == "[::1]:9461"  # type: ignore[union-attr]


def test_unix_urls_are_as_before() -> None:
    url = parse_url("kvhearth+unix:///run/k?calls=grpc&call_ms=7")
    assert url == UnixUrl(Path("/run/k"), calls="grpc", call_ms=7)


@cases(
    "url",
    [
        "kvhearth://",
        "kvhearth:///run/kvhearth",
        "kvhearth://h/path",
        "kvhearth://h:0",
        "kvhearth://h:70000",
        "kvhearth://h:x",
        "kvhearth://h#part",
        "kvhearth://h?calls=grpc",
        "kvhearth://h?daemon_uid=0",
        "kvhearth://h?ca=/a",
        "kvhearth://h?cert=/a&key=/b",
        "kvhearths://h?key=/k",
        "kvhearths://h?ca=",
        "kvhearth://h?token_file=",
        "kvhearth://h?connections=0",
        "kvhearth://h?connections=65",
        "kvhearth://h?connections=-1",
        "kvhearth://h?connections=x",
        "kvhearth://h?staging=0",
        "kvhearth://h?staging=64M",
        "kvhearth://h?staging=MiB",
        "kvhearth://h?staging=99999999GiB",
        "kvhearth://h?lookup_ms=0",
        "kvhearth://h?unknown=1",
        "kvhearth+unix:///run/k?connections=4",
        "kvhearth+tcp://h",
        "http://h",
        "",
    ],
)
def test_bad_urls(url: str) -> None:
    with pytest.raises(KVHearthError) as caught:
        parse_url(url)
    assert caught.value.reason is Reason.BAD_URL


@cases(
    "url",
    [
        "kvhearth://h?token=hunter2",
        "kvhearth://hunter2@h",
        "kvhearths://user:hunter2@h",
        "kvhearth://user:hunter2@h:0",
        "kvhearth://h/x?token_file=/a&password=hunter2",
        "kvhearth+unix:///run/k?token=hunter2",
        "bad://user:hunter2@h",
    ],
)
def test_no_message_shows_a_secret(url: str) -> None:
    with pytest.raises(KVHearthError) as caught:
        parse_url(url)
    assert "hunter2" not in str(caught.value)
    with pytest.raises(KVHearthError) as caught:
        parse_settings(Settings, {"url": url})
    assert "hunter2" not in str(caught.value)


def test_secrets_are_read_from_files_and_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("hunter2\n")
    assert RemoteUrl("h", token_file=str(file)).secret({TOKEN_ENV: "other"}) == "hunter2"
    assert RemoteUrl("h").secret({TOKEN_ENV: "other\n"}) == "other"
    assert RemoteUrl("h").secret({}) == ""
    assert "hunter2" not in repr(RemoteUrl("h", token_file=str(file)))


@cases("content", [b"", b"\n", b"\xff\xfe", b"x" * 300])
def test_files_without_a_token(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "token"
    file.write_bytes(content)
    with pytest.raises(KVHearthError) as caught:
        RemoteUrl("h", token_file=str(file)).secret()
    assert caught.value.reason is Reason.BAD_URL
    assert str(file) in caught.value.message


def test_files_that_are_not_there(tmp_path: Path) -> None:
    missing = str(tmp_path / "missing")
    with pytest.raises(KVHearthError, match="missing"):
        RemoteUrl("h", token_file=missing).secret()
    with pytest.raises(KVHearthError, match="missing"):
        RemoteUrl("h", tls=True, ca=missing).tls_context()
    with pytest.raises(KVHearthError, match="missing"):
        RemoteUrl("h", tls=True, cert=missing).tls_context()
    assert RemoteUrl("h").tls_context() is None
