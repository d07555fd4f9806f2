"""Entry point of a prefill worker's process."""

from __future__ import annotations

from kvtransfer.object_store.carrier import Carrier
from prefill_worker.loop import PrefillLoop
from protocol.config import ServeConfig
from protocol.sockets import ClusterKeys
from worker.process import run_worker
from worker.stop import StopHandle


def run(
    config: ServeConfig,
    worker_id: str,
    router_endpoint: str,
    keys: ClusterKeys,
    stop: StopHandle | None = None,
    incarnation: str | None = None,
    carrier: Carrier | None = None,
) -> None:
    """Be a prefill worker until `stop`, or until the router is gone."""
    run_worker(
        PrefillLoop, "prefill", config, worker_id, router_endpoint, keys, stop, incarnation, carrier=carrier
    )
