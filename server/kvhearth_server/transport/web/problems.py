"""Errors over HTTP: RFC 9457 documents with the reasons of the error table, each one counted."""

from __future__ import annotations

from functools import partial
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException

from kvhearth.errors import KVHearthError, Reason
from kvhearth_server.engine.engine import Engine
from kvhearth_server.observability.logs import get_logger
from kvhearth_server.transport.messages import plain_error, plain_text

CONTENT_TYPE = "application/problem+json"
RETRY_AFTER_S = 1
_TYPE = "urn:kvhearth:reason:"
_log = get_logger("kvhearth.http")


class Problem(BaseModel):
    """An error in the form of RFC 9457."""

    type: str = Field(description="urn:kvhearth:reason: and the reason.")
    title: str = Field(description="The HTTP status in words.")
    status: int = Field(description="The HTTP status.")
    detail: str = Field(description="What was wrong and what to do about it.")
    reason: str = Field(description="The stable word of the error table.")
    details: dict[str, str] = Field(description="Further facts.")


def problem_of(
    error: KVHearthError, *, status: int | None = None, headers: dict[str, str] | None = None
) -> JSONResponse:
    """Return the response for a domain error; ``status`` overrides the default where HTTP has a
    more fitting one.
    """
    plain = plain_error(error)
    code = status or plain.status.http
    problem = Problem(
        type=f"{_TYPE}{plain.reason}",
        title=HTTPStatus(code).phrase,
        status=code,
        detail=plain.message,
        reason=str(plain.reason),
        details=plain.details,
    )
    if code == HTTPStatus.SERVICE_UNAVAILABLE:
        headers = {"retry-after": str(RETRY_AFTER_S), **(headers or {})}
    return JSONResponse(problem.model_dump(), code, headers, CONTENT_TYPE)


def refusal(engine: Engine, error: KVHearthError, **how: Any) -> JSONResponse:
    """Count a refusal and return its response; see ``problem_of``."""
    engine.counters.add("refusals", 1, str(error.reason))
    return problem_of(error, **how)


def install(app: FastAPI, engine: Engine) -> None:
    """Make every error of ``app`` end as a problem document, and count it."""
    refuse = partial(refusal, engine)

    async def domain(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, KVHearthError)
        return refuse(error)

    async def invalid(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        message = "; ".join(
            f"{'.'.join(str(part) for part in one['loc'])}: {one['msg']}"
            for one in error.errors()[:8]
        )
        return refuse(KVHearthError(Reason.BAD_MESSAGE, message))

    async def plain_http(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        if error.status_code == HTTPStatus.NOT_FOUND:
            # Browsers ask for icons and people mistype paths: no refusal that anyone must see.
            missing = f"there is nothing at {plain_text(request.url.path, 200)}; see /docs"
            return problem_of(KVHearthError(Reason.NO_SUCH_PATH, missing))
        where = plain_text(f"{request.method} {request.url.path}", 200)
        late = error.status_code == HTTPStatus.REQUEST_TIMEOUT
        reason = Reason.DEADLINE if late else Reason.BAD_MESSAGE
        refusal = KVHearthError(reason, f"{where}: {str(error.detail).lower()}")
        return refuse(refusal, status=error.status_code, headers=dict(error.headers or {}))

    async def bug(_: Request, error: Exception) -> JSONResponse:
        _log.error("http.failed", exc_info=error)
        return refuse(KVHearthError(Reason.INTERNAL, "the request failed; see the daemon's log"))

    app.add_exception_handler(KVHearthError, domain)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, plain_http)
    app.add_exception_handler(Exception, bug)
