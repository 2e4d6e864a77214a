"""Is it alive, is it ready, what are its numbers: for probes and scrapers."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import PlainTextResponse

from kvhearth_server.engine.engine import Engine
from kvhearth_server.engine.snapshot import take_snapshot, take_ssd
from kvhearth_server.observability.exposition import Exposition
from kvhearth_server.transport.web import models, views

Verbose = Annotated[str | None, Query(description="List every check.", max_length=8)]


def probe_routes(engine: Engine) -> APIRouter:
    """Routes that anybody may read who reaches the address."""
    router = APIRouter(tags=["probes"])
    exposition = Exposition(lambda: take_snapshot(engine))

    @router.get("/livez", response_class=PlainTextResponse)
    async def livez() -> str:
        """200 while the daemon's loop turns; looks at nothing else."""
        return "ok\n"

    async def ready(verbose: Verbose = None) -> PlainTextResponse:
        """200 while stores and attaches are taken, else 503; ``verbose`` lists the checks, the
        memory that there is, and how the SSD tier is.
        """
        checks = readiness(engine)
        good = all(checks.values())
        lines = [f"[{'+' if holds else '-'}]{name}" for name, holds in checks.items()]
        told = "ok" if good else "not ready"
        more = [] if verbose is None else [*memory_lines(engine), *ssd_lines(engine)]
        shown = [*lines, *more, told] if verbose is not None or not good else [told]
        return PlainTextResponse("\n".join(shown) + "\n", 200 if good else 503)

    for path in ("/readyz", "/healthz"):
        router.add_api_route(
            path,
            ready,
            response_class=PlainTextResponse,
            operation_id=path.strip("/"),
            responses={503: {"description": "Not ready.", "content": {"text/plain": {}}}},
        )

    @router.get(
        "/metrics",
        response_class=PlainTextResponse,
        responses={200: {"content": {"application/openmetrics-text": {}}}},
    )
    async def metrics(request: Request) -> Response:
        """What Prometheus scrapes."""
        body, content_type = exposition.scrape(request.headers.get("accept", ""))
        return Response(body, headers={"content-type": content_type})

    @router.get("/version")
    async def version() -> models.Version:
        """Versions of the distribution and of the protocol."""
        return views.version(engine)

    return router


def readiness(engine: Engine) -> dict[str, bool]:
    """What must hold to be ready, by name."""
    return {
        "arena": all(segment.fd >= 0 for segment in engine.arena.segments),
        "not-draining": not engine.draining,
    }


def memory_lines(engine: Engine) -> list[str]:
    """Each tenant's memory and the pages that it is on: small ones are slow, but no failure."""
    segments = take_snapshot(engine).segments
    return [
        f"[i]memory of {each.tenant}: {each.capacity_bytes} bytes on {each.page_kind} pages"
        for each in segments
    ]


def ssd_lines(engine: Engine) -> list[str]:
    """How the SSD tier is, and what is not as it should be: the daemon serves all the same."""
    now = take_ssd(engine)
    if now is None:
        return []
    tier = now.tier
    state = "degraded" if tier.reasons else "healthy"
    lines = [
        f"[i]ssd: {state}, {tier.blocks} blocks, {tier.file_bytes} of {tier.capacity_bytes} bytes "
        f"in files, by {tier.interface}"
    ]
    if tier.recovering:
        lines.append(f"[i]ssd: {tier.files_recovered} of {tier.files_found} files are read back")
    return [*lines, *(f"[!]ssd: {reason}" for reason in tier.reasons)]
