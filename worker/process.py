"""The life of a worker process: load, register, serve, end."""

from __future__ import annotations

import logging
import os
import pkgutil
import platform
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

import torch
import zmq

from engine.engine import Engine
from engine.parallel.leader import Leader
from kvtransfer.transports.object_store import Carrier
from messaging.sockets import address_towards
from native.process import freeze_heap
from protocol.errors import TandemError
from protocol.ids import PeerAddress
from protocol.speculation import describe
from protocol.worker_to_router import Register
from worker import setup
from worker.cores import CorePlace, SharedCores, host_cores
from worker.departure import Departure
from worker.heartbeat import Heartbeat
from worker.kv_publisher import open_publisher
from worker.launch import Launch, StopHandle
from worker.link import RouterLinks
from worker.loop import WorkerLoop
from worker.parts import WorkerParts

log = logging.getLogger(__name__)

STOP_GRACE_S = 5.0
"""Seconds that a loop has to end once its routers are gone; then the process ends at once."""


def run_worker(
    launch: Launch,
    stop: StopHandle,
    carrier: Carrier | None = None,
    place: CorePlace | None = None,
    leader: Leader | None = None,
) -> None:
    """Run a worker until `stop`. Return if it ended on request; raise `TandemError` if it cannot serve.

    The process ends when all routers are gone, and after SIGTERM once its requests are elsewhere. The
    `object_store` transport needs a `carrier`. The worker shares cores with the other workers on the board of
    `place`. `leader` leads the worker's other ranks.
    """
    config = launch.config
    setup.set_up_worker_logging(config, launch.worker_id)
    setup.set_up_threads(config)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
    router_host = urlsplit(launch.router_endpoints[0]).hostname
    parts = WorkerParts(
        config=config,
        role=launch.role,
        worker_id=launch.worker_id,
        incarnation=launch.incarnation,
        host=config.worker_host or address_towards(router_host or ""),
        keys=launch.keys,
        context=context,
    )
    links = RouterLinks(parts, launch.router_endpoints)
    heartbeat = Heartbeat(parts, links, on_routers_lost=lambda: _end_process(stop))
    heartbeat.start()
    told_to_leave = False
    try:
        engine = _load(parts, launch, place, leader)
        while (left := _serve(parts, engine, links, stop, carrier)).next_role is not None:
            parts.begin_anew(*left.next_role)
            log.warning("this worker is a %s worker from now on", parts.role.name)
        told_to_leave = left.was_asked
    finally:
        heartbeat.stop()
        links.close()
        if parts.kv_publisher is not None:
            parts.kv_publisher.close()
        context.destroy(linger=500)
        if parts.engine is not None:
            parts.engine.close()
        if leader is not None:
            leader.close()
        parts.wake.close()
    if told_to_leave:
        _die_by_sigterm()


def run_launch(
    launch: Launch,
    stop: StopHandle,
    carrier: Carrier | None = None,
    place: CorePlace | None = None,
    leader: Leader | None = None,
) -> str:
    """Call `run_worker`. Return "" if the worker ended on request, else the reason why it failed."""
    try:
        run_worker(launch, stop, carrier, place, leader)
    except TandemError as error:
        return str(error)
    except Exception as error:
        log.exception("the worker failed")
        return f"{type(error).__name__}: {error}".strip().splitlines()[0]
    return "" if stop.requested else "the router was lost"


def _load(parts: WorkerParts, launch: Launch, place: CorePlace | None, leader: Leader | None) -> Engine:
    """Load the engine and create the parts that depend on it."""
    config = launch.config
    parts.remote_drafts = setup.remote_drafter(config)
    engine, parts.pool = setup.build_engine(
        config, parts.remote_drafts, holds_draft=launch.role.holds_draft, leader=leader
    )
    parts.engine = engine
    if leader is not None:
        leader.on_lost = setup.end_process
    if not parts.role.holds_draft:
        parts.kv_publisher = open_publisher(config, parts.worker_id, engine.cache_format)
    engine.on_ready = parts.wake.set
    if launch.shares_cores and place is not None and engine.runs_on_any_threads:
        parts.cores = SharedCores(place, torch.get_num_threads(), host_cores(), torch.set_num_threads)
        engine.borrow(parts.cores.were_kept)
    freeze_heap()
    return engine


def _serve(
    parts: WorkerParts, engine: Engine, links: RouterLinks, stop: StopHandle, carrier: Carrier | None
) -> Departure:
    """Serve in the current role. Return the departure that ended it."""
    assert parts.pool is not None
    make_loop: type[WorkerLoop] = pkgutil.resolve_name(parts.role.loop)
    name = f"{parts.worker_id} {parts.incarnation}"
    if not parts.role.holds_draft:  # a draft worker hands no KV over
        parts.wires = setup.open_wires(parts.config, parts.pool, name, parts.pairs, carrier)
    try:
        loop = make_loop(parts, engine, links)
        try:
            links.register(_registration(parts, engine, loop.address), parts.config.start_timeout)
        except TandemError:
            loop.close()
            raise
        log.debug("ready")
        stop.attach(loop.stop)
        with _on_sigterm(loop.departure.ask):
            loop.run()
        return loop.departure
    finally:
        for wire in parts.wires:
            wire.close()


@contextmanager
def _on_sigterm(leave: Callable[[], None]) -> Iterator[None]:
    """Call `leave` at SIGTERM, if in the main thread. (An actor's worker runs in another thread.)"""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda *_: leave())
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _die_by_sigterm() -> None:
    """End the process by SIGTERM, so that the parent sees the cause."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGTERM)


def _registration(parts: WorkerParts, engine: Engine, address: PeerAddress) -> Register:
    publisher = parts.kv_publisher
    return Register(
        address=address,
        host=platform.node(),
        pid=os.getpid(),
        role=parts.role.name,
        model=parts.config.model_name,
        weights=engine.weights,
        max_model_len=engine.max_model_len,
        vocab_size=engine.vocab_size,
        eos_token_ids=list(engine.eos_token_ids),
        state=parts.state(),
        cache=engine.cache_format if parts.reports_cache else None,
        adapters=engine.adapters.listed() if engine.adapters is not None else [],
        start_up={
            "speculation": describe(parts.config.speculative_config),
            **engine.start_up,
            "host": parts.host,
            "threads": str(torch.get_num_threads()),
            "kv_events": ", ".join(publisher.endpoints) if publisher is not None else "to the router alone",
        },
    )


def _end_process(stop: StopHandle) -> None:
    stop.stop()
    timer = threading.Timer(STOP_GRACE_S, os._exit, args=(1,))
    timer.daemon = True
    timer.start()
