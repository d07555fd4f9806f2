"""Keeps other sites' web pages away from a server that needs no API key.

A page can have its visitor's browser send requests to any address that the browser reaches, also to
loopback. Browsers name the page's site in `Origin`, and a host name that was made to resolve to loopback
(DNS rebinding) appears in `Host`.
"""

from __future__ import annotations

import ipaddress
from functools import lru_cache
from urllib.parse import urlsplit

from starlette.datastructures import Headers

from protocol.ports import is_loopback
from router.errors import ApiError

_READS = ("GET", "HEAD", "OPTIONS")
_REMEDY = "or start the server with API keys (--api-key-file)"


class BrowserGuard:
    """Checks requests' `Host` and `Origin` headers. `host` is the address that HTTP listens on."""

    def __init__(self, host: str) -> None:
        self._is_loopback = is_loopback(host)

    def check(self, method: str, headers: Headers) -> None:
        """Raises `ApiError` 403 if the request may come from another site's page."""
        host = headers.get("host", "")
        if self._is_loopback and not _is_local(host):
            raise ApiError(403, f"Host: {host[:128]!r} is not this host: ask for localhost, {_REMEDY}")
        origin = headers.get("origin")
        if origin is not None and method not in _READS and origin.partition("://")[2] != host:
            page = f"Origin: a page of {origin[:128]!r}"
            raise ApiError(403, f"{page} may not use this server: use the server's own, {_REMEDY}")


@lru_cache(maxsize=64)
def _is_local(host: str) -> bool:
    """Return whether `host` is an IP address or a local name: strangers can only make a name with a dot
    resolve to this host.
    """
    try:
        name = urlsplit(f"//{host}").hostname or ""
        if "." not in name or name.endswith(".localhost"):
            return True
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
