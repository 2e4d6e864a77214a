"""LMCache's own daemon with KVHearth as its second level: kills, flipped bytes, identities."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engines.harness import LMCACHE, ROOT
from support.daemon import Daemon, free_port, running_daemon, until
from support.tiers import flip_stored

from kvhearth_lab.harness import HUNG_S
from kvhearth_lab.harness.daemon import clean_environment

PYTHON = LMCACHE / "bin" / "python"
CHUNKS = 8
"""Chunks of a prompt, see ``lmcache_engine``."""
WIDTH = 1024
CHUNK_BYTES = 16 * WIDTH * 2
ENVIRONMENT = {
    **clean_environment(),
    "LMCACHE_TRACK_USAGE": "false",
    "DO_NOT_TRACK": "1",
    "LMCACHE_LOG_LEVEL": "WARNING",
}
MEMORY = {"memory": "64MiB"}
SHAPE = {"model": "org/model", "dtype": "bfloat16", "width": WIDTH}


def adapter(url: str, **params: str) -> str:
    """Return LMCache's flag, as docs/engines.md tells it."""
    known = {"url": url, "revision": "r1", **params}
    return json.dumps(
        {
            "type": "plugin",
            "module_path": "kvhearth.connectors.lmcache",
            "class_name": "KVHearthL2Adapter",
            "adapter_params": {name: text for name, text in known.items() if text},
        }
    )


class Lmcache:
    """LMCache's daemon and one engine of it."""

    def __init__(self, folder: Path) -> None:
        self._log_path = folder / "lmcache.log"
        self._log = self._log_path.open("ab")
        self._server: subprocess.Popen[bytes] | None = None
        self.port = free_port()
        words = [str(PYTHON), str(Path(__file__).with_name("lmcache_engine.py"))]
        self._engine = subprocess.Popen(
            words,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=ENVIRONMENT,
            text=True,
        )

    def start(self, flag: str, **shape: Any) -> None:
        """Start the daemon and register the engine."""
        self.port, http = free_port(), free_port()
        words = [str(PYTHON), "-m", "lmcache.cli.main", "server", "--host", "127.0.0.1"]
        words += ["--port", str(self.port), "--http-port", str(http), "--http-host", "127.0.0.1"]
        words += ["--shm-name", "", "--chunk-size", "16", "--eviction-policy", "LRU"]
        words += ["--l1-size-gb", "0.0625", "--supported-transfer-mode", "engine_driven"]
        words += ["--disable-observability", "--l2-adapter", flag]
        self._server = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log, env=ENVIRONMENT
        )
        self.ask("connect", port=self.port, **{**SHAPE, **shape})

    def ask(self, op: str, **given: Any) -> Any:
        """Return the engine's answer."""
        stdin, stdout = self._engine.stdin, self._engine.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(json.dumps({"op": op, **given}) + "\n")
        stdin.flush()
        line = stdout.readline()
        assert line, f"the engine ended\n{self.log()}"
        return json.loads(line)

    def kill(self) -> None:
        """Kill the daemon."""
        if self._server is not None:
            self._server.kill()
            self._server.wait(HUNG_S)

    def log(self) -> str:
        """Return the end of both logs."""
        return self._log_path.read_text(errors="replace")[-6000:]

    def close(self) -> None:
        """End both processes."""
        self.kill()
        for pipe in (self._engine.stdin, self._engine.stdout):
            assert pipe is not None
            pipe.close()
        self._engine.kill()
        self._engine.wait(HUNG_S)
        self._log.close()


@pytest.fixture
def lmcache(tmp_path: Path) -> Iterator[Lmcache]:
    made = Lmcache(tmp_path)
    try:
        yield made
    except BaseException:
        print(made.log())
        raise
    finally:
        made.close()


def blocks_of(daemon: Daemon) -> int:
    """Return the number of blocks that the daemon can serve."""
    return int(daemon.stats(check_books=False).blocks)


def wait_kept(daemon: Daemon, count: int) -> None:
    """Wait until the daemon has so many blocks."""
    until(lambda: blocks_of(daemon) >= count, f"{count} blocks are kept")


def test_a_prompt_outlives_both_daemons(lmcache: Lmcache) -> None:
    with running_daemon(**MEMORY) as daemon:
        lmcache.start(adapter(daemon.url()))
        assert lmcache.ask("store", seed=1)
        wait_kept(daemon, CHUNKS)
        lmcache.kill()
        lmcache.start(adapter(daemon.url()))
        assert lmcache.ask("load", seed=1) == [CHUNKS, CHUNKS]
        assert lmcache.ask("load", seed=2) == [0, 0]

        lmcache.ask("clear")
        daemon.kill()
        assert lmcache.ask("load", seed=1) == [0, 0], "a miss without the daemon"
        assert lmcache.ask("store", seed=3)
        assert lmcache.ask("load", seed=3) == [CHUNKS, CHUNKS], "from LMCache's own memory"
        lmcache.ask("clear")
        daemon.start()
        until(lambda: lmcache.ask("load", seed=1) == [CHUNKS, CHUNKS], "it attaches")
        until(lambda: not daemon.stats().leases, "the locks are returned")


def test_flipped_bytes_on_ssd_are_a_miss(lmcache: Lmcache, tmp_path: Path) -> None:
    ssd = {"ssd_dirs": [f"{tmp_path}/ssd=256MiB"], "ssd_segment_bytes": "2MiB"}
    with running_daemon(arena=False, **MEMORY, **ssd) as daemon:
        lmcache.start(adapter(daemon.url()))
        assert lmcache.ask("store", seed=1)
        until(lambda: daemon.counters().get("demoted_blocks", 0) >= CHUNKS, "all are on SSD")
        daemon.kill()
        kv = np.random.default_rng(1).integers(0, 256, (CHUNKS, CHUNK_BYTES), np.uint8)
        flip_stored(tmp_path / "ssd", kv[5][7000:7064].tobytes())
        daemon.start()
        until(lambda: daemon.read_back, "the log is read back")
        lmcache.ask("clear")
        until(lambda: lmcache.ask("load", seed=1)[0] > 0, "it attaches")
        lmcache.ask("clear")
        assert lmcache.ask("load", seed=1) == [5, 5], "no more than what is in front of it"


def test_nobody_is_served_anothers_kv(lmcache: Lmcache, tmp_path: Path) -> None:
    """Of another layout, other weights, or weights without a name."""
    model = tmp_path / "model"
    model.mkdir()
    weights = model / "weights.bin"
    weights.write_bytes(b"first")
    local = {"model": str(model)}
    with running_daemon(**MEMORY) as daemon:
        flag = adapter(daemon.url(), revision="")
        lmcache.start(flag, **local)
        assert lmcache.ask("store", seed=1)
        wait_kept(daemon, CHUNKS)
        others = [{**local, "dtype": "float16"}, {**local, "width": WIDTH // 2}, SHAPE]
        for shape in others:
            lmcache.ask("clear")
            lmcache.ask("connect", port=lmcache.port, **{**SHAPE, **shape})
            assert lmcache.ask("load", seed=1) == [0, 0], shape
        lmcache.kill()

        lmcache.start(flag, **local)
        assert lmcache.ask("load", seed=1) == [CHUNKS, CHUNKS], "the files are the name"
        lmcache.kill()
        for content, given in ((b"later", ""), (b"first", "a name of their own")):
            weights.write_bytes(content)
            lmcache.start(adapter(daemon.url(), revision=given), **local)
            assert lmcache.ask("load", seed=1) == [0, 0], "other weights"
            lmcache.kill()


LOCKING = """
import json, os, sys
from kvhearth_lab.bench.fronts.lmcache import Pool, Side, keys_of

answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
jobs, keys = Pool(1 << 16, 4), keys_of("locked", 4)
side = Side(json.loads(sys.argv[1]), jobs.pool)
side.store(keys, jobs.sources)
side.adapter.submit_lookup_and_lock_task(keys, {0: jobs.layout})
for unlocked in (keys[:0], keys[2:], keys[:2]):
    side.adapter.submit_unlock(unlocked)
    print(len(unlocked), file=answers, flush=True)
    sys.stdin.readline()
side.adapter.close()
"""
"""Looks four objects up and returns their locks, a line of input for each step."""


def test_a_lookup_locks_until_all_of_it_is_unlocked() -> None:
    environment = {**ENVIRONMENT, "PYTHONPATH": str(ROOT / "lab")}
    with running_daemon(**MEMORY) as daemon:
        words = [str(PYTHON), "-c", LOCKING, adapter(daemon.url())]
        pipe = subprocess.PIPE
        with subprocess.Popen(words, stdin=pipe, stdout=pipe, text=True, env=environment) as child:
            assert child.stdin is not None
            assert child.stdout is not None
            for unlocked, leases in (("0", 1), ("2", 1), ("2", 0)):
                assert child.stdout.readline().strip() == unlocked
                until(
                    lambda leases=leases: daemon.stats().leases == leases,
                    f"{leases} leases",
                )
                child.stdin.write("\n")
                child.stdin.flush()
            assert child.wait(HUNG_S) == 0
        daemon.wait_quiet()


def test_lmcaches_benchmark_verifies() -> None:
    words = [str(PYTHON), "-m", "lmcache.cli.main", "bench", "l2", "--rounds", "2"]
    words += ["--num-keys", "16", "--data-size-kb", "64", "--no-skip-verify"]
    words += ["--lookup-max-hit-rate", "0.5"]
    with running_daemon(**MEMORY) as daemon:
        done = subprocess.run(
            [*words, "--l2-adapter", adapter(daemon.url())],
            capture_output=True,
            text=True,
            timeout=HUNG_S,
            check=False,
            env=ENVIRONMENT,
        )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert re.findall(r"Total success: +(\d+)", done.stdout) == ["32", "16", "32"]
    assert "data verified OK" in done.stdout
