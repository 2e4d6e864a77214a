"""``kvhearth config``, and what all verbs share: colours, versions, errors in one line."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from support.cases import cases
from typer.testing import CliRunner

from kvhearth.version import PROTOCOL_VERSION, __version__
from kvhearth_server.cli import app
from kvhearth_server.cli.config import sample_text, settings_yaml
from kvhearth_server.config.load import Settings, load_settings

ROOT = Path(__file__).resolve().parents[2]
Run = Callable[..., tuple[int, str, str]]


pytestmark = pytest.mark.usefixtures("no_environment")


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs the command in this process: its exit code, stdout and stderr."""

    def call(*words: str) -> tuple[int, str, str]:
        code = app.run(words)
        return code, *capsys.readouterr()

    return call


def test_no_color_is_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    done = CliRunner().invoke(app.build(), ["doctor"], color=True)
    assert "\x1b[3" not in done.stdout


def test_version(run: Run) -> None:
    assert run("--version") == (0, f"kvhearth {__version__} (protocol {PROTOCOL_VERSION})\n", "")


def test_the_sample_has_every_setting_and_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "sample.yaml"
    path.write_text(sample_text())
    assert load_settings({"socket_dir": "/run/kvhearth"}, path) == Settings()
    plain = re.sub(r"(?m)^#(?=[a-z])", "", sample_text())
    path.write_text(plain)
    assert load_settings({}, path) == Settings()
    assert [name for name in Settings.model_fields if f"\n{name}:" not in plain] == []
    assert max(map(len, sample_text().splitlines())) <= 100


def test_the_checked_in_sample_is_the_sample() -> None:
    kept = (ROOT / "deploy/kvhearth.sample.yaml").read_text()
    assert kept == sample_text(), "run: kvhearth config sample > deploy/kvhearth.sample.yaml"


def test_sample(run: Run) -> None:
    assert run("config", "sample") == (0, sample_text(), "")
    found = json.loads(run("config", "sample", "--json")[1])
    assert list(found) == list(Settings.model_fields)
    assert found["memory"]["default"] == 1 << 30


def test_settings_as_yaml_give_the_settings_again(tmp_path: Path) -> None:
    settings = Settings(
        **{"memory": "2GiB", "tenants": ["a=1,2:512MiB", "b=3:1GiB"], "pin_ttl_max_s": "90m"},
        **{"arena_dir": "/dev/shm/k #1", "namespace_quota": "1GiB", "shared_index": False},
        **{
            "ssd_dirs": ["/mnt/a: b=2GiB", "/mnt/c=3GiB"],
            "message_bytes_max": 123456,
            "ssd_flush": True,
        },
    )
    path = tmp_path / "kvhearth.yaml"
    path.write_text(settings_yaml(settings))
    assert load_settings({}, path) == settings


def test_show(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "kvhearth.yaml"
    path.write_text("memory: 64GiB\nkeys_max: 7\n")
    monkeypatch.setenv("KVHEARTH_KEYS_MAX", "8")
    code, out, _ = run("config", "show", "--config", str(path))
    assert code == 0
    assert {"memory: 64GiB", "keys_max: 8", "arena_dir:"} <= set(out.splitlines())
    found = json.loads(run("config", "show", "--config", str(path), "--json")[1])
    assert (found["memory"], found["keys_max"]) == (64 << 30, 8)


def test_show_checks(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVHEARTH_MEMROY", "1")
    path = tmp_path / "kvhearth.yaml"
    path.write_text("memory: 64G\n")
    code, _, err = run("config", "show", str(path))
    assert (code, "the environment variable KVHEARTH_MEMROY" in err) == (0, True)
    path.write_text("memory: 12 bananas\n")
    for words in ([str(path)], ["--config", str(path)], [str(path), "--json"]):
        code, out, err = run("config", "show", *words)
        assert (code, out) == (2, "")
        assert err.splitlines()[-1].startswith(f"kvhearth: error: memory (in {path}): '12 bananas'")
    code, _, err = run("config", "show", str(path), "--config", "other.yaml")
    assert (code, "name one file" in err) == (2, True)


@cases("verb", ["stat", "ls", "sessions", "leases", "top", "drain", "health"])
@cases("form", [[], ["--json"]])
def test_no_daemon_is_one_clear_line_and_1(
    run: Run, tmp_path: Path, verb: str, form: list[str]
) -> None:
    code, out, err = run(verb, "--socket-dir", str(tmp_path), *form)
    assert code == 1
    name = "attach.sock" if verb == "health" else "admin.sock"
    assert err.startswith(f"kvhearth: error: no daemon answers at {tmp_path}/{name}; start one")
    assert len(err.splitlines()) == 1
    assert bool(out) == (verb == "health" and bool(form))


def test_the_directory_comes_from_the_environment_or_the_settings(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVHEARTH_SOCKET_DIR", str(tmp_path / "e"))
    assert f"{tmp_path}/e/admin.sock" in run("stat")[2]
    monkeypatch.delenv("KVHEARTH_SOCKET_DIR")
    path = tmp_path / "kvhearth.yaml"
    path.write_text(f"socket_dir: {tmp_path}/y\n")
    monkeypatch.setenv("KVHEARTH_CONFIG", str(path))
    assert f"{tmp_path}/y/admin.sock" in run("stat")[2]


def test_usage_that_is_wrong_is_2(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "contract.json"
    path.write_text("{}")
    for words, reported in (
        (["explain", "what?"], "neither a file nor a key in hex"),
        (["explain", str(path)], f"kvhearth: error: {path}: contract field"),
        (["evict", "ab", "--keep", "much"], "--keep: 'much': not a size"),
    ):
        code, _, err = run(*words)
        assert code == 2
        assert reported in err
