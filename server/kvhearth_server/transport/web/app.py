"""The HTTP application: its routes, its errors, its description."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute

from kvhearth_server.config import Settings
from kvhearth_server.engine.engine import Engine
from kvhearth_server.transport.web import problems
from kvhearth_server.transport.web.bounds import Bounds
from kvhearth_server.transport.web.operators import admin_routes, problem_responses, state_routes
from kvhearth_server.transport.web.probes import probe_routes

API_VERSION = "1"


def make_app(engine: Engine, settings: Settings, admin_token: str) -> FastAPI:
    """The application over an engine; all of it runs on the engine's loop."""
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
    app.include_router(probe_routes(engine))
    app.include_router(state_routes(engine))
    app.include_router(admin_routes(engine, settings, admin_token))
    app.add_middleware(Bounds, engine=engine, any_host=settings.http_insecure)
    app.openapi = lambda: describe(app)  # type: ignore[method-assign]
    return app


def describe(app: FastAPI) -> dict[str, Any]:
    """OpenAPI of ``app``: FastAPI's, with our problem documents in the place of its own errors."""
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
