"""KVHearth's main job on real KV, in one command: ``make run``.

A transformer answers a long text and stores its KV in KVHearth. Then the engine and the daemon are
killed, both start again, and the same text is answered from the KV that outlived them. Finally one
block in the arena is damaged on purpose: it must be caught, and the answer must not change.

This process only starts, watches and ends the others; it needs neither torch nor the client.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import mmap
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import numpy as np
import report
from rich.console import Console

HERE = Path(__file__).resolve().parent
ENGINE_TIMEOUT_S = 240.0
DAEMON_TIMEOUT_S = 60.0
END_TIMEOUT_S = 10.0
POLL_S = 0.02
ANSWER_TOKENS = 16
DAMAGED_BYTES = 64
SLAB_BYTES = 64 << 20
MEMORY_BYTES_MIN = 256 << 20
HUGEPAGE_BYTES = 2 << 20
FREE_HUGEPAGES = Path("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages")
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)

SIZES = {
    "layers": 16,
    "hidden": 768,
    "heads": 12,
    "kv_heads": 4,
    "head_dim": 64,
    "intermediate": 2048,
    "vocab": 4096,
    "init_std": 0.06,
    "block_tokens": 64,
    "chunk_tokens": 512,
}
"""Geometry of the transformer and its pages (``model.Sizes``): 107 M parameters, 2 MiB blocks."""
TOKENS = 4096 + 37
QUICK_SIZES = SIZES | {
    "layers": 4,
    "hidden": 256,
    "heads": 4,
    "intermediate": 512,
    "vocab": 1024,
    "chunk_tokens": 128,
}
QUICK_TOKENS = 512 + 21


class DemoError(Exception):
    """Raised when the demo cannot continue; the text is a sentence for a person."""


def parse_args() -> argparse.Namespace:
    """Parse the options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="tiny model, short text: seconds")
    parser.add_argument("--json", action="store_true", help="a JSON object as the last line")
    parser.add_argument("--tokens", type=int, help=f"of the prompt (default {TOKENS})")
    parser.add_argument("--layers", type=int, help="of the transformer")
    parser.add_argument("--memory", help="of the daemon, such as 2GiB (default: by the prompt)")
    parser.add_argument("--arena-dir", type=Path, help="on hugetlbfs or tmpfs (default: chosen)")
    parser.add_argument("--keep", action="store_true", help="keep logs and results")
    args = parser.parse_args()
    if args.arena_dir and not (args.arena_dir.is_dir() and os.access(args.arena_dir, os.W_OK)):
        parser.error(f"--arena-dir: {args.arena_dir} is no directory that this user may write to")
    args.tokens = args.tokens or (QUICK_TOKENS if args.quick else TOKENS)
    args.sizes = dict(QUICK_SIZES if args.quick else SIZES)
    if args.layers:
        args.sizes["layers"] = args.layers
    if args.tokens < 4 * args.sizes["block_tokens"]:
        parser.error(f"--tokens: at least {4 * args.sizes['block_tokens']}, four blocks")
    return args


def _die_with_parent() -> None:
    """Tie a child's life to run.py's, before exec: even if run.py is killed, no child survives."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class Children:
    """The processes of the demo, each ended by its own pid."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._running: list[subprocess.Popen[bytes]] = []

    def start(self, args: list[str], log_name: str = "") -> subprocess.Popen[bytes]:
        """Start ``python args``; output goes to a log file in the directory, or to our own."""
        environment = os.environ | {
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_VERBOSITY": "error",
            "TOKENIZERS_PARALLELISM": "false",
            "OMP_NUM_THREADS": "2",
            # Threads that spin at barriers make prefill five times slower on a busy machine.
            "OMP_WAIT_POLICY": "PASSIVE",
        }
        with contextlib.ExitStack() as files:
            log = None
            if log_name:
                log = files.enter_context((self._directory / log_name).open("ab"))
            child = subprocess.Popen(
                [sys.executable, *args],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=environment,
                preexec_fn=_die_with_parent,  # noqa: PLW1509 - this process has one thread
            )
        self._running.append(child)
        return child

    def kill(self, child: subprocess.Popen[bytes]) -> None:
        """Send SIGKILL: no handler runs, nothing is flushed, no goodbye is sent."""
        child.kill()
        child.wait(END_TIMEOUT_S)
        if child.stdin is not None:
            child.stdin.close()
        self._running.remove(child)

    def kill_all(self) -> None:
        """Kill the processes that still run."""
        for child in list(self._running):
            self.kill(child)


class Demo:
    """The steps, in the order in which ``main`` takes them."""

    def __init__(self, args: argparse.Namespace, directory: Path, arena_dir: Path) -> None:
        self._args = args
        self._directory = directory
        self._arena_dir = arena_dir
        self._sockets = directory / "s"
        self._sockets.mkdir(mode=0o700)
        self._memory = args.memory or str(memory_bytes(args))
        self._daemons = 0
        self.children = Children(directory)
        plan = {
            "url": f"kvhearth+unix://{self._sockets}",
            "sizes": args.sizes,
            "tokens": args.tokens,
            "answer_tokens": ANSWER_TOKENS,
        }
        (directory / "plan.json").write_text(json.dumps(plan), encoding="utf-8")

    def start_daemon(self) -> subprocess.Popen[bytes]:
        """Start the daemon and wait until it takes connections."""
        self._daemons += 1
        log_name = f"daemon-{self._daemons}.log"
        arguments = [
            *("-m", "kvhearth_server.cli.app", "serve"),
            *("--socket-dir", str(self._sockets)),
            *("--memory", self._memory),
            *("--http", "off"),
            *("--arena-dir", str(self._arena_dir)),
        ]
        started = time.monotonic()
        daemon = self.children.start(arguments, log_name)
        # Not attach.sock: a connection there without a hello makes the daemon log a warning.
        socket_path = str(self._sockets / "admin.sock")
        while not _accepts(socket_path):
            if daemon.poll() is not None:
                self._give_up(f"the daemon ended with code {daemon.returncode}", log_name)
            if time.monotonic() - started > DAEMON_TIMEOUT_S:
                self._give_up(f"the daemon took no connection in {DAEMON_TIMEOUT_S:g} s", log_name)
            time.sleep(POLL_S)
        took_s = time.monotonic() - started
        say(f"  [daemon {self._daemons}] pid {daemon.pid}, takes connections after {took_s:.1f} s")
        return daemon

    def run_engine(self, name: str) -> tuple[report.Run, subprocess.Popen[bytes]]:
        """Start an engine and wait for its answer; it still runs when this returns."""
        started = time.monotonic()
        engine = self.children.start([str(HERE / "engine.py"), name, str(self._directory)])
        result = self._directory / f"{name}.json"
        while not result.exists():
            if engine.poll() is not None:
                raise DemoError(f"the {name} engine ended with code {engine.returncode}: see above")
            if time.monotonic() - started > ENGINE_TIMEOUT_S:
                raise DemoError(f"the {name} engine did not answer within {ENGINE_TIMEOUT_S:g} s")
            time.sleep(POLL_S)
        logits = np.load(self._directory / f"{name}.npy")
        return report.Run(json.loads(result.read_text(encoding="utf-8")), logits), engine

    def damage(self, extent: dict[str, int]) -> None:
        """Flip bytes in the middle of one block, in the arena's file, unknown to the daemon."""
        path = segment_file(self._arena_dir, extent["segment"])
        # Mapped, because files on hugetlbfs cannot be written.
        with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as arena:
            at = extent["offset"] + extent["length"] // 2
            part = slice(at, at + DAMAGED_BYTES)
            arena[part] = bytes(byte ^ 0xFF for byte in arena[part])

    def _give_up(self, problem: str, log_name: str) -> NoReturn:
        tail = (
            (self._directory / log_name)
            .read_text(errors="replace", encoding="utf-8")
            .splitlines()[-15:]
        )
        raise DemoError(f"{problem}; its last words:\n  " + "\n  ".join(tail))


def main() -> int:
    """Run the demo; return 0 if every claim holds."""
    args = parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that `finally` runs
    started = time.monotonic()
    with directories(args) as (directory, arena_dir):
        demo = Demo(args, directory, arena_dir)
        try:
            runs = story(demo, args)
        except DemoError as error:
            print(f"FAILED: {error}", file=sys.stderr)
            if args.json:
                print(json.dumps({"ok": False, "error": str(error)}))
            return 1
        except KeyboardInterrupt:
            return 130
        finally:
            demo.children.kill_all()
    found = report.checks(*runs, args.sizes["block_tokens"], timed=not args.quick)
    width = None if sys.stdout.isatty() else 130
    Console(width=width).print(report.render(list(runs), found))
    total_s = time.monotonic() - started
    failed = [check for check in found if not check.ok]
    if failed:
        print(
            f"FAILED: {len(failed)} of {len(found)} checks: {failed[0].claim} ({failed[0].detail})"
        )
    else:
        print(f"OK: {len(found)} checks hold; the whole demo took {total_s:.0f} s")
    if args.json:
        print(json.dumps(report.as_json(list(runs), found, total_s)))
    return 1 if failed else 0


def story(demo: Demo, args: argparse.Namespace) -> tuple[report.Run, report.Run, report.Run]:
    """Run the three lives of the engine: cold, warm, corrupted."""
    say("1. a daemon with an empty cache, and an engine that computes all of the prompt")
    daemon = demo.start_daemon()
    cold, engine = demo.run_engine("cold")

    say("2. kill -9 of the engine, then of the daemon; the daemon starts again on the same arena")
    demo.children.kill(engine)
    demo.children.kill(daemon)
    demo.start_daemon()

    say("3. a new engine process, the same prompt")
    warm, engine = demo.run_engine("warm")
    demo.children.kill(engine)
    extent = warm.report["middle_extent"]
    if extent is None:
        found, why = warm.report["hit_tokens"], warm.report["load"]["miss_reason"]
        raise DemoError(
            f"the warm engine found {found} of {args.tokens} tokens, so there is no block in the "
            f"middle to damage ({why or 'no reason given'})"
        )

    block = warm.report["middle_block"]
    say(f"4. {DAMAGED_BYTES} bytes of block {block} are flipped in the arena; one more new engine")
    demo.damage(extent)
    corrupt, engine = demo.run_engine("corrupt")
    demo.children.kill(engine)
    return cold, warm, corrupt


def say(text: str) -> None:
    """Print one line of progress."""
    print(text, flush=True)


@contextlib.contextmanager
def directories(args: argparse.Namespace) -> Iterator[tuple[Path, Path]]:
    """Make directories for sockets, logs and results, and for the arena; remove them at the end."""
    directory = Path(tempfile.mkdtemp(prefix="kvhearth-demo-"))
    parent, kind = arena_parent(args)
    arena_dir = Path(tempfile.mkdtemp(prefix="kvhearth-demo-", dir=parent))
    say(f"arena: {arena_dir} ({kind})")
    try:
        yield directory, arena_dir
    finally:
        shutil.rmtree(arena_dir, ignore_errors=True)
        if args.keep:
            say(f"kept: {directory}")
        else:
            shutil.rmtree(directory, ignore_errors=True)


def arena_parent(args: argparse.Namespace) -> tuple[Path, str]:
    """Choose the arena's file system: hugetlbfs with room, else tmpfs, else a plain directory."""
    if args.arena_dir is not None:
        return args.arena_dir, "as asked for"
    needed = memory_bytes(args) + SLAB_BYTES  # journal and catalogue lie there too
    for line in Path("/proc/mounts").read_text(encoding="utf-8").splitlines():
        _, mount, kind, *_ = line.split()
        if kind != "hugetlbfs" or not os.access(mount, os.W_OK):
            continue
        room = os.statvfs(mount)
        if room.f_bsize != HUGEPAGE_BYTES:
            continue
        pages = int(FREE_HUGEPAGES.read_text(encoding="utf-8"))
        if room.f_blocks:  # 0 without a size= option: all free pages are then its room
            pages = min(pages, room.f_bavail)
        if pages * HUGEPAGE_BYTES >= needed:
            return Path(mount), "hugetlbfs, 2 MiB pages"
    shared = Path("/dev/shm")
    if os.access(shared, os.W_OK):
        room = os.statvfs(shared)
        if room.f_bavail * room.f_bsize >= needed:
            return shared, "tmpfs, 4 KiB pages: no hugetlbfs with room is mounted"
    return Path(tempfile.gettempdir()), "a plain directory: neither hugetlbfs nor /dev/shm has room"


def memory_bytes(args: argparse.Namespace) -> int:
    """Return four times the prompt's KV, in whole slabs: a request never fills the cache."""
    sizes = args.sizes
    token_bytes = sizes["layers"] * 2 * sizes["kv_heads"] * sizes["head_dim"] * 4
    slabs = -(-4 * args.tokens * token_bytes // SLAB_BYTES)
    return max(MEMORY_BYTES_MIN, slabs * SLAB_BYTES)


def segment_file(arena_dir: Path, segment: int) -> Path:
    """Return the path of a segment's file in the arena's directory."""
    return arena_dir / f"segment-{segment}"


def _accepts(path: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except OSError:
            return False
    return True


if __name__ == "__main__":
    sys.exit(main())
