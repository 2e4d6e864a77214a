"""``kvhearth serve``: flags derived from the settings, exit codes, and the missing server extra."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.entry_point import kvhearth

from kvhearth.errors import KVHearthError, Reason
from kvhearth_server.cli import app
from kvhearth_server.config.load import Settings, flag_of


def with_daemon(body: str) -> str:
    """Statements that replace the real daemon by one whose ``run(settings)`` is ``body``."""
    return (
        "import types, kvhearth_server\n"
        "from kvhearth.errors import KVHearthError, Reason\n"
        f"def run(settings, opener, again, examine):\n    {body}\n"
        "stub = types.ModuleType('kvhearth_server.daemon')\n"
        "stub.run = run\n"
        "sys.modules['kvhearth_server.daemon'] = kvhearth_server.daemon = stub\n"
    )


def test_help_lists_every_setting() -> None:
    done = kvhearth("serve", "--help")
    assert done.returncode == 0, done.stderr
    words = done.stdout.split()
    for name in Settings.model_fields:
        assert flag_of(name) in words
    assert "--config" in words
    assert "Example: kvhearth serve --memory 64GiB" in done.stdout
    assert "(default 64MiB)" in done.stdout


def test_flags_environment_and_file_reach_the_daemon(tmp_path: Path) -> None:
    path = tmp_path / "kvhearth.yaml"
    path.write_text("pins_max: 3\n")
    shown = "print(settings.memory, settings.tenants[1].uids, settings.shared_index, end=' ')"
    shown += "; print(settings.pins_max, settings.keys_max, settings.hugepages); return 0"
    done = kvhearth(
        *("serve", "--memory", "512MiB", "--hugepages=off", "--no-shared-index"),
        *("--tenants", "a=1:64MiB", "--tenants", "b=2,3:64MiB", "--config", str(path)),
        prelude=with_daemon(shown),
        KVHEARTH_KEYS_MAX="9",
        KVHEARTH_MEMROY="1",
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[0] == f"{512 << 20} (2, 3) False 3 9 off"
    assert '"event": "daemon.starting"' in done.stderr
    assert "KVHEARTH_MEMROY" in done.stderr


def test_the_daemons_exit_code_is_the_commands() -> None:
    assert kvhearth("serve", prelude=with_daemon("return 7")).returncode == 7


def test_a_domain_error_is_one_line() -> None:
    body = "raise KVHearthError(Reason.MEMORY_UNAVAILABLE, 'no memory; lower --memory')"
    done = kvhearth("serve", prelude=with_daemon(body))
    assert done.returncode == 3
    assert done.stderr.splitlines()[-1] == "kvhearth: error: no memory; lower --memory"
    assert "Traceback" not in done.stderr


def test_a_bug_is_1_and_keeps_its_traceback() -> None:
    done = kvhearth("serve", prelude=with_daemon("raise RuntimeError('bug')"))
    assert done.returncode == 1
    assert "RuntimeError: bug" in done.stderr


def test_a_bad_setting_is_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run(["serve", "--memory", "12bananas"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("kvhearth: error: --memory: '12bananas': not a size; write")


def test_a_flag_that_is_not_there_is_2() -> None:
    assert app.run(["serve", "--memroy", "1GiB"]) == 2


@pytest.mark.parametrize("missing", ["typer", "pydantic_settings", "structlog", "yaml"])
def test_without_the_server_extra(missing: str) -> None:
    done = kvhearth("serve", prelude=f"sys.modules[{missing!r}] = None")
    assert done.returncode == 2
    assert done.stderr == "kvhearth needs the server extra: pip install 'kvhearth[server]'\n"


def test_another_import_error_is_a_bug() -> None:
    done = kvhearth("serve", prelude=with_daemon("import kvhearth_no_such_module"))
    assert done.returncode == 1
    assert "kvhearth_no_such_module" in done.stderr


def test_exit_codes() -> None:
    assert app.exit_code(KVHearthError(Reason.CONFIG_INVALID, "")) == 2
    assert app.exit_code(KVHearthError(Reason.HUGEPAGES_UNAVAILABLE, "")) == 3
    assert app.exit_code(KVHearthError(Reason.ARENA_BUSY, "")) == 3
    assert app.exit_code(KVHearthError(Reason.ARENA_UNUSABLE, "")) == 3
    assert app.exit_code(KVHearthError(Reason.SOCKET_UNUSABLE, "")) == 1
