"""Compares where bytes from the network enter the arena: a process of its own, or threads in the
daemon's process. Prints GB/s and a local client's lookups meanwhile, as JSON lines.

Both forms run the same code: a client of the daemon that maps the arena, and a thread for each
connection that receives into slots and checksums them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from kvhearth.contract import Contract, GroupKind, GroupSpec
from kvhearth.model import EXTENT_DTYPE, checksum_of
from kvhearth.proto.v1 import cache_pb2 as pb
from kvhearth.proto.v1 import types_pb2
from kvhearth.session.link import Link, open_link
from kvhearth.transports.base import LOOKUP, RESERVE
from kvhearth.url import parse_url
from kvhearth.wire.handshake import Hello

PAGE_BYTES = 2 << 20
BLOCKS = 8
WINDOW = 4
LOOKUP_KEYS = 64
PROBE_PAUSE_S = 0.001
HEADER = struct.Struct("<QQ")
SOCKET_BYTES = 4 << 20
NICE = int(os.environ.get("SPIKE_NICE", "0"))
"""Niceness of the threads that move bytes, and of the peers, which stand for other machines."""


def attached(folder: str, engine_id: str) -> Link:
    """Attach to the daemon and map its arena."""
    group = GroupSpec(GroupKind.FULL, 16, PAGE_BYTES)
    contract = Contract("spike", "1", "bfloat16", (group,))
    return open_link(
        parse_url(f"kvhearth+unix://{folder}?call_ms=20000"),
        Hello(1, engine_id, contract.to_json(), pid=os.getpid()),
    )


def receive(connection: socket.socket, slots: list[memoryview]) -> None:
    """Receive blocks into slots and checksum each, until the peer ends."""
    header = bytearray(HEADER.size)
    turn = 0
    _yield_to_others()
    with contextlib.suppress(OSError):
        while connection.recv_into(header, 0, socket.MSG_WAITALL) == HEADER.size:
            slot = slots[turn % len(slots)]
            turn += 1
            if connection.recv_into(slot, 0, socket.MSG_WAITALL) != len(slot):
                return
            checksum_of(slot)
            connection.sendall(b"k")


def _yield_to_others() -> None:
    """Lower this thread's priority, if asked for, below that of threads that decide."""
    if NICE:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)


def sink(folder: str, port_file: str, connections: int) -> None:
    """Accept ``connections`` at a time for ever, a thread each."""
    while not os.path.exists(f"{folder}/attach.sock"):
        time.sleep(0.05)
    link = attached(folder, "sink")
    request = pb.ReserveRequest(
        reservation_id=1 + secrets.randbits(60),
        epoch=link.welcome.epoch,
        groups=[types_pb2.GroupCount(group=0, count=connections * BLOCKS)],
    )
    reply = link.transport.call(RESERVE, request, 10.0)
    extents = np.frombuffer(reply.groups[0].extents, EXTENT_DTYPE)
    assert link.mapping is not None
    slots = []
    for each in extents:
        start = int(each["offset"])
        slots.append(link.mapping.view(int(each["segment"])).data[start:][:PAGE_BYTES])
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BYTES)
    Path(port_file).write_text(str(listener.getsockname()[1]))
    each_has = len(slots) // connections
    taken = 0
    while True:
        connection, _ = listener.accept()
        own = slots[taken % connections * each_has :][:each_has]
        taken += 1
        threading.Thread(target=receive, args=(connection, own), daemon=True).start()


def daemon(folder: str, port_file: str, connections: int, inside: bool) -> None:
    """Run the daemon, with the sink on threads beside its loop if ``inside``."""
    from kvhearth_server.cli.app import run

    if inside:
        threading.Thread(target=sink, args=(folder, port_file, connections), daemon=True).start()
    flags = ["--socket-dir", folder, "--memory", "1GiB", "--http", "off", "--log-level", "error"]
    sys.exit(run(["serve", *flags]))


def store(port: int, end: float, counts: list[int], own: int) -> None:
    """Send blocks with a window, and count the answered ones."""
    payload = os.urandom(PAGE_BYTES)
    answer = bytearray(1)
    under_way = 0
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BYTES)
        while time.monotonic() < end:
            connection.sendall(HEADER.pack(len(payload), 0))
            connection.sendall(payload)
            under_way += 1
            if under_way >= WINDOW:
                connection.recv_into(answer)
                counts[own] += 1


def load(port: int, connections: int, seconds: float) -> None:
    """Store on all connections; print GB/s."""
    os.nice(NICE)
    counts = [0] * connections
    end = time.monotonic() + seconds
    threads = [
        threading.Thread(target=store, args=(port, end, counts, own)) for own in range(connections)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(json.dumps({"gbs": round(sum(counts) * PAGE_BYTES / seconds / 1e9, 2)}))


def probe(folder: str, seconds: float) -> None:
    """Look up keys every millisecond; print the latencies."""
    link = attached(folder, "probe")
    keys = [types_pb2.GroupKeys(group=0, keys=secrets.token_bytes(32 * LOOKUP_KEYS))]
    request = pb.LookupRequest(epoch=link.welcome.epoch, groups=keys)
    took = []
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        start = time.perf_counter()
        link.transport.call(LOOKUP, request, 20.0)
        took.append(time.perf_counter() - start)
        time.sleep(PROBE_PAUSE_S)
    p50, p99 = np.percentile(np.array(took) * 1e3, [50, 99])
    print(json.dumps({"p50_ms": round(p50, 3), "p99_ms": round(p99, 3), "n": len(took)}))


def again(*words: object) -> subprocess.Popen[str]:
    """Start a part of this script."""
    command = [sys.executable, __file__, *map(str, words)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def answer_of(process: subprocess.Popen[str]) -> dict[str, float]:
    """Return what a part printed."""
    output, _ = process.communicate(timeout=120)
    found: dict[str, float] = json.loads(output)
    return found


def cpu_s(pid: int) -> float:
    """Return the processor seconds of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def running(form: str, connections: int) -> Iterator[tuple[str, int, list[int]]]:
    """Yield the folder, port and pids of a form that is ready."""
    with tempfile.TemporaryDirectory(prefix="kvh-") as folder:
        port_file = f"{folder}/port"
        inside = form == "threads"
        started = [again("_daemon", folder, port_file, connections, int(inside))]
        if not inside:
            started.append(again("_sink", folder, port_file, connections))
        try:
            end = time.monotonic() + 30
            while not (os.path.exists(port_file) and Path(port_file).read_text()):
                assert time.monotonic() < end, "the sink does not come up"
                time.sleep(0.05)
            yield folder, int(Path(port_file).read_text()), [each.pid for each in started]
        finally:
            for each in started:
                each.kill()
                each.wait()


def measure(form: str, connections: int, seconds: float) -> dict[str, object]:
    """Measure one form: idle lookups, then throughput with lookups beside it."""
    with running(form, connections) as (folder, port, pids):
        idle = answer_of(again("_probe", folder, seconds / 2))
        alone_load = answer_of(again("_load", port, connections, seconds / 2))
        before = sum(map(cpu_s, pids))
        stores = again("_load", port, connections, seconds)
        time.sleep(0.5)
        busy = answer_of(again("_probe", folder, seconds - 1))
        loaded = answer_of(stores)
        used_s = sum(map(cpu_s, pids)) - before
    return {
        "form": form,
        "gbs_alone": alone_load["gbs"],
        "gbs": loaded["gbs"],
        "cpu_s_per_gb": round(used_s / (loaded["gbs"] * seconds), 2),
        "idle": idle,
        "busy": busy,
        "p99_factor": round(busy["p99_ms"] / idle["p99_ms"], 1),
    }


def main() -> None:
    """Run both forms by turns, or one part of them."""
    parts = {"_daemon": daemon, "_sink": sink, "_load": load, "_probe": probe}
    if sys.argv[1:2] and sys.argv[1] in parts:
        words = sys.argv[2:]
        if sys.argv[1] == "_daemon":
            daemon(words[0], words[1], int(words[2]), bool(int(words[3])))
        elif sys.argv[1] == "_sink":
            sink(words[0], words[1], int(words[2]))
        elif sys.argv[1] == "_load":
            load(int(words[0]), int(words[1]), float(words[2]))
        else:
            probe(words[0], float(words[1]))
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--connections", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=6)
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    for _ in range(options.rounds):
        for form in ("process", "threads"):
            print(json.dumps(measure(form, options.connections, options.seconds)), flush=True)


if __name__ == "__main__":
    main()
