"""Refusals in OpenAI's form, `{"error": {message, type, param, code}}`, whichever layer found the fault."""

from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    429: "rate_limit_error",
}


class ApiError(Exception):
    """A request that is refused: HTTP status, what is wrong, what to do, and which parameter it is about."""

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
        self.status, self.message, self.param, self.code, self.headers = status, message, param, code, headers


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A 400 that names the parameter at fault."""
    return ApiError(400, message, param=param, code=code)


def error_body(status: int, message: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """The body of a refusal; also the event that ends a stream which fails midway."""
    kind = TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def install(app: FastAPI) -> None:
    """Make every refusal of `app` speak OpenAI's form, FastAPI's own included."""
    app.exception_handler(ApiError)(_refuse)
    app.exception_handler(RequestValidationError)(_invalid)
    app.exception_handler(HTTPException)(_http)
    app.exception_handler(Exception)(_defect)


async def _refuse(request: Request, error: ApiError) -> JSONResponse:
    return _reply(error.status, error.message, error.param, error.code, error.headers)


async def _invalid(request: Request, error: RequestValidationError) -> JSONResponse:
    """The first problem of a body that does not fit its model. Its input is private, and is not repeated."""
    problem = error.errors()[0]
    if problem["type"] == "json_invalid":
        where = f"{problem['ctx']['error']} at character {problem['loc'][-1]}"
        return _reply(400, f"the body is not JSON: {where}")
    param = _param(problem["loc"])
    if problem["type"] == "extra_forbidden":
        return _reply(400, f"unknown parameter: {param}; redraft refuses what it would have to ignore", param)
    message = problem["msg"].removeprefix("Value error, ")
    return _reply(400, f"{param or 'the body'}: {message}", param)


async def _http(request: Request, error: HTTPException) -> JSONResponse:
    return _reply(error.status_code, error.detail, headers=error.headers)


async def _defect(request: Request, error: Exception) -> JSONResponse:
    """A fault of ours: the traceback goes to the server's log, not to the client."""
    return _reply(500, "redraft failed on this request; see the server's log")


def _param(location: Sequence[str | int]) -> str | None:
    """Pydantic's location as a client would write it: `messages.0.content`, `x-redraft-tenant`.

    Below a union the steps name its branches (`str`, `list[...]`), not fields, and are left out.
    """
    inner = takewhile(lambda step: isinstance(step, int) or _is_field(step), location[2:])
    return ".".join(str(step) for step in (*location[1:2], *inner)) or None


def _is_field(step: str) -> bool:
    return step.isidentifier() and step.islower() and step not in {"str", "int"}


def _reply(
    status: int,
    message: str,
    param: str | None = None,
    code: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> JSONResponse:
    return JSONResponse(error_body(status, message, param, code), status, headers)
