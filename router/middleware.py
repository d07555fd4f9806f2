"""Around every request: its id, the API key, the answer to what goes wrong, a count of the statuses."""

from __future__ import annotations

import hmac
import logging
import re
import secrets

from protocol.errors import InvalidRequestError
from router.errors import CLIENT_CLOSED_REQUEST, ApiError, invalid_request
from router.exchange import REQUEST_ID_KEY, ClientGoneError, Message, Receive, Scope, Send, header, send_error
from router.metrics import Metrics

logger = logging.getLogger(__name__)

_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}\Z")
_PROTECTED = ("/v1/", "/tokenize", "/detokenize")


class Envelope:
    """Outermost layer of the application, plain ASGI."""

    def __init__(self, app: object, metrics: Metrics, api_key: str | None) -> None:
        self._app = app
        self._metrics = metrics
        self._api_key = api_key.encode() if api_key is not None else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)  # type: ignore[operator]
            return
        request_id = _request_id(scope)
        scope[REQUEST_ID_KEY] = request_id
        id_header = (b"x-request-id", request_id.encode())
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], id_header]
            await send(message)

        try:
            self._check_key(scope)
            await self._app(scope, receive, send_with_id)  # type: ignore[operator]
        except ClientGoneError:
            status = CLIENT_CLOSED_REQUEST
        except Exception as error:
            if status:
                raise
            await send_error(send_with_id, self._as_api_error(error, request_id))
        finally:
            self._metrics.http_response(status or CLIENT_CLOSED_REQUEST)

    def _as_api_error(self, error: Exception, request_id: str) -> ApiError:
        if isinstance(error, ApiError):
            return error
        if isinstance(error, InvalidRequestError):
            return invalid_request(error)
        logger.error("request %s failed", request_id, exc_info=error)
        return ApiError(500, "internal error; the server's log has the details")

    def _check_key(self, scope: Scope) -> None:
        if self._api_key is None or not scope["path"].startswith(_PROTECTED):
            return
        scheme, _, token = (header(scope, b"authorization") or b"").partition(b" ")
        if scheme.lower() != b"bearer" or not hmac.compare_digest(token.strip(), self._api_key):
            raise ApiError(
                401,
                "a valid API key is needed, as `Authorization: Bearer <key>`",
                code="invalid_api_key",
                headers=((b"www-authenticate", b"Bearer"),),
            )


def _request_id(scope: Scope) -> str:
    """The client's, if it is short and printable; else a new one."""
    given = header(scope, b"x-request-id")
    if given is not None and _REQUEST_ID.match(given):
        return given.decode("ascii")
    return secrets.token_hex(16)
