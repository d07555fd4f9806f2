"""The announcement and the warnings that `tandem serve` prints at its start."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Mapping
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import msgspec

from deploy.resources import choose_threads
from protocol.config import ServeConfig
from protocol.ports import http_url, is_loopback, is_wildcard
from protocol.version import version
from worker.cores import host_cores

if TYPE_CHECKING:
    from deploy.routers.pool import Routers
    from router.reading.prepared import GenerationDefaults

log = logging.getLogger(__name__)


def announcement(config: ServeConfig, server: Routers, url: str, defaults: GenerationDefaults) -> str:
    """Return the start message: a line for each worker, a command to try, and the address."""
    lines = [f"Tandem {version()} serves {config.model_name}"]
    if config.ray_address is None:
        threads, why = choose_threads(config, host_cores())
        lines[0] += f", threads per worker: {threads} ({why})"
    for worker_id, start_up in server.start_ups().items():
        where = "" if config.ray_address is None else " on {host}, threads: {threads}".format_map(start_up)
        lines.append(f"  {worker_id}{where}: {_summary(start_up)}")
    if sampling := defaults.shown():
        listed = ", ".join(f"{name} {value}" for name, value in sampling.items())
        lines.append(f"Requests' defaults (--generation-config {config.generation_config}): {listed}")
    lines.append(f"Try:  {curl_line(config, url)}")
    lines.append(f"Listening on {url}  (a playground at {url}/, API below /v1, its documentation at /docs)")
    return "\n".join(lines)


def reachable_url(config: ServeConfig, url: str, link_host: str) -> str:
    """Return the URL at which other hosts of the cluster reach a server that listens on all addresses."""
    if config.ray_address is None or not is_wildcard(config.host):
        return url
    return http_url(config, link_host, urlsplit(url).port or config.port)


def _summary(start_up: Mapping[str, str]) -> str:
    chosen = [start_up[name] for name in ("device", "forward", "kv_pool") if name in start_up]
    speculation = start_up.get("speculation", "none").partition(" (")[0]
    if speculation != "none":
        chosen.append(f"speculates by {speculation}")
    return "; ".join(chosen)


def curl_line(config: ServeConfig, url: str) -> str:
    body = {
        "model": config.model_name,
        "prompt": "def read_file(path):\n",
        "max_tokens": 64,
        "temperature": 0,
    }
    parts = ["curl", f"{url}/v1/completions", "-H", "Content-Type: application/json"]
    if config.needs_api_key:
        parts += ["-H", "Authorization: Bearer <API key>"]
    return shlex.join([*parts, "-d", msgspec.json.encode(body).decode()])


def warn_of_exposure(config: ServeConfig) -> None:
    if is_loopback(config.host):
        return
    where = f"HTTP on {config.host}"
    if not config.needs_api_key:
        log.warning("%s takes requests of everybody: set TANDEM_API_KEY or --api-key-file", where)
    elif config.tls_cert is None:
        log.warning("%s is not encrypted, and API keys can be read on the way: see --tls-cert", where)
