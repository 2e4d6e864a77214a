"""The page for a browser, and what feeds it: an event stream, findings, and lines that connect."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import json
import re
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any

from fastapi.responses import HTMLResponse, Response, StreamingResponse
from starlette.routing import Route

from kvhearth.errors import KVHearthError, Reason
from kvhearth.url import REMOTE_SCHEME, SCHEME, TLS_SCHEME
from kvhearth_server.config.load import Settings
from kvhearth_server.engine.engine import Engine
from kvhearth_server.engine.watch import EVERY_S, RATES
from kvhearth_server.observability.exposition import Renderings
from kvhearth_server.transport.reports import Examine, Finding, Grade

VIEWERS_MAX = 16
_EXAMINED_FOR_S = 60.0
_BLOCKS = re.compile(r"<(script|style)>(.*?)</\1>", re.DOTALL)


def policy_of(page: str) -> str:
    """Return a content security policy under which only the page's own script and style run."""
    hashes: dict[str, list[str]] = {"script": [], "style": []}
    for tag, text in _BLOCKS.findall(page):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        hashes[tag].append(f"'sha256-{digest}'")
    return (
        f"default-src 'none'; script-src {' '.join(hashes['script'])}; "
        f"style-src {' '.join(hashes['style'])}; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def pages() -> list[Route]:
    """Return the routes of the two static pages, which hold no data and need no token."""
    found, folder = list[Route](), resources.files(__package__)
    for path, name in (("/", "page.html"), ("/docs", "api.html")):
        text = (folder / name).read_text(encoding="utf-8")
        headers = {
            "content-security-policy": policy_of(text),
            "x-content-type-options": "nosniff",
            "referrer-policy": "no-referrer",
            "cache-control": "no-cache",
        }
        found.append(Route(path, HTMLResponse(text, headers=headers), methods=["GET"], name=name))
    return found


class Stream:
    """Server-sent events: statistics once a second.

    A viewer gets the samples of the last minutes first. The stream ends when the daemon drains.
    """

    def __init__(self, engine: Engine, renderings: Renderings) -> None:
        self._engine, self._renderings = engine, renderings
        self._viewers = 0

    def answer(self) -> Response:
        """Return a response that lasts until the viewer leaves.

        Raises:
            KVHearthError: ``daemon_away`` if there are ``VIEWERS_MAX`` viewers.
        """
        if self._viewers >= VIEWERS_MAX:
            message = f"{self._viewers} viewers follow the events; close one"
            raise KVHearthError(Reason.DAEMON_AWAY, message)
        headers = {"cache-control": "no-store"}
        return StreamingResponse(self._messages(), 200, headers, "text/event-stream")

    async def _messages(self) -> AsyncIterator[bytes]:
        self._viewers += 1
        try:
            yield self._history()
            while True:
                drains = self._engine.draining
                yield _message("stats", self._renderings.stats(fresh=drains))
                if drains:
                    return
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(EVERY_S):
                        await self._engine.drain_begun.wait()
        finally:
            self._viewers -= 1

    def _history(self) -> bytes:
        found = {"rates": RATES, "samples": list(self._engine.watch.samples)}
        return _message("history", json.dumps(found).encode())


def _message(event: str, data: bytes) -> bytes:
    return b"event: " + event.encode() + b"\ndata: " + data + b"\n\n"


@dataclass(frozen=True)
class Connect:
    """A line that connects an engine to this very daemon."""

    title: str
    line: str


@dataclass(frozen=True)
class Advice:
    """Findings of the doctor about this machine, and lines that connect engines."""

    findings: list[Finding]
    connect: list[Connect]


class Guide:
    """Answers with findings that are at most a minute old; one thread looks for them at a time.

    Args:
        examine: returns the findings; called on a thread.
    """

    def __init__(self, engine: Engine, settings: Settings, examine: Examine) -> None:
        self._engine = engine
        self._settings = settings
        self._examine = examine
        self._turn = asyncio.Lock()
        self._advice: Advice | None = None
        self._at = 0.0

    async def answer(self) -> Advice:
        """Return the advice."""
        async with self._turn:
            if self._advice is None or time.monotonic() - self._at > _EXAMINED_FOR_S:
                found = await asyncio.to_thread(self._examine)
                lines = [each for each in found if self._matters(each.check)]
                self._advice = Advice(lines, connections(self._settings))
                self._at = time.monotonic()
        return replace(self._advice, findings=[*self._notices(), *self._advice.findings])

    def _notices(self) -> list[Finding]:
        notices = self._engine.notices.items()
        return [Finding(about, Grade.WARN, text) for about, text in notices]

    def _matters(self, check: str) -> bool:
        """Whether a finding says something about this run, which may have all huge pages that it
        wants: those are not free for another one.
        """
        huge = all(each.huge_bytes >= each.bytes for each in self._engine.arena.segments)
        return not (huge and check.startswith(("hugepages", "thp")))


def connections(settings: Settings) -> list[Connect]:
    """Return the lines that connect engines on this host, and vLLM on others if the daemon
    listens.
    """
    url = f"{SCHEME}://{settings.socket_dir}"
    found = [
        Connect("vLLM on this host", _vllm(url)),
        Connect("vLLM with native offloading", _vllm_tier(url)),
        Connect("SGLang with HiCache", _sglang(url)),
        Connect("LMCache's daemon, with the commit of the weights", _lmcache(url)),
        Connect("Other verbs in this shell", f"export KVHEARTH_SOCKET_DIR={settings.socket_dir}"),
    ]
    if settings.listen_address is not None:
        scheme = TLS_SCHEME if settings.tls_cert else REMOTE_SCHEME
        host, port = settings.listen_address
        host = "THIS-HOST" if host in ("0.0.0.0", "::") else host
        remote = f"{scheme}://{host}:{port}?token_file=/etc/kvhearth/token"
        found.append(Connect("vLLM on another host", _vllm(remote)))
    return found


def _vllm(url: str) -> str:
    config = {
        "kv_connector": "KVHearthConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"url": url},
    }
    return f"vllm serve MODEL --kv-transfer-config {_quoted(config)}"


def _vllm_tier(url: str) -> str:
    tier = {"type": "KVHearthTier", "module_path": "kvhearth.connectors.vllm.tier", "url": url}
    config = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "spec_name": "TieringOffloadingSpec",
            "cpu_bytes_to_use": 8 << 30,
            "secondary_tiers": [tier],
        },
    }
    return f"vllm serve MODEL --kv-transfer-config {_quoted(config)}"


def _sglang(url: str) -> str:
    config = {
        "backend_name": "kvhearth",
        "module_path": "kvhearth.connectors.sglang",
        "class_name": "KVHearthHiCache",
        "interface_v1": 1,
        "url": url,
    }
    return (
        "python3 -m sglang.launch_server --model-path MODEL --enable-hierarchical-cache "
        "--hicache-storage-backend dynamic "
        f"--hicache-storage-backend-extra-config {_quoted(config)}"
    )


def _lmcache(url: str) -> str:
    config = {
        "type": "plugin",
        "module_path": "kvhearth.connectors.lmcache",
        "class_name": "KVHearthL2Adapter",
        "adapter_params": {"url": url, "revision": "COMMIT"},
    }
    return f"lmcache server --l1-size-gb 8 --eviction-policy LRU --l2-adapter {_quoted(config)}"


def _quoted(config: Mapping[str, Any]) -> str:
    return f"'{json.dumps(config, separators=(',', ':'))}'"
