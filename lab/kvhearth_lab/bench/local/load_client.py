"""One load client, run as a process of its own: ``python -m kvhearth_lab.bench.local.load_client``.

It prints ``ready``, waits for a line, runs lookups for a while and prints their rate.
"""

from __future__ import annotations

import contextlib
import random
import subprocess
import sys
import time

from kvhearth_lab.bench.daemon import attached, broken, contract, end_child, keys_of
from kvhearth_lab.bench.local.figures import CROWD_CLIENTS, CROWD_KEYS, SMALL_BYTES

_LISTS = 64


def crowd(url: str, seed: bytes, blocks: int, seconds: float) -> float:
    """Return the lookups per second of all clients together.

    Raises:
        KVHearthError: a client did not come up, or one of its lookups failed.
    """
    with contextlib.ExitStack() as undo:
        clients = []
        for number in range(CROWD_CLIENTS):
            words = [url, seed.hex(), str(number), str(blocks), str(seconds)]
            command = [sys.executable, "-m", "kvhearth_lab.bench.local.load_client", *words]
            client = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, encoding="utf-8"
            )
            undo.callback(end_child, client)
            clients.append(client)
        for client in clients:
            if _said(client) != "ready":
                raise broken("a client of the crowd did not come up")
        for client in clients:
            assert client.stdin is not None
            client.stdin.write("go\n")
            client.stdin.flush()
        rates = [float(_said(client) or 0) for client in clients]
    if not all(rates):
        raise broken("a client of the crowd failed")
    return sum(rates)


def _said(client: subprocess.Popen[str]) -> str:
    assert client.stdout is not None
    return client.stdout.readline().strip()


def main(url: str, seed: str, number: str, blocks: str, seconds: str) -> int:
    """Run one client; prints its lookups per second, 0 if one failed."""
    random_ = random.Random(int(number))
    starts = [random_.randrange(int(blocks) - CROWD_KEYS + 1) for _ in range(_LISTS)]
    lists = [keys_of(bytes.fromhex(seed), start, CROWD_KEYS) for start in starts]
    with attached(url, contract(SMALL_BYTES), f"bench-crowd-{number}") as client:
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        sys.stdin.readline()
        count, hits = 0, 0
        start = time.perf_counter()
        while time.perf_counter() - start < float(seconds):
            found = client.lookup({0: lists[count % _LISTS]})
            client.release(found.lease)
            hits += bool(found.groups[0].ready.all())
            count += 1
        rate = count / (time.perf_counter() - start)
        sys.stdout.write(f"{rate if hits == count else 0}\n")
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
