"""The router process: binds its sockets at once, then serves HTTP until a signal."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import ssl
from collections.abc import Callable, Mapping
from functools import partial
from types import FrameType, MappingProxyType
from typing import Any

import msgspec
import uvicorn
from fastapi import Depends, FastAPI, Security
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.asyncexitstack import AsyncExitStackMiddleware
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.types import ASGIApp

from messaging.files import http_tls
from messaging.sockets import ClusterKeys
from protocol.config import ServeConfig
from protocol.errors import ConfigError
from protocol.ports import http_url, router_ports
from protocol.version import version
from router.api import clients, generate, operate, public
from router.api.access import BEARER, admitted, completed, error_answers, guarded, operator
from router.connection import HEAD_TIMEOUT_S, Connections, HttpConnection, connection_limit
from router.errors import ApiError
from router.middleware import Envelope, answer_error
from router.scaling.interface import ScaleAnswer, ScaleRequest
from router.state import RouterState

logger = logging.getLogger(__name__)

POLL_INTERVAL_S = 0.05
CLOSE_TIMEOUT_S = 3
KEEP_ALIVE_S = 65


class RouterPlace(msgspec.Struct, frozen=True, kw_only=True):
    """The ports of one of several routers, in addition to --port, which all share.

    `own_port` serves HTTP for this router alone; workers connect to `link_port`.
    """

    router_id: str
    own_port: int
    link_port: int


class RouterServer:
    """A router with bound HTTP and worker sockets, which `run()` serves until `stop()` or a signal.

    Workers connect to `worker_endpoints`; `port` is the HTTP port in use. With `place`, as one of several
    routers, `port` is its own; it listens on the shared port once it is ready. Raises `ConfigError`.
    """

    def __init__(
        self,
        config: ServeConfig,
        keys: ClusterKeys,
        link_host: str = "127.0.0.1",
        place: RouterPlace | None = None,
    ) -> None:
        self.config = config
        self._tls = http_tls(config)
        self._shared_socket: socket.socket | None = None
        if place is not None:
            self._shared_socket = bind_http(config.host, config.port, shared=True, listens=False)
            self._http_socket = bind_http(config.host, place.own_port, shared=True)
        else:
            self._http_socket = bind_http(config.host, config.port)
        try:
            if place is None:
                self.state = RouterState(config, keys, link_host, router_ports(config))
            else:
                self.state = RouterState(config, keys, link_host, [place.link_port], place.router_id)
        except BaseException:
            self._close_http()
            raise
        self.worker_endpoints = [self.state.link.endpoint]
        self.port: int = self._http_socket.getsockname()[1]
        self.url = http_url(config, config.host, self.port)
        self._server: _Uvicorn | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping: asyncio.Task[None] | None = None
        self._joining: asyncio.Task[None] | None = None
        self._preparing: asyncio.Task[None] | None = None
        self._stop_asked = False

    def start_ups(self) -> dict[str, Mapping[str, str]]:
        """Return the choices that each worker made when it started, by worker id."""
        return {worker.key.worker_id: worker.start_up for worker in self.state.registry}

    def mark_dead(self, worker_id: str, incarnation: str, reason: str) -> None:
        """Declare an incarnation of a worker gone for good. Thread-safe."""
        self._soon(self.state.registry.mark_dead, worker_id, incarnation, reason)

    def expect(self, roles: Mapping[str, str], room: Mapping[str, int] = MappingProxyType({})) -> None:
        """Set the roles, by worker id, of the workers that the launcher keeps running, and how many more of
        each role have `room`. Requests may wait for these workers. Thread-safe.
        """
        self.state.registry.expected, self.state.autoscaler.room = roles, room

    def on_leave(self, let_go: Callable[[str, bool], str], renew: Callable[[str, str, str], None]) -> None:
        """Set the functions that ask and inform the launcher about drained workers; see `Drainer`."""

        async def ask(worker_id: str, for_good: bool) -> str:
            return let_go(worker_id, for_good)

        self.state.drainer.let_go, self.state.drainer.renew = ask, renew

    def on_scale(self, scale: Callable[[ScaleRequest], ScaleAnswer]) -> None:
        """Set the function with which the router asks the launcher to change the number of workers."""

        async def ask(request: ScaleRequest) -> ScaleAnswer:
            return scale(request)

        self.state.scaler.ask = ask

    def gave_up(self, worker_id: str, reason: str) -> None:
        """Report that an added worker could not be started. Thread-safe."""
        self._soon(self.state.scaler.gave_up, worker_id, reason)

    def replaced(self, process: str) -> None:
        """Report that a "worker", its "actor" or its host's "template" is being restarted. Thread-safe."""
        self.state.metrics.count("processes_replaced_total", process)

    def silence_of(self, worker_id: str, incarnation: str) -> float | None:
        """Return the seconds since the incarnation's last sign of life, if it is registered. Thread-safe."""
        worker = self.state.registry.current(worker_id, incarnation)
        return None if worker is None else worker.silence_s

    def stop(self) -> None:
        """Drain, then return from `run()`. A second call does not wait for running requests. Thread-safe."""
        self._stop_asked = True
        self._soon(self._begin_stop)

    def restore_signals(self) -> None:
        """Install the signal handlers again, which a C library may have replaced. Thread-safe."""
        self._soon(_reinstall_signal_handlers)

    def _soon(self, function: Callable[..., None], *arguments: str) -> None:
        """Call a function on the event loop if the loop runs."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(function, *arguments)

    def run(
        self,
        on_start: Callable[[], None] = lambda: None,
        on_signal: Callable[[], None] | None = None,
        *,
        prepares: bool = True,
    ) -> None:
        """Serve. `on_start` is called once HTTP answers, `on_signal` (default: `stop`) at SIGINT and SIGTERM.

        With `prepares`, common grammars are compiled in the preprocessor once workers serve.
        """
        on_end = partial(self.state.metrics.count, "http_connections_ended_total")
        connections = Connections(connection_limit(), on_end)
        server_config = uvicorn.Config(
            build_app(self.state),
            loop="uvloop",
            http=partial(HttpConnection, connections=connections),  # type: ignore[arg-type]
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=CLOSE_TIMEOUT_S,
        )
        self._server = _Uvicorn(server_config, self._tls, on_start, on_signal or self.stop)
        try:
            with asyncio.Runner(loop_factory=server_config.get_loop_factory()) as runner:
                runner.run(self._serve(self._server, prepares))
        finally:
            self._loop = None
            self.close()

    def close(self) -> None:
        """Close the sockets; `run()` does so at its end."""
        self.state.close()
        self._close_http()

    def _close_http(self) -> None:
        self._http_socket.close()
        if self._shared_socket is not None:
            self._shared_socket.close()

    async def _serve(self, server: _Uvicorn, prepares: bool) -> None:
        self._loop = asyncio.get_running_loop()
        self.state.attach(self._loop)
        if self._stop_asked:
            self._begin_stop()
        if self._shared_socket is not None:
            self._joining = asyncio.ensure_future(self._join(server, self._shared_socket))
        if prepares:
            self._preparing = asyncio.ensure_future(self._prepare())
        await server.serve(sockets=[self._http_socket])

    async def _join(self, server: _Uvicorn, shared: socket.socket) -> None:
        """Listen on the shared port once this router is ready; until then the other routers serve it."""
        await self._readiness()
        await server.listen(shared)

    async def _prepare(self) -> None:
        """Compile common grammars once this router is ready: before that, its start needs all cores."""
        await self._readiness()
        await self.state.grammars.prepare(self.state.chats.constant_grammars)

    async def _readiness(self) -> None:
        while self.state.not_ready() is not None:
            await asyncio.sleep(POLL_INTERVAL_S)

    def _begin_stop(self) -> None:
        if self._stopping is None:
            self._stopping = asyncio.ensure_future(self._drain())
        else:
            self._end()

    async def _drain(self) -> None:
        """Accept no new requests. Running requests get the configured time, then an error.

        With several routers, the others accept new connections from now on.
        """
        self.state.is_draining = True
        if self._server is not None and self._joining is not None:
            self._joining.cancel()
            self._server.stop_listening()
        deadline = asyncio.get_running_loop().time() + self.config.shutdown_timeout
        while len(self.state.journal) and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(POLL_INTERVAL_S)
        self._end()

    def _end(self) -> None:
        self.state.dispatcher.fail_all(ApiError(503, "the server is shutting down"))
        if self._server is not None:
            self._server.should_exit = True


class _Uvicorn(uvicorn.Server):
    """A Uvicorn server that drains on signals and reports when it has started."""

    def __init__(
        self,
        config: uvicorn.Config,
        tls: ssl.SSLContext | None,
        on_started: Callable[[], None],
        on_signal: Callable[[], None],
    ) -> None:
        super().__init__(config)
        self._tls = tls
        self._on_started = on_started
        self._on_signal = on_signal

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=[])
        for listener in sockets or ():
            await self.listen(listener)
        self._on_started()

    async def listen(self, listener: socket.socket) -> None:
        """Listen on another socket. Uvicorn's own listening has no deadline for TLS handshakes."""
        config, state = self.config, self.lifespan.state

        def protocol() -> asyncio.Protocol:
            return config.http_protocol_class(config=config, server_state=self.server_state, app_state=state)  # type: ignore[call-arg]

        loop = asyncio.get_running_loop()
        limit = HEAD_TIMEOUT_S if self._tls is not None else None
        server = await loop.create_server(
            protocol, sock=listener, backlog=config.backlog, ssl=self._tls, ssl_handshake_timeout=limit
        )
        self.servers.append(server)

    def stop_listening(self) -> None:
        for server in self.servers:
            server.close()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._on_signal()


def _reinstall_signal_handlers() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.getsignal(number))


def bind_http(host: str, port: int, *, shared: bool = False, listens: bool = True) -> socket.socket:
    """Bind an HTTP socket. `shared`: other sockets may bind to the same port. A socket that does not listen
    reserves the port for sockets that will.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = found[0]
    except (OSError, UnicodeError) as error:  # a name that no domain can have is the latter
        raise ConfigError(f"--host: cannot use {host!r}: {error}") from error
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        bound.bind(address)
        if listens:
            bound.listen(2048)
    except OSError as error:
        bound.close()
        raise ConfigError(f"--port: cannot listen on {host}:{port}: {error}") from error
    return bound


class _Application(FastAPI):
    """A FastAPI app with msgspec's schemas, without FastAPI's own body limits and error format."""

    def build_middleware_stack(self) -> ASGIApp:
        app: ASGIApp = ExceptionMiddleware(
            AsyncExitStackMiddleware(self.router), handlers=self.exception_handlers
        )
        state: RouterState = self.state.router
        if state.config.origins:
            app = CORSMiddleware(app, state.config.origins, allow_methods=["*"], allow_headers=["*"])
        return Envelope(app, state.metrics, state.config.root_path)

    def openapi(self) -> dict[str, Any]:
        return self.openapi_schema or completed(super().openapi())


def build_app(state: RouterState) -> FastAPI:
    """Return the application with all endpoints, over the given state."""
    errors = (Exception, HTTPException, RequestValidationError)
    app = _Application(
        title="Tandem",
        version=version(),
        description="OpenAI's API with vLLM's extensions, and Anthropic's messages.",
        openapi_url=None,
        servers=[{"url": state.config.root_path}] if state.config.root_path else None,
        redirect_slashes=False,
        telemetry={"tracing": False, "metrics": False, "logs": False},
        responses=error_answers(),
        exception_handlers=dict.fromkeys(errors, answer_error),
    )
    app.state.router = state
    key = [Security(BEARER)] if state.keys.are_needed else []
    generate.add_routes(app, state, key)
    app.include_router(clients.router, dependencies=[*key, Depends(admitted)])
    app.include_router(operate.router, dependencies=[*key, Depends(operator)])
    app.include_router(public.router, dependencies=[Depends(guarded)])
    return app
