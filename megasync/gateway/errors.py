"""Errors in the form that the `openai` package expects: a status, and JSON with a message and the parameter."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from megasync.errors import ContextLengthExceeded, DataError, ServerError, TemplateRefused


class RequestError(Exception):
    """A refused request. `param` names the offending parameter; `code` is a machine-readable reason."""

    def __init__(self, status: int, message: str, *, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param

    def body(self) -> dict[str, Any]:
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


def as_request_error(error: Exception) -> RequestError:
    """Converts any error of a request into the RequestError that the agent receives."""
    match error:
        case RequestError():
            return error
        case ContextLengthExceeded():
            return RequestError(400, str(error), code="context_length_exceeded", param="messages")
        case TemplateRefused():
            return RequestError(400, str(error), code="template_refused", param="messages")
        case DataError():
            return RequestError(400, str(error))
        case ServerError():
            return RequestError(503, str(error), code="server_failed")
        case web.HTTPRequestEntityTooLarge():
            return RequestError(413, f"{error.text}; raise rollout.gateway.body_mb", code="body_too_large")
        case ConnectionError():
            return RequestError(499, f"the agent closed the connection: {error}")
    return RequestError(500, f"{type(error).__name__}: {error}")
