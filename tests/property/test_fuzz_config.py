"""Arbitrary settings from file and environment: valid, or one line that names the problem.

``config show`` and ``serve`` agree: they read the same.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from support.daemon import Daemon, stopped_daemon, until
from support.fuzz import fuzz, values

from kvhearth.errors import KVHearthError, Reason
from kvhearth_lab.harness import HUNG_S
from kvhearth_server.cli import app
from kvhearth_server.cli.config import settings_yaml
from kvhearth_server.cli.serve import prepare
from kvhearth_server.config.load import Settings, load_settings

LINE_CHARS_MAX = 16 << 10
NAMES = sorted(Settings.model_fields)
pytestmark = pytest.mark.usefixtures("no_environment", "restored_logging")


@contextlib.contextmanager
def environment(variables: dict[str, str]) -> Iterator[None]:
    """Sets these variables in addition to the existing ones."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


# -- inputs ----------------------------------------------------------------------------------------

WORDS = """64MiB 1GiB 2TiB 4096 0 -1 1.5GiB 12bananas 1e999 30s 500ms 0.5 1d nan inf on off true
None ~ ~root ~nobody-x/y a=1:64MiB a=1,2:64MiB;b=3:64MiB a=:1 a=1: /mnt/kv=1GiB /=9TiB a=1GiB
/a==4GiB 127.0.0.1:0 [::1]:80 0.0.0.0:1 localhost:80 :80 ]:80 ::1:80 [::1%lo]:1 require s3fifo
json debug DEBUG"""
ODD_WORDS = (
    "",
    " ",
    "a b:80",
    "x" * 70 + ":80",
    "\u0665MiB",
    "64\u00a0MiB",
    "/" + "d" * 200,
    "9" * 50,
)
plausible = st.sampled_from([*WORDS.split(), *ODD_WORDS])
environment_texts = plausible | st.text(
    st.characters(codec="utf-8", exclude_characters="\0"), max_size=20
)
written = plausible | values | st.lists(plausible, max_size=3)
names = st.sampled_from(NAMES) | st.sampled_from(["memroy", "_env_file", "", "model_config"])
variables = st.dictionaries(
    st.sampled_from(["KVHEARTH_" + name.upper() for name in NAMES]), environment_texts, max_size=3
)
TOKENS = r"""&a *a { } [ ] !!int !!float !!timestamp !!binary !!bool !!set !!omap
!!python/name:os.system <<: ? : ' " # 2001-99-99 x 0o8 0b2 1:99 .inf = \ud800 \0 ~ -
memory: tenants: http:"""
LAYOUT = ("\n", "  ", "|\n", "---\n", "...\n", "%YAML 9.9\n", "\t", "\0", "\u2028", "9" * 5000)
pieces = st.sampled_from([*(f"{token} " for token in TOKENS.split()), *LAYOUT])


def dumped(found: dict[str, Any]) -> bytes:
    """Returns the settings as YAML; half surrogate pairs as escapes."""
    return yaml.safe_dump(found, allow_unicode=False).encode("utf-8", "surrogatepass")


BOMB = b"a: &a [1,1,1,1,1,1,1,1,1]\n" + b"".join(
    b"%c: &%c [%b]\n" % (98 + n, 98 + n, b",".join([b"*%c" % (97 + n)] * 9)) for n in range(20)
)
files = st.one_of(
    st.dictionaries(names, written, max_size=4).map(dumped),
    st.lists(pieces, max_size=12).map(lambda parts: "".join(parts).encode()),
    st.binary(max_size=60),
)


# -- properties ------------------------------------------------------------------------------------


def command(*words: str) -> tuple[int, str, str]:
    """Runs the command in this process: exit code, stdout and stderr."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = app.run(words)
    return code, out.getvalue(), err.getvalue()


def served(config: Path | None, given: dict[str, object]) -> Settings | None:
    """Returns the settings that ``serve`` would run with; None if it rejects them."""
    refusal = None
    with contextlib.redirect_stderr(io.StringIO()) as err:
        try:
            return prepare(config, given)
        except KVHearthError as error:
            refusal = error
    assert refusal.reason is Reason.CONFIG_INVALID
    one_clear_line(refusal.message)
    assert err.getvalue() == "", "nothing was begun"
    return None


def one_clear_line(text: str) -> None:
    """Checks that the text is readable and safe to print on a terminal."""
    assert text.isprintable(), text
    assert 0 < len(text) <= LINE_CHARS_MAX


def complaint(err: str) -> str:
    """Returns the last line on stderr, which must be the command's own."""
    last = err.splitlines()[-1]
    assert last.startswith("kvhearth: error: ")
    return last


def test_validate_says_what_serve_does(tmp_path: Path) -> None:
    path = tmp_path / "kvhearth.yaml"

    @settings(fuzz(30), suppress_health_check=list(HealthCheck))
    @given(files, variables)
    @example(BOMB + b"memory: *u", {})
    @example(b"allow_uids: [" + b"9" * 5000 + b"]", {})
    @example(b"\n" * (2 << 20), {})
    def check(data: bytes, environ: dict[str, str]) -> None:
        path.write_bytes(data)
        with environment(environ):
            code, out, err = command("config", "show", "--config", str(path), "--json")
            settings = served(path, {})
        assert code == (2 if settings is None else 0)
        if settings is None:
            one_clear_line(complaint(err))
        else:
            assert json.loads(out).keys() == Settings.model_fields.keys()
            path.write_text(settings_yaml(settings))
            assert load_settings({}, path) == settings, "shown, it can be read again"

    check()


EXTREMES: dict[str, dict[str, object]] = {
    "least": {
        "held_fraction_max": 1e-320,
        "stock_fraction_max": 1e-320,
        "keys_max": 1,
        "message_bytes_max": "64KiB",
        "sessions_max": 1,
        "namespaces_max": 1,
        "leases_max": 1,
        "pins_max": 1,
        "attach_timeout_s": "1ms",
        "drain_timeout_s": 0,
        "drain_grace_s": 0,
        "switch_interval_s": "0.0000000001",
        "sum_threads": 1,
        "http": "127.0.0.1:0",
    },
    "most": {
        "held_fraction_max": 1 - 2**-53,
        "stock_fraction_max": 0.3,
        "keys_max": 1 << 20,
        "message_bytes_max": "1GiB",
        "namespaces_max": 1 << 20,
        "leases_max": 1 << 20,
        "pins_max": 65535,
        "attach_timeout_s": "9" * 300,
        "drain_timeout_s": "9" * 300,
        "drain_grace_s": "9" * 300,
        "switch_interval_s": "0.1",
        "sum_threads": 64,
        "log_format": "console",
    },
    "an address that the machine lacks": {"http": "[::1%1]:0"},
    "more sessions than descriptors": {"sessions_max": 65536},
}


@pytest.mark.realtime("live daemons")
def test_valid_settings_start_or_say_why_not() -> None:
    for name, chosen in EXTREMES.items():
        with stopped_daemon(arena=False, **chosen) as daemon:
            assert served(None, dict(daemon.settings)) is not None, name
            daemon.launch()
            until(lambda: daemon.dead or ready(daemon), "it starts", HUNG_S)
            if daemon.dead:
                assert name not in ("least", "most"), daemon.log_tail()
                assert daemon.exit_code == 1, daemon.log_tail()
                assert complaint(daemon.log_text())
            else:
                assert daemon.terminate() == 0, name
            assert "Traceback" not in daemon.log_text(), daemon.log_tail()


def ready(daemon: Daemon) -> bool:
    """Whether the daemon reports that it is ready."""
    return any("attach=" in line or '"attach"' in line for line in daemon.log_text().splitlines())
