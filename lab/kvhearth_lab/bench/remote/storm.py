"""A storm of stores, run as a process of its own: ``python -m kvhearth_lab.bench.remote.storm``.

Each client has one data connection and stores 2 MiB blocks without pause, until standard input
ends. A line tells when all of them are under way. The process is nice: it stands for other hosts,
and measured is what their stores cost here, not the cores that their clients take.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
import sys
import threading
from collections.abc import Iterator

import numpy as np

from kvhearth.client import KVClient
from kvhearth.page_layout import PagedKV
from kvhearth.results import CommitGroup
from kvhearth.transfer.copier_pool import default_copier
from kvhearth_lab.bench.daemon import DEADLINE_S, attached, broken, contract, end_child
from kvhearth_lab.bench.local.figures import PAGE_BYTES

_PORTION = 16
_NICENESS = 19


@contextlib.contextmanager
def storm(url: str, clients: int) -> Iterator[None]:
    """Provide the storm.

    Args:
        url: the gateway's URL for a client of one connection.
        clients: number of clients.
    """
    command = [sys.executable, "-m", __name__, url, str(clients)]
    child = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, encoding="utf-8"
    )
    try:
        assert child.stdout is not None
        if not child.stdout.readline():
            raise broken("the storm did not begin")
        yield
    finally:
        end_child(child)


def _store(
    client: KVClient, source: PagedKV, begun: threading.Barrier, end: threading.Event
) -> None:
    arena = client.arena
    if arena is None:
        raise broken("no arena is attached")
    copier, pages = default_copier()(source, arena), np.arange(_PORTION)
    waiting = True
    while not end.is_set():
        slots = client.reserve({0: _PORTION})
        extents = slots.groups[0]
        ticket = copier.store(slots.boot_id, pages[: len(extents)], extents[:, 0])
        done = ticket and copier.wait(ticket, DEADLINE_S)
        if done and done.ok.all():
            keys = [secrets.token_bytes(32) for _ in extents]
            client.commit({0: CommitGroup(keys, extents, done.checksums)}, boot_id=slots.boot_id)
        if waiting:
            waiting = False
            with contextlib.suppress(threading.BrokenBarrierError):
                begun.wait(DEADLINE_S)
    copier.close()


def main() -> None:
    """Run with a URL and a number of clients from the command line."""
    url, count = sys.argv[1], int(sys.argv[2])
    os.nice(_NICENESS)
    memory = np.ones((_PORTION, PAGE_BYTES), np.uint8)
    begun, end = threading.Barrier(count + 1), threading.Event()
    with contextlib.ExitStack() as undo:
        threads = []
        for number in range(count):
            client = undo.enter_context(attached(url, contract(PAGE_BYTES), f"storm-{number}"))
            work = (client, PagedKV([memory]), begun, end)
            threads.append(threading.Thread(target=_store, args=work))
        for thread in threads:
            thread.start()
        begun.wait(DEADLINE_S)
        sys.stdout.write("begun\n")
        sys.stdout.flush()
        sys.stdin.read()
        end.set()
        for thread in threads:
            thread.join(DEADLINE_S)


if __name__ == "__main__":
    main()
