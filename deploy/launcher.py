"""Runs the routers in the main thread, Ray and its workers in another, announces them, and ends all."""

from __future__ import annotations

import json
import logging
import os
import shlex
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import msgspec

from deploy.processes import Patience, complain, end_descendants, kill_descendants, leave_unready
from deploy.ray_cluster import HeadWatch, RayCluster
from deploy.resources import choose_threads, may_use_gpu
from deploy.routers.pool import RouterPool, Routers
from deploy.template.client import TemplateClient
from messaging.sockets import ClusterKeys
from native.process import freeze_heap
from protocol.config import ServeConfig
from protocol.errors import TandemError
from protocol.logs import say
from protocol.ports import http_url, is_loopback, is_wildcard
from protocol.speculation import DEFAULT_SPECULATION
from protocol.version import version
from router.server import RouterServer
from worker.cores import host_cores

if TYPE_CHECKING:
    from router.reading.prepared import GenerationDefaults

log = logging.getLogger(__name__)


class Launcher(threading.Thread):
    """The thread of the cluster, alive as long as it. `failure` says why the cluster ended without `stop`.

    Calls `on_ready` when every worker has registered, and `on_failure` when the cluster ends by itself: twice
    if running requests are lost.
    """

    def __init__(
        self,
        config: ServeConfig,
        keys: ClusterKeys,
        server: Routers,
        cluster: RayCluster,
        template: TemplateClient,
        on_ready: Callable[[], None],
        on_failure: Callable[[], None],
    ) -> None:
        super().__init__(name="launcher", daemon=True)
        self._config = config
        self._keys = keys
        self._server = server
        self._on_ready = on_ready
        self._on_failure = on_failure
        self.cluster = cluster
        self._template = template
        self._stop_requested = threading.Event()
        self._watch: HeadWatch | None = None
        self.failure: str | None = None

    def stop(self) -> None:
        """End the workers and Ray. Any thread may call it."""
        self._stop_requested.set()

    def run(self) -> None:
        try:
            self.cluster.start(self._stop_requested)
            if self.cluster.head is not None:
                self._watch = HeadWatch(*self.cluster.head, self._on_head_lost)
                self._watch.start()
            self._server.restore_signals()  # Ray's own handler prints a trace of the C stack at SIGTERM
            self._supervise()
        except TandemError as error:
            self.failure = str(error)
        except Exception as error:
            log.exception("the launcher failed")
            self.failure = f"{type(error).__name__}: {error}"
        finally:
            if self.failure is not None and not self._stop_requested.is_set():
                self._on_failure()
            if self._watch is not None:
                self._watch.stop()
            self.cluster.stop()
            self._template.close()

    def _on_head_lost(self, reason: str) -> None:
        """Stop the server at once, from the watch's thread: the launcher's thread may hang in Ray."""
        self.failure, self.cluster.has_died = reason, True
        self._stop_requested.set()
        self._on_failure()
        self._on_failure()

    def _supervise(self) -> None:
        if self._stop_requested.is_set():
            return
        from deploy.supervisor import Supervisor

        parts = (self._config, self._keys, self._server, self.cluster)
        Supervisor(*parts, self._stop_requested, self._on_ready).run()


LAUNCHER_GRACE_S = 20.0
"""Seconds that Ray and the workers get to end before they are killed."""

START_GRACE_S = 0.5
"""Seconds that Ray and the workers get if the server was not ready yet."""

DESCENDANTS_GRACE_S = 2.0


def run(
    config: ServeConfig,
    defaults: GenerationDefaults,
    cluster: RayCluster,
    template: TemplateClient,
    patience: Patience,
) -> int:
    """Serve a checked configuration until a signal or a failure. Returns the process' exit code."""
    keys = ClusterKeys.generate()
    link_host = cluster.link_host()
    if cluster.is_local and config.forks_workers:
        # The model is loaded while the router reads the tokenizer and Ray starts. With "auto" the template
        # would wait until Ray has counted the GPUs.
        template.preload(config if may_use_gpu(config) else replace(config, device="cpu"))
    server = _routers(config, keys, link_host)
    warn_of_exposure(config)
    ready = threading.Event()

    def announce() -> None:
        ready.set()
        url = reachable_url(config, server.url, link_host)
        say(config.log_format, announcement(config, server, url, defaults), url=url, model=config.model_name)
        freeze_heap()  # now with Ray's modules

    def on_signal() -> None:
        if not ready.is_set():
            server.stop()  # makes the next call the second one, which waits for nothing
        elif not patience.asked:
            log.info("stopping; running requests get %g s (--shutdown-timeout)", config.shutdown_timeout)
        patience.asked = True
        server.stop()

    launcher = Launcher(config, keys, server, cluster, template, on_ready=announce, on_failure=server.stop)

    def start() -> None:
        patience.started = True
        say(config.log_format, f"Starting {config.model_name}, workers: {config.num_workers} ...")
        launcher.start()

    freeze_heap()
    try:
        server.run(on_start=start, on_signal=on_signal)
    finally:
        patience.ending = True
        was_stopped = launcher.failure is None
        _end(launcher, patience, ready.is_set())
    if was_stopped and not ready.is_set():
        leave_unready(config)
    if launcher.failure is not None:
        complain(config, launcher.failure)
    if launcher.is_alive() or cluster.has_died:
        os._exit(1)  # Ray's own exit handlers would wait for processes that have died
    return 0 if launcher.failure is None else 1


def _routers(config: ServeConfig, keys: ClusterKeys, link_host: str) -> Routers:
    """Return this process' router, or a pool of router processes, which this process outlives."""
    if config.router_replicas == 1:
        return RouterServer(config, keys, link_host)
    return RouterPool(config, keys, link_host)


def _end(launcher: Launcher, patience: Patience, was_ready: bool) -> None:
    """End Ray and the workers in order, or at once after a further signal. No process or file is left in
    either case.

    During the start the launcher may wait for Ray or for the loading of a model, which cannot be
    interrupted.
    """
    launcher.stop()
    deadline = time.monotonic() + (LAUNCHER_GRACE_S if was_ready else START_GRACE_S)
    while launcher.is_alive() and time.monotonic() < deadline and not patience.over.is_set():
        if launcher.cluster.has_died:
            break
        launcher.join(0.05)
    if launcher.is_alive():
        kill_descendants()
        if was_ready:
            launcher.join(DESCENDANTS_GRACE_S)
    end_descendants(DESCENDANTS_GRACE_S)
    launcher.cluster.remove_files()


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
    if variables := config.default_chat_template_kwargs:
        lines.append(f"Chats' defaults (--default-chat-template-kwargs): {json.dumps(variables)}")
    said = [start_up.get("speculation", "none") for start_up in server.start_ups().values()]
    drafts = any(not each.startswith("none") for each in said)
    if config.speculative_config == DEFAULT_SPECULATION and drafts:
        method, off = DEFAULT_SPECULATION.method, '--speculative-config \'{"method": "none"}\''
        lines.append(f"Speculates by {method}, as far as that pays and with the same tokens (off: {off})")
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
    prompt = "def read_file(path):\n"
    body = {"model": config.model_name, "prompt": prompt, "max_tokens": 64, "temperature": 0}
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
