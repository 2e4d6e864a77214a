"""Cost of ``/metrics``, and the time that lookups lose to it.

One scrape a second costs far less than a machine's speed varies from second to second. Portions are
therefore short and contain one scrape or none, in turns. A scrape then costs as much as the rest of
its portion, and the median of many differences is accurate to a few hundredths of a millisecond.
The scraper is a process of its own, as a real one is: ``python -m
kvhearth_lab.bench.local.scrapes``.
"""

from __future__ import annotations

import contextlib
import http.client
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

from kvhearth.client import KVClient
from kvhearth_lab.bench.daemon import Served, broken, end_child, keys_of
from kvhearth_lab.bench.local.figures import CROWD_KEYS, Result, Sizes
from kvhearth_lab.bench.report import median_of, p99, steps
from kvhearth_server.config.value_types import host_and_port

_DEADLINE_S = 10.0
_LISTS = 64
_SCRAPE, _REST = "scrape", "rest"


class _Scraper:
    """The scraper's process; ``begin`` does not wait, ``end`` does."""

    def __init__(self, address: str) -> None:
        command = [sys.executable, "-m", "kvhearth_lab.bench.local.scrapes", address]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, encoding="utf-8"
        )

    def begin(self, word: str) -> None:
        """Start a scrape or a rest."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{word}\n")
        self._process.stdin.flush()

    def end(self) -> float:
        """Return the seconds of the scrape or rest that was begun.

        Raises:
            KVHearthError: the page did not come.
        """
        assert self._process.stdout is not None
        said = self._process.stdout.readline().strip()
        if not said:
            raise broken("the scraper failed")
        return float(said)

    def close(self) -> None:
        """End the process."""
        end_child(self._process)


def scrape_part(
    result: Result, sizes: Sizes, daemon: Served, client: KVClient, *, seed: bytes, address: str
) -> None:
    """Measure the figures of ``/metrics`` at all blocks; null without HTTP.

    Raises:
        KVHearthError: the scraper or a lookup failed.
    """
    values = result.values
    if host_and_port(address) is None:
        names = ("metrics_p99_ms", "metrics_cpu_ms", "metrics_overhead", "metrics_delay")
        values.update(dict.fromkeys(names))
        return
    places = random.Random(3)
    starts = [places.randrange(sizes.blocks - CROWD_KEYS + 1) for _ in range(_LISTS)]
    asked = [keys_of(seed, start, CROWD_KEYS) for start in starts]
    with contextlib.closing(_Scraper(address)) as scraper:
        used_s, times = daemon.cpu_s(), []
        for _ in steps(sizes.scrapes, "scrapes"):
            scraper.begin(_SCRAPE)
            times.append(scraper.end())
        used_s = daemon.cpu_s() - used_s
        values["metrics_p99_ms"] = round(p99(times) * 1e3, 2)
        values["metrics_cpu_ms"] = round(used_s / sizes.scrapes * 1e3, 2)
        portions = _Portions(daemon, client, scraper, asked, sizes.scrape_lookups)
        pairs = portions.pairs(sizes.scrape_pairs)
    daemon.wait_quiet()
    for name, extra_s in zip(("metrics_overhead", "metrics_delay"), pairs, strict=True):
        # Seconds for one scrape equal the fraction of time at one scrape a second.
        middle, low, high = median_of(extra_s)
        values[name] = round(middle, 5)
        result.spread[name] = [round(low, 5), round(high, 5)]


@dataclass(frozen=True)
class _Portions:
    """Portions of ``count`` lookups of the lists in turn, with a concurrent scrape or without."""

    daemon: Served
    client: KVClient
    scraper: _Scraper
    asked: list[list[bytes]]
    count: int

    def pairs(self, count: int) -> tuple[list[float], list[float]]:
        """Return the cost that a scrape adds to a portion: seconds of the daemon's processor time,
        and of wall time.
        """
        used, passed = list[float](), list[float]()
        for number in steps(count, "lookups with and without scrapes"):
            found = {}
            # Alternate the order, so that a machine that becomes slower harms both alike.
            for word in (_SCRAPE, _REST) if number % 2 else (_REST, _SCRAPE):
                found[word] = self._measured(word)
            used.append(found[_SCRAPE][0] - found[_REST][0])
            passed.append(found[_SCRAPE][1] - found[_REST][1])
        return used, passed

    def _measured(self, word: str) -> tuple[float, float]:
        """Return the daemon's processor time for a portion, and the wall time of its lookups."""
        used_s, start = self.daemon.cpu_s(), time.perf_counter()
        self.scraper.begin(word)
        for number in range(self.count):
            found = self.client.lookup({0: self.asked[number % len(self.asked)]})
            self.client.release(found.lease)
            if not found.groups[0].leased.all():
                raise broken(f"a lookup missed: {found.reason or found.lease_short or 'evicted'}")
        passed_s = time.perf_counter() - start
        self.scraper.end()
        return self.daemon.cpu_s() - used_s, passed_s


def _scraped(address: str) -> Iterator[float]:
    """Yield the seconds of the action that each line of standard input requests."""
    place = host_and_port(address)
    assert place is not None
    for line in sys.stdin:
        start = time.perf_counter()
        if line.strip() == _SCRAPE:
            connection = http.client.HTTPConnection(*place, timeout=_DEADLINE_S)
            try:
                connection.request("GET", "/metrics")
                answer = connection.getresponse()
                answer.read()
            finally:
                connection.close()
            if answer.status != http.client.OK:
                raise broken(f"/metrics answers {answer.status}")
        yield time.perf_counter() - start


def main(address: str) -> int:
    """Run the scraper's process."""
    for seconds in _scraped(address):
        sys.stdout.write(f"{seconds}\n")
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
