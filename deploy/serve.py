"""`tandem serve`: the router in the main thread, Ray and its workers behind another, and an orderly end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shlex
import signal
import socket
import sys
import time
from collections.abc import Iterator
from importlib import metadata
from urllib.parse import urlsplit

import msgspec
import uvicorn

from deploy.cleanup import adopt_orphans, end_descendants, kill_descendants
from deploy.launcher import Launcher, StateView
from deploy.resources import available_cores, choose_threads
from protocol.config import ServeConfig
from protocol.errors import ConfigError, TandemError
from protocol.sockets import ClusterKeys
from router.app import create_app
from router.state import RouterState

log = logging.getLogger(__name__)

POLL_S = 0.05
LAUNCHER_GRACE_S = 20.0
"""Seconds that Ray and the workers get to end before they are killed."""

DESCENDANTS_GRACE_S = 2.0


class _HttpServer(uvicorn.Server):
    """Leaves signals to us."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def serve(config: ServeConfig) -> int:
    """Run the server until it is told to end; returns the process' exit code."""
    logging.basicConfig(
        level=config.log_level.upper(),
        stream=sys.stderr,
        format="%(asctime)s %(levelname).1s %(name)s: %(message)s",
        force=True,
    )
    try:
        with asyncio.Runner(loop_factory=_event_loop) as runner:
            return runner.run(_Service(config).run())
    except TandemError as error:
        print(f"tandem: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _event_loop() -> asyncio.AbstractEventLoop:
    import uvloop

    return uvloop.new_event_loop()


class _Service:
    """One run of the server. A first signal ends it in order, a second at once."""

    def __init__(self, config: ServeConfig) -> None:
        self._config = config
        self._signals = 0
        self._stop = asyncio.Event()

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal)
        adopt_orphans()
        listener = _listen(self._config)
        keys = ClusterKeys.generate()
        state = RouterState(self._config, keys, _link_host(self._config))
        state.attach(loop)
        launcher = Launcher(self._config, keys, StateView(state))
        http = _HttpServer(_http_config(state))
        serving = asyncio.create_task(http.serve(sockets=[listener]))
        launcher.start()
        try:
            await self._until_over(launcher, state, serving, _url(self._config, listener))
            await self._drain(state, launcher)
        finally:
            http.should_exit = True
            await self._end_launcher(launcher)
            state.close()
            await _end_http(http, serving)
        if launcher.failure is not None:
            print(f"tandem: {launcher.failure}", file=sys.stderr)
            return 1
        return 0

    def _on_signal(self) -> None:
        self._signals += 1
        self._stop.set()
        if self._signals == 1:
            print("Ending; press Ctrl-C again to end at once.", file=sys.stderr)

    async def _until_over(
        self, launcher: Launcher, state: RouterState, serving: asyncio.Task[None], url: str
    ) -> None:
        announced = False
        while not self._stop.is_set() and launcher.is_alive() and not serving.done():
            if not announced and launcher.all_ready.is_set():
                announced = True
                print(announcement(self._config, state, url), flush=True)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), POLL_S if not announced else 0.5)

    async def _drain(self, state: RouterState, launcher: Launcher) -> None:
        """Take nothing new; give what runs `--shutdown-timeout` seconds."""
        state.start_draining()
        deadline = time.monotonic() + self._config.shutdown_timeout
        while len(state.journal) and self._signals < 2 and launcher.is_alive():
            if time.monotonic() > deadline:
                log.warning("%d requests did not finish in time and are cut off", len(state.journal))
                return
            await asyncio.sleep(POLL_S)

    async def _end_launcher(self, launcher: Launcher) -> None:
        launcher.stop()
        deadline = time.monotonic() + LAUNCHER_GRACE_S
        while launcher.is_alive() and time.monotonic() < deadline and self._signals < 2:
            await asyncio.sleep(POLL_S)
        if launcher.is_alive():
            kill_descendants()
            launcher.join(DESCENDANTS_GRACE_S)
        end_descendants(DESCENDANTS_GRACE_S)
        launcher.remove_files()


def _listen(config: ServeConfig) -> socket.socket:
    """Bind the HTTP port at once, so that a port in use ends the start before anything else has begun."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((config.host, config.port))
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"--host, --port: cannot listen on {config.host}:{config.port}: {error.strerror}"
        ) from error
    return listener


def _link_host(config: ServeConfig) -> str:
    """Where workers reach the router: this host alone, or its address on the way to the Ray cluster."""
    if config.ray_address is None:
        return "127.0.0.1"
    host = urlsplit(f"//{config.ray_address.removeprefix('ray://')}").hostname
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        # Nothing is sent: connecting a datagram socket only looks the route up.
        probe.connect((host if host and host != "auto" else "192.0.2.1", 1))
        return str(probe.getsockname()[0])


def _http_config(state: RouterState) -> uvicorn.Config:
    return uvicorn.Config(
        create_app(state),
        log_config=None,
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=2,
        timeout_keep_alive=75,
    )


async def _end_http(http: _HttpServer, serving: asyncio.Task[None]) -> None:
    http.should_exit = True
    await serving


def _url(config: ServeConfig, listener: socket.socket) -> str:
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(config.host, config.host)
    return f"http://{host}:{listener.getsockname()[1]}"


def announcement(config: ServeConfig, state: RouterState, url: str) -> str:
    """What runs, what was chosen for it and why, and a command to try."""
    lines = [f"Tandem {metadata.version('tandem-serve')} serves {config.model_name} on {url}"]
    threads, why = choose_threads(config, available_cores())
    lines.append(f"  threads per worker: {threads} ({why})")
    for worker in state.registry:
        lines.append(f"  {worker.key.worker_id}:")
        lines += [f"    {name}: {choice}" for name, choice in worker.start_up.items()]
    lines.append(f"Try:  {curl_line(config, url)}")
    return "\n".join(lines)


def curl_line(config: ServeConfig, url: str) -> str:
    body = {"model": config.model_name, "prompt": "def fibonacci(n):\n", "max_tokens": 64, "temperature": 0}
    parts = ["curl", f"{url}/v1/completions", "-H", "Content-Type: application/json"]
    if config.api_key is not None:
        parts += ["-H", "Authorization: Bearer $TANDEM_API_KEY"]
    return shlex.join([*parts, "-d", msgspec.json.encode(body).decode()])
