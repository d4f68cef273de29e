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
    async def malformed(_: Request, refusal: RequestValidationError) -> JSONResponse:
        first = refusal.errors()[0]
        location = [str(part) for part in first["loc"] if part != "body"]
        reason = str(first["msg"]).removeprefix("Value error, ")
        if first["type"] == "value_error":
            name, sentence = reason.partition(" ")[0], f"{reason}."
        elif first["type"] == "extra_forbidden":
            name, sentence = ".".join(location), f"{'.'.join(location)} is not known."
        else:
            name = ".".join(location)
            sentence = f"{name or 'The body'}: {reason}."
        return answer(400, error(sentence, param=name or None))

    @app.exception_handler(KvatlasError)
    async def refused(_: Request, refusal: KvatlasError) -> JSONResponse:
        if isinstance(refusal, BusyError):
            body = error(str(refusal), "rate_limit_error", code="rate_limit_exceeded")
            return answer(429, body, {"Retry-After": RETRY_AFTER})
        if isinstance(refusal, ClosedError):
            return answer(503, error(str(refusal), "server_error"), {"Retry-After": RETRY_AFTER})
        long = isinstance(refusal, LengthError)
        return answer(400, error(str(refusal), code="context_length_exceeded" if long else None))

    @app.exception_handler(HTTPException)
    async def failed(_: Request, refusal: HTTPException) -> JSONResponse:
        kinds = {404: "not_found_error", 503: "server_error"}
        body = error(str(refusal.detail), kinds.get(refusal.status_code, "invalid_request_error"))
        return answer(refusal.status_code, body, refusal.headers)
