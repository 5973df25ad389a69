"""The endpoints: OpenAI's, the memories', explanations, health, metrics, and the playground. The
only file that imports FastAPI.

https://platform.openai.com/docs/api-reference
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from functools import partial
from typing import Any, Final

from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException as StarletteHTTPException

from knn_moe.serve.answering import Answering
from knn_moe.serve.answers import Formatter
from knn_moe.serve.guard import Receive, Scope, Send, read_json, send_events, while_connected
from knn_moe.serve.metrics import CONTENT_TYPE
from knn_moe.serve.playground import playground
from knn_moe.serve.refused import RefusedError
from knn_moe.serve.requests import parse_explanation, parse_request
from knn_moe.serve.service import Service
from knn_moe.serve.text import Piece

_GONE: Final = 499  # a client that does not wait for the status


def make_app(service: Service) -> FastAPI:
    """Return the endpoints of a service."""
    app = FastAPI(title="knn-moe", docs_url=None, redoc_url=None, openapi_url=None)
    app.router.redirect_slashes = False
    _handle_errors(app, service)
    _add_answers(app, service)
    _add_explanations(app, service)
    _add_models(app, service)

    @app.get("/health")
    async def health() -> Response:
        """Say whether requests are taken."""
        well = service.engine.failure is None and not service.draining
        return JSONResponse({"status": "ok" if well else "stopping"}, 200 if well else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        """Return the metrics, for Prometheus."""
        return Response(service.metrics.render(), media_type=CONTENT_TYPE)

    return app


def _handle_errors(app: FastAPI, service: Service) -> None:
    @app.exception_handler(RefusedError)
    async def refuse(request: Request, error: RefusedError) -> Response:
        service.metrics.on_refused(error.status)
        return JSONResponse(error.to_dict(), error.status, headers=dict(error.headers))

    @app.exception_handler(StarletteHTTPException)
    async def refuse_path(request: Request, error: HTTPException) -> Response:
        message = f"There is no {request.method} {request.url.path[:100]}."
        refused = RefusedError(message, status=error.status_code)
        return JSONResponse(refused.to_dict(), refused.status)

    @app.exception_handler(Exception)
    async def fail(request: Request, error: Exception) -> Response:
        refused = RefusedError("The server failed. Its log says why.", status=500)
        return JSONResponse(refused.to_dict(), refused.status)


def _add_answers(app: FastAPI, service: Service) -> None:
    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        """Answer a conversation."""
        return await _answer(service, request, chat=True)

    @app.post("/v1/completions")
    async def complete(request: Request) -> Response:
        """Continue texts."""
        return await _answer(service, request, chat=False)


def _add_explanations(app: FastAPI, service: Service) -> None:
    shown = playground()

    @app.get("/")
    async def page() -> Response:
        """Return the playground."""
        return Response(shown.html, media_type="text/html; charset=utf-8", headers=shown.headers)

    @app.get("/favicon.ico")
    async def icon() -> Response:
        """Return nothing: browsers ask for it, and would log an error."""
        return Response(status_code=204)

    @app.post("/v1/explain")
    async def explain(request: Request) -> Response:
        """Explain what a memory did in an answer."""
        try:
            most = service.config.limits.request_bytes
            asked = parse_explanation(await read_json(request.scope, request.receive, most))
            told = await while_connected(request.receive, service.explain(asked))
            return JSONResponse(told)
        except ConnectionResetError:
            return Response(status_code=_GONE)


def _add_models(app: FastAPI, service: Service) -> None:
    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        """List the model and its memories."""
        return {"object": "list", "data": service.models()}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        """Describe one of them."""
        return service.model(name)

    @app.post("/v1/load_memory")
    async def load(request: Request) -> dict[str, Any]:
        """Load a memory from the folder of --allow-loading."""
        name, folder = await _texts(service, request, "name", "folder")
        await asyncio.to_thread(service.load_from_folder, name, folder)
        return service.model(name)

    @app.post("/v1/unload_memory")
    async def unload(request: Request) -> dict[str, Any]:
        """Unload a memory, when the requests that use it have ended."""
        (name,) = await _texts(service, request, "name")
        await asyncio.to_thread(service.unload, name)
        return {"id": name, "object": "model", "deleted": True}


async def _texts(service: Service, request: Request, *names: str) -> list[str]:
    """Return the texts of a JSON object that has these and no others."""
    most = service.config.limits.request_bytes
    body = await read_json(request.scope, request.receive, most)
    good = isinstance(body, dict) and set(body) == set(names)
    if not isinstance(body, dict) or not good:
        raise RefusedError(f"Send a JSON object with {' and '.join(map(repr, names))}.")
    values = [body[name] for name in names]
    for name, value in zip(names, values, strict=True):
        if not isinstance(value, str) or not value.isprintable():
            raise RefusedError(f"{name!r} must be a text.", param=name)
    return values


async def _answer(service: Service, request: Request, *, chat: bool) -> Response:
    try:
        most = service.config.limits.request_bytes
        asked = parse_request(await read_json(request.scope, request.receive, most), chat=chat)
        if service.draining:
            raise RefusedError("The server is stopping.", status=503, code="stopping")
        answering = await service.answering(asked)
        formatter = Formatter(answering, service.tokenizer)
        end = partial(service.engine.cancel, answering.jobs)
        if asked.stream:
            return _Stream(_chunks(service, answering, formatter), end)
        try:
            pieces = await while_connected(request.receive, _collect(service, answering))
        finally:
            end()
        return JSONResponse(formatter.whole(pieces))
    except ConnectionResetError:
        return Response(status_code=_GONE)


async def _collect(service: Service, answering: Answering) -> list[tuple[int, Piece]]:
    async with aclosing(answering.pieces(service.engine.cancel)) as pieces:
        return [piece async for piece in pieces]


async def _chunks(
    service: Service, answering: Answering, formatter: Formatter
) -> AsyncGenerator[dict[str, Any]]:
    """Yield the chunks of a stream. What fails after its beginning is told in it."""
    try:
        async with aclosing(answering.pieces(service.engine.cancel)) as pieces:
            for chunk in formatter.first():
                yield chunk
            async for index, piece in pieces:
                found = formatter.chunk(index, piece)
                if found is not None:
                    yield found
        last = formatter.last()
        if last is not None:
            yield last
    except RefusedError as error:
        service.metrics.on_refused(error.status)
        yield error.to_dict()


class _Stream(Response):
    """A stream of chunks, which ends when its client goes away. `end` ends what makes them."""

    def __init__(self, chunks: AsyncGenerator[dict[str, Any]], end: Callable[[], None]) -> None:
        super().__init__()
        self._chunks = chunks
        self._end = end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_connected(receive, send_events(send, self._chunks))
        finally:
            self._end()
