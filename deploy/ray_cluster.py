"""The Ray cluster that the workers run on: a local one that we start, or an existing one that we join."""

from __future__ import annotations

import functools
import json
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil

from deploy.local_ray import RayStartError, start
from deploy.processes import PrivateDirectory, ProcessWatch
from deploy.slots import Node
from messaging.sockets import address_towards
from protocol.config import ServeConfig
from worker.cores import host_cores

HEAD_INTERVAL_S = 0.5
_HEAD_TIMEOUT_S = 1.0
REFUSED_S = 1.0
"""A head that refuses connections for this long has ended."""

UNREACHABLE_S = 20.0
"""A head that is unreachable for this long counts as lost, also for its nodes (deploy/node.sh)."""


class HeadWatch(threading.Thread):
    """A thread that connects to the head's store periodically, and calls `on_lost` once, with the reason.

    It is a thread because calls of Ray may hang when the head is lost.
    """

    def __init__(self, host: str, port: int, on_lost: Callable[[str], None]) -> None:
        super().__init__(name="head-watch", daemon=True)
        self._head = (host, port)
        self._on_lost = on_lost
        self._stop_requested = threading.Event()

    def stop(self) -> None:
        self._stop_requested.set()

    def run(self) -> None:
        answered = time.monotonic()
        while not self._stop_requested.wait(HEAD_INTERVAL_S):
            try:
                socket.create_connection(self._head, _HEAD_TIMEOUT_S).close()
                answered = time.monotonic()
            except OSError as error:
                patience = REFUSED_S if isinstance(error, ConnectionRefusedError) else UNREACHABLE_S
                if time.monotonic() - answered > patience:
                    self._on_lost(f"the Ray cluster at {self._head[0]}:{self._head[1]} has ended ({error})")
                    return


log = logging.getLogger(__name__)

_BOOTSTRAP = Path.home() / "ray_bootstrap_config.yaml"

_RAY_PROCESSES = ("gcs_server", "raylet")

_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_COLOR_PREFIX": "0",
    "RAY_SCHEDULER_EVENTS": "0",
    # By default Ray gives its workers a lower priority than all other processes of the host.
    "RAY_worker_niceness": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # Ray's own handler of SIGTERM prints a trace of the C stack.
    "RAY_DISABLE_FAILURE_SIGNAL_HANDLER": "1",
}
"""Variables that Ray reads when it is imported and that its processes inherit."""

CONNECT_S = 5.0
_KILL_S = 2.0

_LEAST_STORE_BYTES = 80 * 1024 * 1024
"""Slightly more than Ray's minimum."""

_STORE_BYTES_PER_PAIR = 4 * 16 * 1024 * 1024
"""The bytes in flight from one worker to another: `MAX_IN_FLIGHT` pieces, plus one being sent."""


class RayCluster:
    """A Ray cluster that `start` starts or joins, and `stop` leaves.

    One thread must call both and live as long as the cluster: the kernel ends a local cluster's processes
    together with the thread that started them.
    """

    def __init__(self, config: ServeConfig) -> None:
        self._config = config
        self._address = config.ray_address
        self._directory: PrivateDirectory | None = None
        self._processes: dict[str, ProcessWatch] = {}
        self.head: tuple[str, int] | None = None
        """The address of a joined cluster's control store."""
        self.has_died = False
        self._own_nodes: list[Node] = []
        self.may_grow = False
        """Whether Ray's autoscaler adds nodes to a joined cluster, as of the last call of `nodes`."""
        self.sets_up_nodes = False
        """Whether Ray is setting up hosts that are to join, as of the last call of `nodes`."""
        self._asked: list[dict[str, float]] = []
        self.namespace = f"tandem-{secrets.token_hex(4)}"

    @property
    def is_local(self) -> bool:
        return self._address is None

    def link_host(self) -> str:
        """Return the address at which workers reach the router: loopback, or this host's address in the
        cluster's network.

        Raises `RayStartError` if there is no cluster to join.
        """
        if self._address is None:
            return "127.0.0.1"
        address = self._address.removeprefix("ray://")
        if address == "auto":
            self._set_environment()
            from ray._private.services import get_ray_address_from_environment

            running = get_ray_address_from_environment("auto", None)
            if running is None:
                raise RayStartError(
                    "--ray-address auto: no Ray runs on this host; `ray start` it, or join one"
                )
            address = running
        try:
            place = urlsplit(f"//{address}")
            if place.port is not None:  # Ray itself would try for minutes
                socket.create_connection((place.hostname, place.port), CONNECT_S).close()
            return address_towards(place.hostname or "")
        except (OSError, ValueError) as error:
            raise RayStartError(f"--ray-address {self._address}: cannot reach {address}: {error}") from error

    def _set_environment(self) -> None:
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        if self._config.log_format == "json":
            os.environ.setdefault("RAY_DISABLE_WORKER_LOG_PREFIX", "1")  # lines would not be JSON
        if self.is_local:
            # Makes Ray use loopback as the node's address, like on other systems, and listen only there.
            os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
            os.environ.setdefault("RAY_AUTH_MODE", "token")
            os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
        elif _has_token():
            os.environ.setdefault("RAY_AUTH_MODE", "token")

    def start(self, stop: threading.Event) -> None:
        """Start a local cluster, with retries until `stop`, or join one. Raises `RayStartError`."""
        self._set_environment()
        if self.is_local:
            self._directory = PrivateDirectory()
        import ray

        logging.getLogger("ray").setLevel(logging.ERROR)
        options: dict[str, Any] = {
            "namespace": self.namespace,
            "configure_logging": False,
            "job_config": _job(),
            # The workers that a local template forks write to the launcher's own stderr.
            "log_to_driver": not (self.is_local and self._config.forks_workers),
        }
        if self._directory is not None:
            options |= {
                "num_cpus": 0,
                "include_dashboard": False,
                "object_store_memory": object_store_bytes(self._config),
                # Ray makes this folder writable for all users; our private folder above it protects it.
                "_temp_dir": str(self._directory.path / "ray"),
                "_node_ip_address": "127.0.0.1",
            }
            start(options, self._config.start_timeout, stop)
        else:
            try:
                ray.init(address=self._address, **options)
            except Exception as error:
                raise RayStartError(f"--ray-address {self._address}: cannot join Ray: {error}") from error
        if self.is_local:
            children = {child.name(): child.pid for child in psutil.Process().children(recursive=True)}
            self._processes = {
                name: ProcessWatch(children[name]) for name in _RAY_PROCESSES if name in children
            }
        else:
            head = urlsplit(f"//{ray.get_runtime_context().gcs_address}")
            self.head = (head.hostname or "", head.port or 0)

    def death(self) -> str:
        """Return which process of our own cluster has died or hangs, or ""."""
        for name, process in self._processes.items():
            process.look()
            if process.has_ended:
                return f"Ray's {name} (process {process.pid}) has died"
            if process.stopped:
                return f"Ray's {name}: {process.stopped}"
        return ""

    def restart(self, stop: threading.Event) -> None:
        """End the rest of our own cluster and start another, whose node counts as the same node. Raises
        `RayStartError`.
        """
        import ray

        self.has_died = True  # a server that ends now need not wait
        for process in self._processes.values():
            process.end(_KILL_S)
        ray.shutdown()
        self.remove_files()
        self.start(stop)
        self.has_died = False

    def nodes(self) -> list[Node]:
        """Return the nodes that are alive. A local cluster has one, with all cores of the host. It stays the
        same node when Ray is restarted.
        """
        if self._own_nodes:
            return self._own_nodes
        import ray

        if not self.is_local:
            report = _autoscaler_report()
            self.may_grow = self.may_grow or may_grow(report)
            self.sets_up_nodes = sets_up_nodes(report)
        nodes = [Node.of(each) for each in ray.nodes() if each["Alive"]]
        if self.is_local:
            nodes = [Node(node.node_id, node.address, host_cores(), node.gpus) for node in nodes]
            self._own_nodes = nodes
        return nodes

    def ask_for(self, bundles: list[dict[str, float]]) -> None:
        """Ask Ray's autoscaler, if any, for nodes that fit these bundles, replacing earlier requests."""
        if self.may_grow and bundles != self._asked:
            from ray.autoscaler.sdk import request_resources

            log.info("Ray's autoscaler is asked for nodes for %d workers", len(bundles))
            request_resources(bundles=bundles)
            self._asked = bundles

    def stop(self) -> None:
        """Leave the cluster; end it if it is local. Idempotent. A dead cluster is not shut down."""
        if not self.has_died:
            import ray

            ray.shutdown()
        self.remove_files()

    def remove_files(self) -> None:
        if self._directory is not None:
            self._directory.remove()


def _job() -> Any:
    """Return Ray's settings for its workers. They import from the working folder only if it is Tandem's own:
    in any other, files may be named like modules, and be others'.
    """
    from ray.job_config import JobConfig

    return JobConfig(_client_job=Path.cwd() != Path(__file__).parent.parent)


def object_store_bytes(config: ServeConfig) -> int:
    """Return the size of a local cluster's object store, which only the `object_store` transport uses."""
    if "object_store" not in config.transport_names:
        return _LEAST_STORE_BYTES
    workers = config.num_workers
    return _LEAST_STORE_BYTES + workers * (workers - 1) * _STORE_BYTES_PER_PAIR


def _autoscaler_report() -> dict[str, Any]:
    """Return the autoscaler's latest report, or {} if there is none."""
    from ray.experimental.internal_kv import _internal_kv_get

    status = _internal_kv_get("__autoscaling_status")
    report: dict[str, Any] = json.loads(status).get("autoscaler_report") if status else {}
    return report or {}


def may_grow(report: Mapping[str, Any]) -> bool:
    """Return whether Ray may add nodes. In a cluster without autoscaling, each node has its own type."""
    types = {name for name in report.get("node_type_mapping", {}).values() if not name.startswith("node_")}
    return not types <= fixed_types(_BOOTSTRAP)


def sets_up_nodes(report: Mapping[str, Any]) -> bool:
    """Return whether Ray is setting up a host. Pending nodes are (address, type, current step)."""
    return any(pending[-1] in ("syncing-files", "setting-up") for pending in report.get("pending_nodes", ()))


@functools.cache
def fixed_types(path: Path) -> frozenset[str]:
    """Return the node types with a fixed number of nodes, from the file that `ray up` leaves on the head."""
    import yaml

    try:
        types = yaml.safe_load(path.read_text())["available_node_types"]
    except FileNotFoundError:
        return frozenset()
    return frozenset(name for name, of in types.items() if of.get("min_workers", 0) == of.get("max_workers"))


def _has_token() -> bool:
    """Return whether this user has a token for joining clusters. Clusters started with a token require it."""
    is_set = "RAY_AUTH_TOKEN" in os.environ or "RAY_AUTH_TOKEN_PATH" in os.environ
    return is_set or (Path.home() / ".ray" / "auth_token").is_file()
