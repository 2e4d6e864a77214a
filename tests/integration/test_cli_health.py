"""``kvhearth health``: its imports, and its verdicts on daemons of all kinds."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.entry_point import kvhearth

from kvhearth import url
from kvhearth.wire import handshake as wire
from kvhearth_server.cli import app, liveness
from kvhearth_server.config import load as config
from kvhearth_server.config.load import Settings

HEAVY = ("typer", "click", "rich", "grpc", "google", "numpy", "pydantic", "yaml", "structlog")
HEAVY += ("dataclasses", "kvhearth")
Run = Callable[..., tuple[int, str, str]]


pytestmark = pytest.mark.usefixtures("no_environment")


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs the verb in this process: its exit code, stdout and stderr."""

    def call(*words: str) -> tuple[int, str, str]:
        code = app.run(["health", *words])
        return code, *capsys.readouterr()

    return call


@contextlib.contextmanager
def answering(folder: Path, frame: bytes | None, *, keep: bool = False) -> Iterator[None]:
    """A daemon whose attach socket sends ``frame`` to each peer and then closes the connection, or
    leaves it open with ``keep``; with None it sends nothing.
    """
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(str(folder / "attach.sock"))
        door.listen()
        callers = []

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    caller, _ = door.accept()
                    callers.append(caller)
                    caller.recv(100)
                    caller.sendall(frame or b"")
                    if not keep:
                        caller.close()

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield
        finally:
            door.shutdown(socket.SHUT_RDWR)
            thread.join()
            for each in callers:
                each.close()


def health_frame(**fields: object) -> bytes:
    return wire.encode_frame({"kind": "health", "serving": True, "degraded": [], **fields})


MODULES = "import atexit; atexit.register(lambda: print(*sys.modules, sep='\\n', file=sys.stderr))"
"""Statements before a command that finally prints the names of all loaded modules."""
NOBODY = """
import os, grp, pwd, json, typer.rich_utils
from kvhearth_server.cli import app, liveness
app.build()  # the interpreter may be readable by root only
if os.geteuid() == 0:
    os.setgroups([]); os.setgid(65534); os.setuid(65534)
"""
"""Statements before a command of a user that owns nothing."""


def test_it_knows_the_names_that_the_rest_has() -> None:
    fields = Settings.model_fields
    assert str(fields["socket_dir"].default) == liveness.SOCKET_DIR
    assert liveness.SOCKET_DIR_ENV == config.ENV_PREFIX + "SOCKET_DIR"
    assert (liveness.CONFIG_ENV, liveness.ATTACH_SOCKET) == (config.CONFIG_ENV, url.ATTACH_SOCKET)
    assert json.loads(liveness.QUESTION) == wire.HEALTH_QUESTION


@pytest.mark.parametrize("served", [True, False])
@pytest.mark.parametrize("form", [[], ["--json"]], ids=["text", "json"])
def test_nothing_heavy_is_imported(tmp_path: Path, form: list[str], served: bool) -> None:
    with answering(tmp_path, health_frame()) if served else contextlib.nullcontext():
        done = kvhearth("health", "--socket-dir", str(tmp_path), *form, prelude=MODULES)
    assert done.returncode == (0 if served else 1)
    modules = done.stderr.splitlines()
    assert "kvhearth_server.cli.liveness" in modules
    assert [name for name in modules if name.partition(".")[0] in HEAVY] == []


def test_a_degraded_tier_is_a_warning(run: Run, tmp_path: Path) -> None:
    with answering(tmp_path, health_frame(degraded=["/mnt/a: slow\x1b[2J"])):
        code, out, err = run("--socket-dir", str(tmp_path))
        assert (code, out) == (0, "serving\n")
        assert err == "kvhearth: warning: the SSD tier is degraded: /mnt/a: slow?[2J\n"
        assert json.loads(run("--socket-dir", str(tmp_path), "--json")[1])["degraded"]


@pytest.mark.parametrize(
    ("frame", "reported"),
    [
        (health_frame(serving=False), "the daemon drains: it takes no stores"),
        (wire.encode_frame({"kind": "refused", "message": "no places"}), "refuses: no places"),
        (b"", "is no KVHearth daemon"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "is no KVHearth daemon"),
        (b"\xff\xff\xff\xff" + bytes(100_000), "is no KVHearth daemon"),
        (b"\x02\x00\x00\x00[]", "is no KVHearth daemon"),
        (b"\x02\x00\x00\x00{{", "is no KVHearth daemon"),
    ],
)
def test_a_daemon_that_does_not_serve(
    run: Run, tmp_path: Path, frame: bytes, reported: str
) -> None:
    with answering(tmp_path, frame):
        code, out, err = run("--socket-dir", str(tmp_path))
        assert (code, out, err.count("\n")) == (1, "", 1)
        assert err.startswith("kvhearth: error: ")
        assert reported in err
        found = json.loads(run("--socket-dir", str(tmp_path), "--json")[1])
        assert (found["serving"], found["problem"] in err) == (False, True)


@pytest.mark.parametrize("said", [None, b"\x07\x00", b"\x07\x00\x00\x00{"])
def test_a_daemon_that_hangs(tmp_path: Path, said: bytes | None) -> None:
    with answering(tmp_path, said, keep=True):
        problem, _, _ = liveness.look(str(tmp_path), answer_s=0.05)
    assert problem == f"the daemon at {tmp_path}/attach.sock does not answer within 0.05 s"


def test_a_daemon_that_accepts_nobody(run: Run, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as door, contextlib.ExitStack() as queue:
        door.bind(str(tmp_path / "attach.sock"))
        door.listen(0)
        with contextlib.suppress(BlockingIOError):
            while True:
                line = queue.enter_context(socket.socket(socket.AF_UNIX))
                line.setblocking(False)
                line.connect(str(tmp_path / "attach.sock"))
        code, _, err = run("--socket-dir", str(tmp_path))
    assert code == 1
    assert "does not answer" in err


def test_the_directory_is_found(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "at /run/kvhearth/attach.sock" in run()[2] or Path("/run/kvhearth").exists()
    path = tmp_path / "kvhearth.yaml"
    path.write_text(f"memory: 1GiB\nsocket_dir: {tmp_path}/y\n")
    monkeypatch.setenv("KVHEARTH_CONFIG", str(path))
    assert f"at {tmp_path}/y/attach.sock" in run()[2]
    path.write_text(f"socket_dir: '{tmp_path}/quoted'  # for the whole parser\n")
    assert f"at {tmp_path}/quoted/attach.sock" in run()[2]
    monkeypatch.setenv("KVHEARTH_SOCKET_DIR", str(tmp_path / "e"))
    assert f"at {tmp_path}/e/attach.sock" in run()[2]
    assert f"at {tmp_path}/f/attach.sock" in run("--socket-dir", str(tmp_path / "f"))[2]


def test_a_plain_settings_file_needs_no_parser(tmp_path: Path) -> None:
    path = tmp_path / "kvhearth.yaml"
    path.write_text(f"socket_dir: {tmp_path}\n")
    with answering(tmp_path, health_frame()):
        done = kvhearth("health", prelude=MODULES, KVHEARTH_CONFIG=str(path))
    assert (done.returncode, done.stdout) == (0, "serving\n")
    assert "yaml" not in done.stderr.splitlines()


@pytest.mark.parametrize(
    "words", [["--wait"], ["--wait", "x"], ["--wait", "-1"], ["--nothing"], ["more"]]
)
def test_wrong_usage_is_2(run: Run, words: list[str]) -> None:
    assert run(*words)[0] == 2


def test_a_user_who_may_not_read_the_directory(tmp_path: Path) -> None:
    folder = Path("/tmp") / f"kvh-denied-{os.getpid()}"
    folder.mkdir(0o700 if os.geteuid() == 0 else 0)
    try:
        for verb, name in (("health", "attach.sock"), ("stat", "admin.sock")):
            done = kvhearth(verb, "--socket-dir", str(folder / "s"), prelude=NOBODY)
            owner = folder.stat()
            mode = f"{stat.S_IMODE(owner.st_mode):04o}"
            assert (done.returncode, done.stdout) == (1, "")
            assert done.stderr.count("\n") == 1, done.stderr
            assert f"may not use {folder}/s/{name}: {folder} belongs to " in done.stderr
            assert f"with mode {mode}; " in done.stderr
    finally:
        folder.chmod(0o700)
        folder.rmdir()


def test_a_user_who_may_not_use_the_socket(tmp_path: Path) -> None:
    folder = Path("/tmp") / f"kvh-denied-{os.getpid()}"
    folder.mkdir(0o755)
    path = folder / "admin.sock"
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(str(path))
        path.chmod(0o010 if os.geteuid() == 0 else 0)
        try:
            done = kvhearth("stat", "--socket-dir", str(folder), prelude=NOBODY)
        finally:
            path.unlink()
            folder.rmdir()
    assert done.returncode == 1
    assert f"may not use {path}: {path} belongs to " in done.stderr
