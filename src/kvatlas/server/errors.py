"""Errors as OpenAI's API shapes them: malformed requests, refused ones, and those that failed."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from kvatlas.core import KvatlasError
from kvatlas.server.answers import error
from kvatlas.service import BusyError, ClosedError
from kvatlas.service.request_validation import LengthError

#: Seconds after which a refused client is advised to try again.
RETRY_AFTER = "1"


def answer_errors_as_openai_does(app: FastAPI) -> None:
    """Register what answers malformed, refused and failed requests."""

    def answer(status: int, body: Any, headers: Any = None) -> JSONResponse:
        return JSONResponse(body, status, headers)

    @app.exception_handler(RequestValidationError)
    async def malformed(_: Request, found: RequestValidationError) -> JSONResponse:
        first = found.errors()[0]
        place = [str(part) for part in first["loc"] if part != "body"]
        reason = str(first["msg"]).removeprefix("Value error, ")
        if first["type"] == "value_error":
            name, sentence = reason.partition(" ")[0], f"{reason}."
        elif first["type"] == "extra_forbidden":
            name, sentence = ".".join(place), f"{'.'.join(place)} is not known."
        else:
            name = ".".join(place)
            sentence = f"{name or 'The body'}: {reason}."
        return answer(400, error(sentence, param=name or None))

    @app.exception_handler(KvatlasError)
    async def refused(_: Request, found: KvatlasError) -> JSONResponse:
        if isinstance(found, BusyError):
            body = error(str(found), "rate_limit_error", code="rate_limit_exceeded")
            return answer(429, body, {"Retry-After": RETRY_AFTER})
        if isinstance(found, ClosedError):
            return answer(503, error(str(found), "server_error"), {"Retry-After": RETRY_AFTER})
        long = isinstance(found, LengthError)
        return answer(400, error(str(found), code="context_length_exceeded" if long else None))

    @app.exception_handler(HTTPException)
    async def failed(_: Request, found: HTTPException) -> JSONResponse:
        kinds = {404: "not_found_error", 503: "server_error"}
        body = error(str(found.detail), kinds.get(found.status_code, "invalid_request_error"))
        return answer(found.status_code, body, found.headers)
