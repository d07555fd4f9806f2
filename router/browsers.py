"""Keeps web pages of others away from a server that asks for no API key.

A page may have its visitor's browser send requests to any address that this can reach, also to loopback.
Browsers tell whose page it is (`Origin`), and a name that was made to point at loopback shows as `Host` (DNS
rebinding).
"""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit

from starlette.datastructures import Headers

from protocol.addresses import is_loopback
from router.errors import ApiError

_READS = ("GET", "HEAD", "OPTIONS")
_REMEDY = "or start the server with API keys (--api-key-file)"


class BrowserGuard:
    """`host` is what HTTP listens on."""

    def __init__(self, host: str) -> None:
        self._is_loopback = is_loopback(host)

    def check(self, method: str, headers: Headers) -> None:
        """Raises `ApiError` 403."""
        host = headers.get("host", "")
        if self._is_loopback and not _is_local(host):
            raise ApiError(403, f"Host: {host[:128]!r} is not this host: ask for localhost, {_REMEDY}")
        origin = headers.get("origin")
        if origin is not None and method not in _READS and origin.partition("://")[2] != host:
            page = f"Origin: a page of {origin[:128]!r}"
            raise ApiError(403, f"{page} may not use this server: use the server's own, {_REMEDY}")


def _is_local(host: str) -> bool:
    """Strangers can make a name with a dot point here, but no address, and no name within this network."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
        if "." not in name or name.endswith(".localhost"):
            return True
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
