"""Every error that leaves the server, in OpenAI's shape: {"error": {"message", "type", "param", "code"}}.

A body never holds a traceback, and never grows with the request that caused it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from jaxserve.types import EngineDead, InvalidRequest

log = logging.getLogger("jaxserve.server")

MAX_MESSAGE = 2000
"""Characters of an error message that leave."""

_TYPES = {401: "authentication_error", 404: "not_found_error", 500: "server_error", 503: "service_unavailable"}


class ErrorBody(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(msgspec.Struct, frozen=True):
    error: ErrorBody


class ApiError(Exception):
    """An answer that is an error. `param` names the request's field, `code` is for programs."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = headers

    @property
    def type(self) -> str:
        return _TYPES.get(self.status, "invalid_request_error")


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """The caller's mistake: status 400."""
    return ApiError(400, message, param=param, code=code)


def as_api_error(error: BaseException) -> ApiError:
    """What a caller is told about `error`; one that nobody expected is logged, and told as 500 without details."""
    match error:
        case ApiError():
            return error
        case InvalidRequest():
            return bad_request(str(error), error.param)
        case EngineDead():
            return ApiError(503, "the engine has failed; the server is going down", code="engine_dead")
        case HTTPException(status_code=404):
            return ApiError(404, "unknown URL", code="unknown_url")
        case HTTPException(status_code=405):
            headers = dict(error.headers or {})
            return ApiError(405, "this URL does not take that method", code="method_not_allowed", headers=headers)
        case HTTPException():
            return ApiError(error.status_code, str(error.detail))
        case _:
            log.error("a request failed unexpectedly", exc_info=error)
            return ApiError(500, "the server failed to answer this request; its log says why", code="internal_error")


def error_json(error: ApiError) -> bytes:
    """The body."""
    message = error.message
    if len(message) > MAX_MESSAGE:
        message = message[:MAX_MESSAGE] + "..."
    body = ErrorBody(
        message=message.encode("utf-8", "replace").decode(), type=error.type, param=error.param, code=error.code
    )
    return msgspec.json.encode(ErrorReply(body))


def error_response(error: ApiError) -> Response:
    headers = dict(error.headers) if error.headers else None
    return Response(error_json(error), error.status, headers, media_type="application/json")


async def handle(_request: Request, error: Exception) -> Response:
    """For Starlette's table of exception handlers."""
    return error_response(as_api_error(error))
