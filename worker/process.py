"""A worker process' life: load, register, serve, end."""

from __future__ import annotations

import gc
import logging
import os
import pkgutil
import platform
import threading
from urllib.parse import urlsplit

import zmq

from engine.engine import Engine
from kvtransfer.transports.object_store import Carrier
from messaging.sockets import address_towards
from protocol.errors import TandemError
from protocol.messages import PeerAddress, Register
from protocol.speculation import describe
from worker.heartbeat import Heartbeat
from worker.kv_publisher import open_publisher
from worker.launch import Launch
from worker.link import RouterLink
from worker.loop import WorkerLoop
from worker.parts import WorkerParts
from worker.setup import build_engine, open_wires, set_up_logging, set_up_threads
from worker.stop import StopHandle

log = logging.getLogger(__name__)

STOP_GRACE_S = 5.0
"""Seconds that a loop gets to end once the router is gone; then the process ends at once."""


def run_worker(launch: Launch, stop: StopHandle, carrier: Carrier | None = None) -> None:
    """Be a worker until `stop`. Returns when it ended as asked; raises `TandemError` when it cannot serve.

    The whole process ends when the router is gone. The `object_store` transport needs a `carrier`.
    """
    config, role = launch.config, launch.role
    make_loop: type[WorkerLoop] = pkgutil.resolve_name(role.loop)
    set_up_logging(config, launch.worker_id)
    set_up_threads(config)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
    router_host = urlsplit(launch.router_endpoint).hostname
    parts = WorkerParts(
        config=config,
        role=role,
        worker_id=launch.worker_id,
        incarnation=launch.incarnation,
        host=config.worker_host or address_towards(router_host or ""),
        keys=launch.keys,
        context=context,
    )
    heartbeat = Heartbeat(parts, launch.router_endpoint, on_router_lost=lambda: _end_process(stop))
    heartbeat.start()
    link = RouterLink(parts, launch.router_endpoint)
    try:
        engine, parts.pool = build_engine(config)
        parts.engine = engine
        name = f"{parts.worker_id} {parts.incarnation}"
        parts.wires = open_wires(config, parts.pool, name, parts.pairs, carrier)
        parts.kv_publisher = open_publisher(config, parts.worker_id, engine.cache_format)
        engine.on_fetched = parts.wake.set
        loop = make_loop(parts, engine, link)
        gc.collect()
        gc.freeze()  # or the collector would go through the libraries again and again, for milliseconds
        try:
            link.register(_registration(parts, engine, loop.address), config.start_timeout)
        except TandemError:
            loop.close()
            raise
        log.debug("ready")
        stop.attach(loop.stop)
        loop.run()
    finally:
        heartbeat.stop()
        link.close()
        if parts.kv_publisher is not None:
            parts.kv_publisher.close()
        for wire in parts.wires:
            wire.close()
        context.destroy(linger=500)
        if parts.engine is not None:
            parts.engine.close()
        parts.wake.close()


def _registration(parts: WorkerParts, engine: Engine, address: PeerAddress) -> Register:
    publisher = parts.kv_publisher
    return Register(
        address=address,
        host=platform.node(),
        pid=os.getpid(),
        role=parts.role.name,
        model=parts.config.model_name,
        max_model_len=engine.max_model_len,
        vocab_size=engine.vocab_size,
        eos_token_ids=list(engine.eos_token_ids),
        state=parts.state(),
        cache=engine.cache_format if parts.config.enable_prefix_caching else None,
        start_up={
            **engine.start_up,
            "speculation": describe(parts.config.speculative_config),
            "kv_events": ", ".join(publisher.endpoints) if publisher is not None else "to the router alone",
        },
    )


def _end_process(stop: StopHandle) -> None:
    stop.stop()
    timer = threading.Timer(STOP_GRACE_S, os._exit, args=(1,))
    timer.daemon = True
    timer.start()
