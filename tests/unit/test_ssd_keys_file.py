"""The file of keys: its form, its mode, and messages that tell no key."""

from __future__ import annotations

import base64
import subprocess
import sys
from pathlib import Path

import pytest

from kvhearth.errors import KVHearthError, Reason
from kvhearth_server.config.load import Settings
from kvhearth_server.keys_file import read_keys
from kvhearth_server.preflight import problems
from kvhearth_server.tier_startup import keyring

ONE, TWO = (base64.b64encode(bytes([number]) * 32).decode() for number in (1, 2))


def written(path: Path, text: str, mode: int = 0o600) -> Path:
    path.touch(mode=0o600)
    path.write_text(text)
    path.chmod(mode)
    return path


def test_the_first_key_writes_and_all_read(tmp_path: Path) -> None:
    text = f"default:\n- {{id: new, key: {TWO}}}\n- {{id: old, key: {ONE}}}\n"
    path = written(tmp_path / "keys", text)
    keys = read_keys(path, ["default"])["default"]
    assert [key.name for key in keys] == ["new", "old"]
    assert keys[0].secret == bytes([2]) * 32
    assert TWO not in repr(keys)
    assert "2" * 8 not in repr(keys)
    found = keyring(Settings(keys_file=path))
    assert found is not None
    assert found.life(keys[1].number, 1, 1) is not None
    assert keyring(Settings()) is None


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "write TENANT"),
        ("a: []", "write a list of keys"),
        (f"a: [{{id: k, key: {ONE}}}]", "tenant default has no key"),
        (f"default: [{{id: k, key: {ONE[:-4]}}}]", "not base64 of 32 bytes"),
        ("default: [{id: k, key: '!!'}]", "not base64 of 32 bytes"),
        (f"default: [{{key: {ONE}}}]", "a key is"),
        (f"default: [{{id: k, key: {ONE}}}, {{id: k, key: {TWO}}}]", "is there twice"),
        (f"default: [{{id: k, key: {ONE}}}]\nb: [{{id: k, key: {ONE}}}]", "also that of default"),
        (f"default: [{{id: k, key: {ONE}", "line 1 is not YAML"),
        ("- 1", "write TENANT"),
    ],
)
def test_wrong_files(tmp_path: Path, text: str, why: str) -> None:
    with pytest.raises(KVHearthError) as caught:
        read_keys(written(tmp_path / "keys", text), ["default"])
    assert caught.value.reason is Reason.CONFIG_INVALID
    assert why in caught.value.message
    assert ONE not in caught.value.message
    assert "openssl rand" in caught.value.message


def test_without_keys_nothing_that_encrypts_is_loaded() -> None:
    program = (
        "import sys, kvhearth_server.daemon, kvhearth_server.tiers.ssd.tier\n"
        "sys.exit(any(name.partition('.')[0] == 'cryptography' for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=60).returncode == 0


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644, 0o660])
def test_others_may_not_read_it(tmp_path: Path, mode: int) -> None:
    path = written(tmp_path / "keys", f"default: [{{id: k, key: {ONE}}}]", mode)
    settings = Settings(keys_file=path, socket_dir=tmp_path / "run")
    (name, error), *_ = problems(settings)
    assert name == "keys_file"
    assert "chmod" in error.message
