"""The image without a container engine: built by the Dockerfile's stages, run unprivileged."""

from __future__ import annotations

import json
import os
import runpy
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.cached import cached_engine
from support.daemon import directories, until
from support.raw_door import new_keys
from support.rootfs import OVERFLOW_UID, ROOTFS, Jail, build_root, jail

from kvhearth import native
from kvhearth_server.tiers.remote.names import MARK_NAME

ROOT = Path(__file__).resolve().parents[2]
HADOLINT = ROOT / ".venv-tools/bin/hadolint"
INSTALLED_BYTES_MAX = 200_000_000
WITH_REMOTES_BYTES_MAX = 270_000_000
BLOCKS = 16
_IMPORT_ALL = """
import importlib, pkgutil, pwd, os, ssl, kvhearth, kvhearth_server
for package in (kvhearth, kvhearth_server):
    for found in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if found.name == "kvhearth.native._kvhearth":
            continue  # loaded by ctypes: a library, and no module
        try:
            importlib.import_module(found.name)
        except ModuleNotFoundError as error:
            # Engines' and extras' packages: the image has neither.
            if error.name not in (
                *("torch", "triton", "vllm", "sglang", "lmcache", "matplotlib"),
                *("cryptography", "obstore", "glide_sync", "glide_shared", "mooncake"),
            ):
                raise
print(pwd.getpwuid(os.getuid()).pw_name, os.getgid(), kvhearth.native.available())
"""
URL_OPTIONS = "call_ms=4000&lookup_ms=4000&heartbeat_ms=200"


_SCRIPT = runpy.run_path(str(ROOTFS))


# -- the Dockerfile --------------------------------------------------------------------------------


def test_hadolint_has_nothing_to_say() -> None:
    if not HADOLINT.exists():
        pytest.skip("hadolint is not there: run `make tools`")
    written = [ROOT / "Dockerfile", ROOT / "deploy/engine.Dockerfile"]
    done = subprocess.run([HADOLINT, *written], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_the_dockerfile_is_what_the_script_follows() -> None:
    builder, final = _SCRIPT["stages_of"]((ROOT / "Dockerfile").read_text())
    assert [run.text for run in builder.each("RUN")] == [
        "./deploy/docker/install.sh /src /image"
    ], "put it into install.sh, which both run"
    assert final.each("RUN") == []
    assert final.words("USER") == ["65532:65532"]
    assert final.words("HEALTHCHECK") == ["kvhearth", "health"]
    assert (final.words("ENTRYPOINT"), final.words("CMD")) == (["kvhearth"], ["serve"])
    assert (final.base, final.words("SHELL")) == ("scratch", []), "nothing below what is tested"
    targets = {copy.words[1]: copy.options.get("chown") for copy in final.each("COPY")}
    writable = [target for target, owner in targets.items() if owner]
    assert writable == ["/run/kvhearth", "/arena"]


def test_all_that_is_copied_is_sent_to_the_engine() -> None:
    """A copied file that .dockerignore excludes would fail only in a container engine."""
    builder, _ = _SCRIPT["stages_of"]((ROOT / "Dockerfile").read_text())
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    sent = {line[1:] for line in lines if line.startswith("!")}
    copied = {Path(n).as_posix() for one in builder.each("COPY") for n in one.words[:-1]}
    assert copied == sent
    assert all((ROOT / name).exists() for name in sent)


def test_only_known_extras_are_installed(tmp_path: Path) -> None:
    words = [ROOT / "deploy/docker/install.sh", ROOT, tmp_path / "image", sys.executable]
    environment = {**os.environ, "EXTRAS": "server,rdma"}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (
        1,
        "EXTRAS: rdma is unknown; write server or server,remote\n",
    )
    assert not (tmp_path / "image").exists()


# -- the built image -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def root() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="kvh-root-"))
    folder.chmod(0o755)
    try:
        yield build_root(folder / "root")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def jailed(root: Path) -> Iterator[Jail]:
    with directories() as (folder, arena):
        assert arena is not None
        with jail(root, folder, arena) as made:
            yield made


@pytest.mark.slow
def test_size_and_what_is_not_there(root: Path) -> None:
    size = _SCRIPT["size_bytes"](root)
    print(f"installed: {size / 1e6:.0f} MB")
    assert size <= INSTALLED_BYTES_MAX
    names = {path.name.lower() for path in root.rglob("*")}
    absent = {"torch", "triton", "cupy", "pip", "setuptools", "ensurepip", "hatchling", "pytest"}
    assert not absent & names
    assert {path.name for path in (root / "usr/local/bin").iterdir()} == {
        "python3",
        f"python{sys.version_info.major}.{sys.version_info.minor}",
    }
    assert [name for name in names if name.startswith(("libcuda", "libcudart", "nvidia"))] == []
    assert not (root / "bin").exists(), "no shell"


@pytest.mark.slow
def test_every_verb_and_module_is_there(jailed: Jail) -> None:
    """Modules missing from the trimmed standard library show up here, not in a user's container."""
    done = jailed.run("kvhearth", "doctor", "--json", "--memory", "64MiB")
    assert "Traceback" not in done.stderr
    assert "ssd_interface" in {one["check"] for one in json.loads(done.stdout)["findings"]}
    for words in ("--help", "config show --json", "top --once"):
        done = jailed.run("kvhearth", *words.split())
        assert "Traceback" not in done.stderr, done.stderr
    for words in ("bench local --quick", "torture --help"):
        done = jailed.run("kvhearth", *words.split())
        assert (done.returncode, done.stdout) == (2, "")
        assert "pip install 'kvhearth[lab]'" in done.stderr
    done = jailed.run("python3", "-c", _IMPORT_ALL)
    # The compiler that built this machine's module built the image's, too.
    assert done.returncode == 0, done.stderr
    user, group, problem = done.stdout.strip().split(maxsplit=2)
    assert (user, group) == ("kvhearth", "65532")
    assert "Traceback" not in done.stderr, done.stderr
    assert (problem == "None") == (native.available() is None), problem


@pytest.mark.slow
def test_store_kill_adopt_from_outside(jailed: Jail) -> None:
    flags = ["--memory", "64MiB", "--slab-bytes", "2MiB", "--hugepages", "off", "--http", "off"]
    flags += ["--arena-dir", "/arena", "--log-format", "json", "--drain-grace-s", "0.2"]
    if os.geteuid() == 0:
        # Root is not mapped into the daemon's user namespace, so it appears as the overflow id.
        flags += ["--allow-uids", str(OVERFLOW_UID)]
    jailed.start(*flags)
    _unprivileged(jailed)
    health = jailed.run("kvhearth", "health")
    assert (health.returncode, health.stdout.strip()) == (0, "serving"), health.stderr

    keys = new_keys(BLOCKS)
    with cached_engine(f"kvhearth+unix://{jailed.sockets}?{URL_OPTIONS}") as engine:
        assert engine.store(keys).stored == BLOCKS
        assert engine.load(keys).usable_blocks == BLOCKS
        jailed.kill()
        jailed.start(*flags)
        until(lambda: engine.load(keys).usable_blocks == BLOCKS, "every block comes back")
    assert '"adopted_blocks": 16' in jailed.log().replace('":16', '": 16')


@pytest.mark.slow
def test_an_image_with_remotes_serves_one() -> None:
    folder = Path(tempfile.mkdtemp(prefix="kvh-root-"))
    folder.chmod(0o755)
    try:
        root = build_root(folder / "root", "server,remote")
        size = _SCRIPT["size_bytes"](root)
        print(f"installed: {size / 1e6:.0f} MB")
        assert size <= WITH_REMOTES_BYTES_MAX
        with directories() as (sockets, arena):
            assert arena is not None
            with jail(root, sockets, arena) as jailed:
                done = jailed.run("python3", "-c", "import glide_sync, obstore")
                assert done.returncode == 0, done.stderr
                key = "/run/kvhearth/fleet.key"
                done = jailed.run("kvhearth", "remote", "init-key", key)
                assert done.returncode == 0, done.stderr
                flags = ["--memory", "64MiB", "--slab-bytes", "2MiB", "--hugepages", "off"]
                flags += ["--remote", "file:///arena", "--remote-staging", "8MiB"]
                if os.geteuid() == 0:
                    flags += ["--allow-uids", str(OVERFLOW_UID)]
                jailed.start(*flags, "--remote-fleet-key-file", key, "--http", "off")
                marked = arena / MARK_NAME
                until(marked.exists, "the helper has probed the remote")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _unprivileged(jailed: Jail) -> None:
    """No capabilities, its own pid, mount and user namespace, nothing writable."""
    pid = jailed.daemon_pid
    assert Path(f"/proc/{pid}").stat().st_uid != 0
    for space in ("mnt", "pid", "user"):
        assert os.readlink(f"/proc/{pid}/ns/{space}") != os.readlink(f"/proc/self/ns/{space}")
    mounts = Path(f"/proc/{pid}/mountinfo").read_text().splitlines()
    options = {line.split()[4]: line.split()[5].split(",") for line in mounts}
    assert "ro" in options["/"]
    places = {place for place in options if place.startswith(("/run", "/arena"))}
    assert places == {"/run/kvhearth", "/arena"}
    probe = "import os; print(os.getuid(), os.access('/opt', os.W_OK))"
    done = jailed.run("python3", "-c", probe)
    assert done.stdout.split() == ["65532", "False"], done.stderr
