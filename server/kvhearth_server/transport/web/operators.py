"""What operators read and do: state, actions, debugging."""

from __future__ import annotations

import hmac
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Path, Request
from fastapi.responses import PlainTextResponse
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from kvhearth.errors import KVHearthError, Reason
from kvhearth_server.config import Settings
from kvhearth_server.engine import portions
from kvhearth_server.engine.engine import Engine
from kvhearth_server.transport.audit import audited, refused
from kvhearth_server.transport.web import models, views
from kvhearth_server.transport.web.problems import CONTENT_TYPE, Problem

_BEARER = HTTPBearer(auto_error=False, description="The content of admin.token.")
Credentials = Annotated[HTTPAuthorizationCredentials | None, Depends(_BEARER)]
Digest = Annotated[
    str, Path(description="Digest of the namespace, 64 hex digits.", pattern="^[0-9a-f]{64}$")
]


def _caller(request: Request) -> str:
    return f"{request.client.host}:{request.client.port}" if request.client else ""


Caller = Annotated[str, Depends(_caller)]


def problem_responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """What OpenAPI says of refusals."""
    content = {CONTENT_TYPE: {"schema": {"$ref": f"#/components/schemas/{Problem.__name__}"}}}
    return {status: {"description": "Refused.", "content": content} for status in statuses}


def state_routes(engine: Engine) -> APIRouter:
    """What anybody may read who reaches the address."""
    router = APIRouter(prefix="/v1", tags=["state"])

    @router.get("/stats")
    async def stats() -> models.Stats:
        """The daemon in numbers."""
        return views.stats(engine)

    @router.get("/sessions")
    async def sessions() -> models.Sessions:
        """Processes that are attached, or left and may still be writing."""
        return views.sessions(engine)

    @router.get("/namespaces")
    async def namespaces() -> models.Namespaces:
        """Tenants' contracts, and what is stored under them."""
        return views.namespaces(engine)

    @router.get("/leases")
    async def leases() -> models.Leases:
        """What readers hold, by group."""
        return views.leases(engine)

    return router


def admin_routes(engine: Engine, settings: Settings, admin_token: str) -> APIRouter:
    """What needs the admin token: actions, settings, debugging."""

    async def admitted(given: Credentials, caller: Caller) -> None:
        token = given.credentials if given else ""
        if not hmac.compare_digest(token.encode(), admin_token.encode()):
            refused("http", caller)
            raise KVHearthError(
                Reason.NOT_ADMIN,
                "send the content of admin.token of the socket directory as a bearer token",
            )

    router = APIRouter(
        tags=["admin"], dependencies=[Depends(admitted)], responses=problem_responses(403)
    )
    boot_id = engine.boot_id

    @router.get("/v1/config")
    async def config() -> models.Config:
        """The settings in effect."""
        return models.Config(boot_id=boot_id, settings=views.masked(settings))

    @router.post("/v1/namespaces/{ns}:evict", responses=problem_responses(404, 409))
    async def evict(
        ns: Digest, caller: Caller, request: models.EvictRequest | None = None
    ) -> models.Evicted:
        """Remove blocks of a namespace, coldest first: all that nobody holds, or down to a size."""
        keep_bytes, tier = (request.keep_bytes, request.tier) if request else (0, None)
        asked = {"namespace": ns, "keep_bytes": keep_bytes, "tier": tier}
        with audited("evict", "http", caller, **asked) as told:
            removed = await portions.evict(engine, bytes.fromhex(ns), keep_bytes, tier)
            told |= {"evicted_blocks": removed.memory, "ssd_blocks": removed.ssd}
        return models.Evicted(
            boot_id=boot_id, evicted_blocks=removed.memory, ssd_blocks=removed.ssd
        )

    @router.post("/v1/namespaces/{ns}:bump-epoch", responses=problem_responses(404, 409))
    async def bump_epoch(
        ns: Digest, caller: Caller, request: models.BumpRequest | None = None
    ) -> models.Bumped:
        """Make all blocks of a namespace invalid at once: its weights have changed."""
        expected = request.expected_epoch if request else None
        with audited("forget", "http", caller, namespace=ns) as told:
            epoch = told["epoch"] = await portions.forget(engine, bytes.fromhex(ns), expected)
        return models.Bumped(boot_id=boot_id, epoch=epoch)

    @router.post("/v1/admin:drain")
    async def drain(caller: Caller) -> models.Drained:
        """Take no stores and attaches any more, as before a shutdown."""
        with audited("drain", "http", caller):
            engine.drain()
        return models.Drained(boot_id=boot_id, draining=True)

    @router.get("/debug/books")
    async def books() -> models.Books:
        """Recount everything, some at a time: the daemon answers others in between."""
        error = await portions.check_books(engine)
        return models.Books(boot_id=boot_id, balanced=not error, error=error)

    @router.get("/debug/stacks", response_class=PlainTextResponse)
    async def stacks() -> str:
        """Where every thread and task is."""
        return views.stacks()

    return router
