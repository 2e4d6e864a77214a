"""The HTTP application: its routes, its errors, its description."""

from __future__ import annotations

import json
import sys
import traceback
from asyncio import all_tasks
from collections.abc import Callable
from typing import Annotated, Any

from fastapi import APIRouter, Body, Depends, FastAPI, Path, Query, Request, Response
from fastapi.openapi.utils import get_openapi
from fastapi.responses import PlainTextResponse
from fastapi.security import HTTPAuthorizationCredentials
from pydantic import BeforeValidator, Field

from kvhearth.errors import KVHearthError, Reason
from kvhearth_server.config.load import Settings
from kvhearth_server.engine import operations
from kvhearth_server.engine.engine import Engine
from kvhearth_server.engine.snapshot import Snapshot, Stats, take_snapshot
from kvhearth_server.observability.exposition import SCRAPE_TYPE, Renderings
from kvhearth_server.tiers.figures import RemoteFigures
from kvhearth_server.transport import reports
from kvhearth_server.transport.messages import GROUPS_PER_CALL_MAX
from kvhearth_server.transport.operators import (
    LABEL_BYTES_MAX,
    Operators,
    Right,
    audited,
    check_label,
    operator,
    refused,
)
from kvhearth_server.transport.web import problems
from kvhearth_server.transport.web.bounds import BEARER, Asked, BoundedRoute, Bounds
from kvhearth_server.transport.web.page import Advice, Guide, Stream, pages
from kvhearth_server.transport.web.problems import CONTENT_TYPE, Problem
from kvhearth_server.transport.web.server import LOCAL

_JSON = {"content-type": "application/json"}
Credentials = Annotated[HTTPAuthorizationCredentials | None, Depends(BEARER)]
Digest = Annotated[
    str, Path(description="Digest of the namespace, 64 hex digits.", pattern="^[0-9a-f]{64}$")
]


Key = Annotated[str, Path(description="Key, hex digits.", pattern="^([0-9a-f]{2})+$")]


def _peer(request: Request) -> str:
    if LOCAL in request.scope:
        return "unix"
    return f"{request.client.host}:{request.client.port}" if request.client else ""


async def _caller(request: Request) -> str:  # FastAPI calls a plain function on a thread
    return _peer(request)


CallContext = Annotated[str, Depends(_caller)]


class Tokens:
    """Checks of bearer tokens, as dependencies of routes.

    Raises:
        KVHearthError: ``not_admin``.
    """

    def __init__(self, operators: Operators) -> None:
        self._operators = operators

    async def admin(self, request: Request, given: Credentials) -> None:
        """Admit the admin token."""
        ask = "send the content of admin.token of the socket directory as a bearer token"
        self._admit(request, given, Right.ALL, ask)

    async def reader(self, request: Request, given: Credentials) -> None:
        """Admit the read token, if there is one, or the admin token."""
        ask = (
            "send the content of the daemon's read_token_file as a bearer token, that of "
            "admin.token of the socket directory, or an operator's token"
        )
        self._admit(request, given, Right.READ, ask)

    async def sums(self, request: Request) -> None:
        """Admit everyone; where the address is guarded, as ``reader``."""
        if self._operators.guarded:
            await self.reader(request, await BEARER(request))

    def _admit(self, request: Request, given: Credentials, least: Right, ask: str) -> None:
        if LOCAL in request.scope:
            return
        right, name = self._operators.rights(given.credentials if given is not None else "")
        if right < least:
            refused(_peer(request))
            raise KVHearthError(Reason.NOT_ADMIN, ask)
        operator.set(name)


def problem_responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return OpenAPI's description of refusals."""
    content = {CONTENT_TYPE: {"schema": {"$ref": f"#/components/schemas/{Problem.__name__}"}}}
    return {status: {"description": "Refused.", "content": content} for status in statuses}


class EvictRequest(Asked):
    """Size to keep, and where to evict."""

    keep_bytes: int = Field(0, ge=0, le=2**63 - 1, description="Keep this many bytes at most.")
    tier: operations.Where | None = Field(
        None,
        description="Where; ssd and all need keep_bytes 0. Default: all if that is 0, else memory.",
    )


class ExplainRequest(Asked):
    """A contract, as ``/v1/namespaces`` has it."""

    contract: dict[str, Any]
    tenant: str = Field("", description="Default: the first one.")


def _named(found: Any) -> Any:
    """Refuse wrong keys at once: each would be told."""
    groups = list(found.values()) if isinstance(found, dict) else [found]
    if len(groups) > GROUPS_PER_CALL_MAX:
        raise ValueError(f"{len(groups)} groups, at most {GROUPS_PER_CALL_MAX}")
    for keys in groups:
        kinds = set(map(type, keys)) if isinstance(keys, list) else {dict}
        if not (kinds <= {str} or kinds <= {int}):
            raise ValueError("the keys of a group are a list of texts of hex digits, or of numbers")
        if kinds == {int} and not 0 <= min(keys) <= max(keys) < 1 << 64:
            raise ValueError("a number is the last 8 bytes of a key: 0 to 2**64 - 1")
    return found


_Keys = list[str] | list[int]


class ScoreRequest(Asked):
    """The keys of a prompt's blocks."""

    namespace: str = Field(
        description="First hex digits of its digest, as many as tell it from others.",
        pattern="^[0-9a-f]{4,64}$",
        examples=["8c92063cc2f6"],
    )
    keys: Annotated[_Keys | dict[int, _Keys], BeforeValidator(_named)] = Field(
        description="Keys, root first: those of group 0, or of each group. As hex digits, or as "
        "the numbers in vLLM's events, which are the last 8 bytes, big-endian.",
        examples=[[1263874106394823, 902716354201837]],
    )


class BumpRequest(Asked):
    """The weights epoch that is expected, and the name of the new weights."""

    expected_epoch: int | None = Field(
        None, ge=1, le=2**63 - 1, description="Refuse unless this is the current one."
    )
    label: str | None = Field(
        None,
        max_length=LABEL_BYTES_MAX,
        description="Name of the new weights, by which hosts share blocks at remotes. Without it "
        "the namespace is off the remotes until a bump with a label.",
    )


class UnpinRequest(Asked):
    """Which pins end; without both, all."""

    namespace: str | None = Field(
        None, description="Its digest, 64 hex digits.", pattern="^[0-9a-f]{64}$"
    )
    session: str | None = Field(
        None, max_length=LABEL_BYTES_MAX, description="The client's name for what pinned."
    )


Evict = Annotated[EvictRequest, Body(default_factory=EvictRequest)]
Bump = Annotated[BumpRequest, Body(default_factory=BumpRequest)]


def all_stacks() -> str:
    """Return the current stack of every thread and of every task of the loop."""
    parts = []
    for number, frame in sys._current_frames().items():
        parts.append(f"thread {number}\n" + "".join(traceback.format_stack(frame)))
    for task in sorted(all_tasks(), key=lambda task: task.get_name()):
        frames = "".join(
            "".join(traceback.format_stack(frame, limit=1)) for frame in task.get_stack()
        )
        parts.append(f"task {task.get_name()}\n{frames}")
    return "\n".join(parts)


def _for_those(admitted: Callable[..., Any], *tags: str) -> APIRouter:
    """Return a router of routes that need a token."""
    return APIRouter(
        tags=[*tags],
        dependencies=[Depends(admitted)],
        responses=problem_responses(403),
        route_class=BoundedRoute,
    )


def state_routes(
    engine: Engine, renderings: Renderings, tokens: Tokens, stream: Stream, guide: Guide
) -> APIRouter:
    """Build the routes for state: sums for any client who reaches the address, and lists, which
    name tenants' models, engines and processes, for who has a token.
    """
    router = APIRouter(prefix="/v1", tags=["state"])
    lists = _for_those(tokens.reader)

    @router.get("/stats", dependencies=[Depends(tokens.sums)], response_model=Stats)
    async def stats(request: Request) -> Response:
        """Statistics of the daemon, at most one second old."""
        return Response(renderings.stats(fresh=LOCAL in request.scope), 200, _JSON)

    @router.get(
        "/events",
        dependencies=[Depends(tokens.sums)],
        response_class=Response,
        responses={200: {"content": {"text/event-stream": {}}}},
    )
    async def events() -> Response:
        """Server-sent events: history once, then stats once a second; 16 viewers at most."""
        return stream.answer()

    @router.get("/guide", dependencies=[Depends(tokens.sums)])
    async def advice() -> Advice:
        """Findings about this machine, and lines that connect engines to this daemon."""
        return await guide.answer()

    @lists.get("/sessions")
    async def sessions() -> reports.Sessions:
        """Processes that are attached, or left and may still be writing."""
        return reports.sessions(engine)

    @lists.get("/namespaces")
    async def namespaces() -> reports.Namespaces:
        """Tenants' contracts, and the blocks stored under them."""
        return reports.namespaces(engine)

    @lists.get("/leases")
    async def leases() -> reports.Leases:
        """Leases of readers, by group."""
        return await reports.leases(engine)

    @lists.get("/pins")
    async def pins() -> reports.Pins:
        """Pins of blocks that will be wanted again."""
        return await reports.pins(engine)

    @lists.get("/keys/{key}")
    async def key(key: Key) -> reports.KeyPlaces:
        """Where a key is, and whether it would be served."""
        return reports.key_places(engine, bytes.fromhex(key))

    @lists.post("/prefixes:score", responses=problem_responses(400, 404))
    async def score(request: ScoreRequest) -> reports.Scores:
        """How much of a prompt each tier could restore, for routers. It counts as no use."""
        keys = request.keys if isinstance(request.keys, dict) else {0: request.keys}
        return await reports.prefix_scores(engine, request.namespace, keys)

    @lists.post("/contracts:explain")
    async def explain(request: ExplainRequest) -> reports.ContractPlace:
        """The namespace of a contract, and those that are near it."""
        return reports.contract_place(engine, request.tenant, json.dumps(request.contract))

    router.include_router(lists)
    return router


def admin_routes(engine: Engine, settings: Settings, tokens: Tokens) -> APIRouter:
    """Build the routes that need the admin token: actions, settings, debugging."""
    router = _for_those(tokens.admin, "admin")
    boot_id = engine.boot_id

    @router.get("/v1/config")
    async def config() -> reports.Config:
        """The settings in effect."""
        return reports.Config(boot_id, settings.model_dump(mode="json"))

    @router.post("/v1/namespaces/{ns}:evict", responses=problem_responses(404, 409))
    async def evict(ns: Digest, caller: CallContext, request: Evict) -> reports.Evicted:
        """Remove blocks of a namespace, coldest first: all that are not held, or down to a size."""
        keep_bytes, tier = request.keep_bytes, request.tier
        asked = {"namespace": ns, "keep_bytes": keep_bytes, "tier": tier}
        with audited("evict", caller, **asked) as details:
            removed = await operations.evict(engine, bytes.fromhex(ns), keep_bytes, tier)
            details |= {"evicted_blocks": removed.memory, "ssd_blocks": removed.ssd}
        return reports.Evicted(boot_id, removed.memory, removed.ssd)

    @router.post("/v1/namespaces/{ns}:bump-epoch", responses=problem_responses(404, 409))
    async def bump_epoch(ns: Digest, caller: CallContext, request: Bump) -> reports.Bumped:
        """Make all blocks of a namespace invalid at once because its weights have changed."""
        expected, label = request.expected_epoch, request.label
        named = {} if label is None else {"label": label}
        with audited("forget", caller, namespace=ns, **named) as details:
            check_label(label)
            epoch = await operations.forget(engine, bytes.fromhex(ns), expected, label)
            details["epoch"] = epoch
        return reports.Bumped(boot_id, epoch)

    @router.post("/v1/pins:end", responses=problem_responses(404))
    async def unpin(caller: CallContext, request: UnpinRequest) -> reports.Unpinned:
        """End pins before their time: a namespace's, a session's, or all."""
        ns, session = request.namespace, request.session
        with audited("unpin", caller, namespace=ns, session=session) as details:
            digest = None if ns is None else bytes.fromhex(ns)
            details["ended_pins"] = ended = await operations.unpin(engine, digest, session)
        return reports.Unpinned(boot_id, ended)

    @router.post("/v1/admin:drain")
    async def drain(caller: CallContext) -> reports.Drained:
        """Accept no more stores and attaches, as before a shutdown."""
        with audited("drain", caller):
            engine.drain()
        return reports.Drained(boot_id, True)

    @router.post("/v1/admin:reload", responses=problem_responses(409))
    async def reload(caller: CallContext) -> reports.Reload:
        """Read the settings again, and apply those that may change while serving."""
        with audited("reload", caller) as details:
            done = await engine.reload()
            details |= {"changed": done.changed, "needs_restart": done.needs_restart}
        return reports.Reload(boot_id, done.changed, done.needs_restart)

    @router.get("/debug/books")
    async def books() -> reports.Books:
        """Recount everything in portions: the daemon serves other requests in between."""
        error = await operations.check_books(engine)
        return reports.Books(boot_id, not error, error)

    @router.get("/debug/stacks", response_class=PlainTextResponse)
    async def stacks() -> str:
        """Current stack of every thread and task."""
        return all_stacks()

    return router


Verbose = Annotated[str | None, Query(description="List every check.", max_length=8)]


def probe_routes(
    engine: Engine, renderings: Renderings, tokens: Tokens, *, guarded: bool
) -> APIRouter:
    """Build the probe routes that any client may read who reaches the address, and those of sums,
    which need a token where the address is guarded.
    """
    router = APIRouter(tags=["probes"])

    @router.get(
        "/livez",
        response_class=PlainTextResponse,
        responses={503: {"description": "Needs a restart.", "content": {"text/plain": {}}}},
    )
    async def livez() -> PlainTextResponse:
        """200 while the daemon's loop turns; 503 once sockets that others removed could not be made
        again for a minute, if only a restart can help.
        """
        why = engine.needs_restart
        return PlainTextResponse(f"{why or 'ok'}\n", 503 if why else 200)

    async def ready(verbose: Verbose = None) -> PlainTextResponse:
        """200 while stores and attaches are accepted, else 503; ``verbose`` lists the checks, each
        tenant's memory, and the state of the SSD tier and of the gateway.
        """
        checks = readiness(engine)
        good = all(checks.values())
        lines = [f"[{'+' if holds else '-'}]{name}" for name, holds in checks.items()]
        verdict = "ok" if good else "not ready"
        brief = verbose is None or guarded
        more = [] if brief else _state_lines(engine)
        shown = [*lines, *more, verdict] if verbose is not None or not good else [verdict]
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
        dependencies=[Depends(tokens.sums)],
    )
    async def metrics() -> Response:
        """Metrics for Prometheus, at most one second old."""
        return Response(renderings.scrape(), 200, {"content-type": SCRAPE_TYPE})

    @router.get("/version", dependencies=[Depends(tokens.sums)])
    async def version() -> reports.Version:
        """Versions of the distribution and of the protocol."""
        return reports.version(engine)

    return router


def readiness(engine: Engine) -> dict[str, bool]:
    """Return the conditions of readiness, by name."""
    return {
        "arena": all(segment.fd >= 0 for segment in engine.arena.segments),
        "not-draining": not engine.draining,
        **{f"{door}-door: {each.reason}": False for door, each in engine.doors_shut.items()},
    }


def _state_lines(engine: Engine) -> list[str]:
    """Return the state of the tiers and what is degraded, with which the daemon still serves."""
    now, gateway = take_snapshot(engine), engine.describe_gateway
    lines = [
        f"[i]memory of {each.tenant}: {each.capacity_bytes} bytes on {each.page_kind} pages, "
        f"{each.populated_bytes} populated"
        for each in now.segments
    ]
    lines += _ssd_lines(now) + ([] if now.remote is None else _remote_lines(now.remote))
    lines += [] if gateway is None else [f"[i]{gateway()}"]
    return lines + [f"[!]{about}: {text}" for about, text in engine.notices.items()]


def _ssd_lines(now: Snapshot) -> list[str]:
    tier = now.ssd
    if tier is None:
        return []
    state = "degraded" if tier.reasons else "healthy"
    lines = [
        f"[i]ssd: {state}, {tier.blocks} blocks, {tier.file_bytes} of {tier.capacity_bytes} bytes "
        f"in files, by {tier.interface}"
    ]
    if tier.recovering:
        lines.append(f"[i]ssd: {tier.files_recovered} of {tier.files_found} files are read back")
    return [*lines, *(f"[!]ssd: {reason}" for reason in tier.reasons)]


def _remote_lines(now: RemoteFigures) -> list[str]:
    state = "degraded" if now.problem else "healthy"
    breaker = "open" if now.breaker_open else "closed"
    line = (
        f"[i]remote {now.name}: {state}, {now.count('stored_blocks')} blocks published, "
        f"{now.count('loaded_blocks')} loaded, breaker {breaker}"
    )
    return [line, *([f"[!]{now.problem}"] if now.problem else [])]


API_VERSION = "1"


def make_app(
    engine: Engine,
    settings: Settings,
    operators: Operators,
    examine: reports.Examine = list,
) -> FastAPI:
    """Build the application over an engine; all of it runs on the engine's loop.

    Args:
        examine: finds what could be better on this machine; called on a thread.
    """
    app = FastAPI(
        title="KVHearth",
        version=API_VERSION,
        docs_url=None,
        redoc_url=None,
        generate_unique_id_function=lambda route: route.name,
        redirect_slashes=False,
        responses=problem_responses(400, 408, 413, 421, 500),
    )
    problems.install(app, engine)
    tokens, renderings = Tokens(operators), Renderings(lambda: take_snapshot(engine))
    app.include_router(probe_routes(engine, renderings, tokens, guarded=operators.guarded))
    stream, guide = Stream(engine, renderings), Guide(engine, settings, examine)
    app.include_router(state_routes(engine, renderings, tokens, stream, guide))
    app.include_router(admin_routes(engine, settings, tokens))
    app.router.routes.extend(pages())
    app.add_middleware(
        Bounds, engine=engine, any_host=settings.http_insecure or settings.http_routable
    )
    app.openapi = lambda: describe(app)  # type: ignore[method-assign]
    return app


def describe(app: FastAPI) -> dict[str, Any]:
    """Return the OpenAPI description of ``app``: FastAPI's, with our problem documents in place of
    its own errors, and without histograms, which only metrics show.
    """
    if app.openapi_schema is None:
        found = get_openapi(title=app.title, version=app.version, routes=app.routes)
        schemas = found["components"]["schemas"]
        for name in ("HTTPValidationError", "Histogram", "ValidationError"):
            schemas.pop(name, None)
        schemas[problems.Problem.__name__] = problems.Problem.model_json_schema()
        found["components"]["schemas"] = dict(sorted(schemas.items()))
        for operations in found["paths"].values():
            for operation in operations.values():
                operation["responses"].pop("422", None)
        app.openapi_schema = found
    return app.openapi_schema
