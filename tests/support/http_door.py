"""Raw HTTP requests to the daemon."""

from __future__ import annotations

import http.client
import json
import re
from dataclasses import dataclass
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from kvhearth_lab.harness import HUNG_S
from support.daemon import Daemon, until

ANY_PORT = "127.0.0.1:0"


@dataclass(frozen=True)
class Answer:
    """One response."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        """The body as JSON."""
        return json.loads(self.body)


def address_of(daemon: Daemon) -> tuple[str, int]:
    """Return the address at which the running daemon reports that it serves HTTP."""
    host, _, port = str(daemon.ready()["http"]).rpartition(":")
    return host, int(port)


def ask(
    daemon: Daemon,
    path: str,
    method: str = "GET",
    body: bytes | None = None,
    *,
    admin: bool = False,
    **headers: str,
) -> Answer:
    """Send one request on a connection of its own."""
    if admin:
        token = (daemon.socket_dir / "admin.token").read_text()
        headers["Authorization"] = f"Bearer {token}"
    if body is not None:
        headers.setdefault("Content-Type", "application/json")
    connection = http.client.HTTPConnection(*address_of(daemon), timeout=HUNG_S)
    try:
        connection.request(method, path, body, headers)
        response = connection.getresponse()
        named = {name.lower(): value for name, value in response.getheaders()}
        return Answer(response.status, named, response.read())
    finally:
        connection.close()


def scraped(daemon: Daemon) -> str:
    """Return a rendering of the metrics that is not older than this call: the daemon shares one
    for a while.
    """
    asked_at = daemon.stats(check_books=False).uptime_s

    def fresh() -> str:
        text = ask(daemon, "/metrics").body.decode()
        found = re.search(r"^kvhearth_uptime_seconds (\S+)$", text, re.MULTILINE)
        assert found, text
        return text if float(found[1]) >= asked_at else ""

    return str(until(fresh, "a rendering of after the call"))


class Scrape:
    """One scrape: values by name without its prefix, and labels."""

    def __init__(self, daemon: Daemon) -> None:
        families = text_string_to_metric_families(scraped(daemon))
        found = [sample for family in families for sample in family.samples]
        self.samples = [sample for sample in found if sample.name.startswith("kvhearth_")]

    def of(self, name: str, **labels: str) -> float:
        """Return the sum over all samples of a metric that have these labels."""
        found = [
            sample.value
            for sample in self.samples
            if sample.name == f"kvhearth_{name}" and labels.items() <= sample.labels.items()
        ]
        assert found, f"there is no {name} {labels}"
        return float(sum(found))
