"""The HTTP application: its routes, its errors, its description."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import re
import sys
import time
import traceback
from asyncio import all_tasks
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, FastAPI, Path, Query, Request, Response
from fastapi.openapi.utils import get_openapi
from fastapi.responses import PlainTextResponse, StreamingResponse
from fastapi.routing import APIRoute
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from pydantic import BaseModel, Field
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvhearth.contract import CONTRACT_JSON_BYTES_MAX
from kvhearth.errors import KVHearthError, Reason
from kvhearth_server.config.load import Settings
from kvhearth_server.config.value_types import is_loopback
from kvhearth_server.engine import operations
from kvhearth_server.engine.engine import Engine
from kvhearth_server.engine.snapshot import Snapshot, Stats, take_snapshot
from kvhearth_server.observability.exposition import Renderings
from kvhearth_server.tiers.figures import RemoteFigures
from kvhearth_server.transport import reports
from kvhearth_server.transport.operators import Operators, Right
from kvhearth_server.transport.reports import LABEL_BYTES_MAX, Actions, operator, refused
from kvhearth_server.transport.web import problems
from kvhearth_server.transport.web.page import Guide, Stream, live_routes, page_routes
from kvhearth_server.transport.web.problems import CONTENT_TYPE, Problem, problem_of
from kvhearth_server.transport.web.server import LOCAL

_JSON = {"content-type": "application/json"}
BODY_BYTES_MAX = 2 * CONTRACT_JSON_BYTES_MAX
BODY_S = 10.0


class Bounds:
    """Refuses bodies that are too long or too slow and, at a loopback address, requests for another
    host.

    A page in a local browser must not read from the daemon by pointing its own name at our address
    (DNS rebinding).
    """

    def __init__(self, app: ASGIApp, engine: Engine, *, any_host: bool) -> None:
        self._app = app
        self._engine = engine
        self._any_host = any_host

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request as an ASGI application around another one."""
        if scope["type"] != "http":
            return
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        host = headers.get(b"host", "")
        any_host = self._any_host or LOCAL in scope
        if not any_host and not is_loopback(_bare(host)):
            error = KVHearthError(Reason.BAD_MESSAGE, f"host {host!r} is not this daemon's name")
            await self._refuse(scope, receive, send, error, 421)
            return
        try:
            async with asyncio.timeout(BODY_S):
                body = await _whole_body(receive)
        except TimeoutError:
            slow = KVHearthError(Reason.DEADLINE, f"the body was not here within {BODY_S:.0f} s")
            await self._refuse(scope, receive, send, slow, 408)
            return
        if body is None:
            # A request whose body stops halfway is not carried out: what it asks for is unknown.
            self._engine.counters.add("refusals", 1, str(Reason.BAD_MESSAGE))
            return
        if len(body) > BODY_BYTES_MAX:
            message = f"the body has more than {BODY_BYTES_MAX} bytes"
            await self._refuse(
                scope, receive, send, KVHearthError(Reason.BAD_MESSAGE, message), 413
            )
            return
        messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            return messages.pop() if messages else await receive()

        if scope["method"] == "HEAD":  # uvicorn leaves the body out, as it knows the method
            scope = {**scope, "method": "GET"}
        await self._app(scope, replay, send)

    async def _refuse(
        self, scope: Scope, receive: Receive, send: Send, error: KVHearthError, status: int
    ) -> None:
        self._engine.counters.add("refusals", 1, str(error.reason))
        response = problem_of(error, status=status, headers={"connection": "close"})
        await response(scope, receive, send)


async def _whole_body(receive: Receive) -> bytes | None:
    """Return the body, or just enough of it to show that it is too long; None if the peer leaves
    first.
    """
    body = bytearray()
    while len(body) <= BODY_BYTES_MAX:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        body += message.get("body", b"")
        if not message.get("more_body", False):
            break
    return bytes(body)


def _bare(host: str) -> str:
    """Return a Host header without its port."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]


_BEARER = HTTPBearer(
    auto_error=False,
    description="The content of admin.token, or the token of an identity of tokens_file whose role "
    "is operator; for lists, and for sums where the address is guarded, also the content of the "
    "setting read_token_file.",
)
Credentials = Annotated[HTTPAuthorizationCredentials | None, Depends(_BEARER)]
Digest = Annotated[
    str, Path(description="Digest of the namespace, 64 hex digits.", pattern="^[0-9a-f]{64}$")
]


Key = Annotated[str, Path(description="Key, hex digits.", pattern="^([0-9a-f]{2})+$")]


async def _caller(request: Request) -> str:
    if LOCAL in request.scope:
        return "unix"
    return f"{request.client.host}:{request.client.port}" if request.client else ""


CallContext = Annotated[str, Depends(_caller)]


class Tokens:
    """Checks of bearer tokens, as dependencies of routes.

    Raises:
        KVHearthError: ``not_admin``.
    """

    def __init__(self, operators: Operators) -> None:
        self._operators = operators

    async def admin(self, given: Credentials, request: Request, caller: CallContext) -> None:
        """Admit the admin token."""
        self._admit(
            given,
            request,
            caller,
            Right.ALL,
            "send the content of admin.token of the socket directory as a bearer token",
        )

    async def reader(self, given: Credentials, request: Request, caller: CallContext) -> None:
        """Admit the read token, if there is one, or the admin token."""
        self._admit(
            given,
            request,
            caller,
            Right.READ,
            "send the content of the daemon's read_token_file as a bearer token, that of "
            "admin.token of the socket directory, or an operator's token",
        )

    async def sums(self, request: Request, caller: CallContext) -> None:
        """Admit everyone; where the address is guarded, as ``reader``."""
        if self._operators.guarded and LOCAL not in request.scope:
            await self.reader(await _BEARER(request), request, caller)

    def _admit(
        self,
        given: HTTPAuthorizationCredentials | None,
        request: Request,
        caller: str,
        least: Right,
        message: str,
    ) -> None:
        if LOCAL in request.scope:
            return
        right, name = self._operators.rights(given.credentials if given is not None else "")
        if right < least:
            refused(caller)
            raise KVHearthError(Reason.NOT_ADMIN, message)
        operator.set(name)


PORTION_S = 0.001
PORTION_CHARS = 64 << 10
DOCUMENTS_MAX = 8


class Documents:
    """Lists as JSON, rendered while they are sent: in one turn of the loop one portion of one
    document, so that neither time nor memory grows with a list and with how many ask.
    """

    def __init__(self, engine: Engine) -> None:
        self._head = f'{{"boot_id":{json.dumps(engine.boot_id)},'
        self._turn = asyncio.Lock()
        self._sent = 0

    def answer(self, name: str, items: Iterator[Any]) -> Response:
        """Return a response with a list of reports under its name.

        Raises:
            KVHearthError: ``daemon_away`` if too many are being sent.
        """
        if self._sent >= DOCUMENTS_MAX:
            raise KVHearthError(Reason.DAEMON_AWAY, f"{self._sent} lists are being sent; try again")
        texts = self._texts(name, items)
        return StreamingResponse(self._portions(texts), media_type="application/json")

    def _texts(self, name: str, items: Iterator[Any]) -> Iterator[str]:
        yield f'{self._head}"{name}":['
        comma = ""
        for item in items:
            yield comma + json.dumps(dataclasses.asdict(item), separators=(",", ":"))
            comma = ","
        yield "]}"

    async def _portions(self, texts: Iterator[str]) -> AsyncIterator[str]:
        self._sent += 1
        try:
            while True:
                async with self._turn:
                    portion = _portion(texts)
                    await asyncio.sleep(0)
                if not portion:
                    return
                yield portion
        finally:
            self._sent -= 1


def _portion(texts: Iterator[str]) -> str:
    """Return the next texts, as many as one turn of the loop has time for; empty at the end."""
    parts, chars, began = list[str](), 0, time.monotonic()
    for text in texts:
        parts.append(text)
        chars += len(text)
        if chars > PORTION_CHARS or time.monotonic() - began > PORTION_S:
            break
    return "".join(parts)


def problem_responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return OpenAPI's description of refusals."""
    content = {CONTENT_TYPE: {"schema": {"$ref": f"#/components/schemas/{Problem.__name__}"}}}
    return {status: {"description": "Refused.", "content": content} for status in statuses}


class Config(BaseModel):
    """The settings in effect; secrets are masked."""

    boot_id: str
    settings: dict[str, Any]


class EvictRequest(BaseModel, extra="forbid"):
    """Size to keep, and where to evict."""

    keep_bytes: int = Field(0, ge=0, le=2**63 - 1, description="Keep this many bytes at most.")
    tier: Literal["memory", "ssd", "all"] | None = Field(
        None,
        description="Where; ssd and all need keep_bytes 0. Default: all if that is 0, else memory.",
    )


class ExplainRequest(BaseModel, extra="forbid"):
    """A contract, as ``/v1/namespaces`` has it."""

    contract: dict[str, Any]
    tenant: str = Field("", description="Default: the first one.")


class BumpRequest(BaseModel, extra="forbid"):
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


_SECRET = re.compile(r"token|secret|password|credential|(^|_)key$")
_MASK = "***"


def masked(settings: Settings) -> dict[str, Any]:
    """Return the settings as JSON, with values of secret-like names left out."""
    values = settings.model_dump(mode="json")
    return {
        name: _MASK if value and _SECRET.search(name) else value for name, value in values.items()
    }


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


def state_routes(engine: Engine, renderings: Renderings, tokens: Tokens) -> APIRouter:
    """Build the routes for state: sums for any client who reaches the address, and lists, which
    name tenants' models, engines and processes, for who has a token.
    """
    router = APIRouter(prefix="/v1", tags=["state"])
    lists = APIRouter(dependencies=[Depends(tokens.reader)], responses=problem_responses(403, 503))
    documents = Documents(engine)

    @router.get("/stats", dependencies=[Depends(tokens.sums)], response_model=Stats)
    async def stats(request: Request) -> Response:
        """Statistics of the daemon, at most one second old."""
        return Response(renderings.stats(fresh=LOCAL in request.scope), 200, _JSON)

    @lists.get("/sessions", response_model=reports.Sessions)
    async def sessions() -> Response:
        """Processes that are attached, or left and may still be writing."""
        return documents.answer("sessions", reports.each_session(engine))

    @lists.get("/namespaces", response_model=reports.Namespaces)
    async def namespaces() -> Response:
        """Tenants' contracts, and the blocks stored under them."""
        return documents.answer("namespaces", reports.each_namespace(engine))

    @lists.get("/leases", response_model=reports.Leases)
    async def leases() -> Response:
        """Leases of readers, by group."""
        return documents.answer("groups", iter((await reports.leases(engine)).groups))

    @lists.get("/keys/{key}")
    async def key(key: Key) -> reports.KeyPlaces:
        """Where a key is, and whether it would be served."""
        return reports.key_places(engine, bytes.fromhex(key))

    @lists.post("/contracts:explain")
    async def explain(request: ExplainRequest) -> reports.ContractPlace:
        """The namespace of a contract, and those that are near it."""
        return reports.contract_place(engine, request.tenant, json.dumps(request.contract))

    router.include_router(lists)
    return router


def admin_routes(engine: Engine, settings: Settings, tokens: Tokens) -> APIRouter:
    """Build the routes that need the admin token: actions, settings, debugging."""
    router = APIRouter(
        tags=["admin"], dependencies=[Depends(tokens.admin)], responses=problem_responses(403)
    )
    boot_id, actions = engine.boot_id, Actions(engine)

    @router.get("/v1/config")
    async def config() -> Config:
        """The settings in effect."""
        return Config(boot_id=boot_id, settings=masked(settings))

    @router.post("/v1/namespaces/{ns}:evict", responses=problem_responses(404, 409))
    async def evict(
        ns: Digest, caller: CallContext, request: EvictRequest | None = None
    ) -> reports.Evicted:
        """Remove blocks of a namespace, coldest first: all that are not held, or down to a size."""
        keep_bytes, tier = (request.keep_bytes, request.tier) if request else (0, None)
        return await actions.evict(caller, ns, keep_bytes, tier)

    @router.post("/v1/namespaces/{ns}:bump-epoch", responses=problem_responses(404, 409))
    async def bump_epoch(
        ns: Digest, caller: CallContext, request: BumpRequest | None = None
    ) -> reports.Bumped:
        """Make all blocks of a namespace invalid at once because its weights have changed."""
        expected, label = (request.expected_epoch, request.label) if request else (None, None)
        return await actions.forget(caller, ns, expected, label)

    @router.post("/v1/admin:drain")
    async def drain(caller: CallContext) -> reports.Drained:
        """Accept no more stores and attaches, as before a shutdown."""
        return actions.drain(caller)

    @router.post("/v1/admin:reload", responses=problem_responses(409))
    async def reload(caller: CallContext) -> reports.Reload:
        """Read the settings again, and apply those that may change while serving."""
        return await actions.reload(caller)

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

    @router.get("/livez", response_class=PlainTextResponse)
    async def livez() -> str:
        """200 while the daemon's loop turns; looks at nothing else."""
        return "ok\n"

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
        responses={200: {"content": {"application/openmetrics-text": {}}}},
    )
    async def metrics(request: Request) -> Response:
        """Metrics for Prometheus, at most one second old."""
        body, content_type = await renderings.scrape(request.headers.get("accept", ""))
        return Response(body, headers={"content-type": content_type})

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
        **{f"{door}-door: {reason}": False for door, reason in engine.doors_shut.items()},
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
    tier = now.tier
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
    examine: Callable[[], list[dict[str, str]]] = list,
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
        generate_unique_id_function=_operation,
        redirect_slashes=False,
        responses=problem_responses(400, 408, 413, 421, 500),
    )
    problems.install(app, engine)
    tokens, renderings = Tokens(operators), Renderings(lambda: take_snapshot(engine))
    app.include_router(probe_routes(engine, renderings, tokens, guarded=operators.guarded))
    app.include_router(state_routes(engine, renderings, tokens))
    app.include_router(admin_routes(engine, settings, tokens))
    app.include_router(page_routes())
    stream, guide = Stream(engine, renderings), Guide(engine, settings, examine)
    app.include_router(live_routes(stream, guide, tokens.sums))
    app.add_middleware(
        Bounds, engine=engine, any_host=settings.http_insecure or settings.http_routable
    )
    app.openapi = lambda: describe(app)  # type: ignore[method-assign]
    return app


def describe(app: FastAPI) -> dict[str, Any]:
    """Return the OpenAPI description of ``app``: FastAPI's, with our problem documents in place of
    its own errors.
    """
    if app.openapi_schema is None:
        found = get_openapi(title=app.title, version=app.version, routes=app.routes)
        schemas = found["components"]["schemas"]
        for name in ("HTTPValidationError", "ValidationError"):
            schemas.pop(name, None)
        schemas[problems.Problem.__name__] = problems.Problem.model_json_schema()
        found["components"]["schemas"] = dict(sorted(schemas.items()))
        for operations in found["paths"].values():
            for operation in operations.values():
                operation["responses"].pop("422", None)
        app.openapi_schema = found
    return app.openapi_schema


def _operation(route: APIRoute) -> str:
    return route.name
