"""Starts Ray on this host for one server, with few processes. Retries while the host is slow."""

from __future__ import annotations

import contextlib
import logging
import re
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from protocol.errors import TandemError

log = logging.getLogger(__name__)

_NO_AGENT = "cat"
"""The command that replaces an agent. It ends with the raylet, which holds its standard input."""

_LEAST_PATIENCE_S = 15.0
"""The least time that Ray waits for its processes; an earlier failure is not retried."""

_PORT_INTERVAL_MS = 10
"""[ms] Time between two looks for the port of `gcs_server`."""

_SHOWN_LINES = 4
"""The number of lines shown of each of Ray's logs."""
_TELLING = re.compile(r"^\[[^\]]* [WECF] \d+ \d+\] ")
"""The beginning of log lines from Ray with level WARNING or above."""


class RayStartError(TandemError):
    """Ray could not be started, or joined."""


def start(options: Mapping[str, Any], timeout_s: float, stop: threading.Event) -> None:
    """Start Ray with these options of `ray.init`. An attempt ends after Ray's own 30 seconds; others follow
    until `timeout_s` (`--start-timeout`) or `stop`. Raises `RayStartError` with the end of Ray's logs.

    Ray's two agents, for metrics and runtime environments, are not started. This halves the time, avoids a
    failure where they need more than Ray's limit of 15 seconds, and leaves no agents when the server is
    killed. Without `log_to_driver` nothing reads the logs of Ray's workers either.
    """
    import ray

    deadline = time.monotonic() + timeout_s
    while True:
        began = time.monotonic()
        with _bare_head(with_logs=options.get("log_to_driver", True)) as nodes:
            try:
                ray.init(**options)
                return
            except Exception as error:
                reason = _with_logs(error, nodes)
        ray.shutdown()
        for node in nodes:
            node.kill_all_processes(check_alive=False)
        if stop.is_set() or time.monotonic() - began < _LEAST_PATIENCE_S:
            raise RayStartError(f"cannot start Ray: {reason}")
        if time.monotonic() >= deadline:
            raise RayStartError(f"cannot start Ray within {timeout_s:g} s (--start-timeout): {reason}")
        log.warning("Ray is started again, since it did not start: %s", reason)


@contextlib.contextmanager
def _bare_head(with_logs: bool) -> Iterator[list[Any]]:
    """Make `ray.init` start no autoscaler, no agents and no web server, and a log monitor only `with_logs`.
    Yields the nodes that it makes.

    A local cluster needs none of these, and Ray has no option for all of them. Ray's wait for the port of
    `gcs_server` would stop all threads of this process, with the router, for up to 30 seconds.
    """
    from ray._private import node, services

    made: list[Any] = []

    class BareHead(node.Node):
        def __init__(self, *args: Any, **options: Any) -> None:
            made.append(self)
            super().__init__(*args, **options)

        def start_monitor(self) -> None:
            """Start no autoscaler."""

        def start_api_server(self, **_: Any) -> None:
            """Start no web server."""

        def start_log_monitor(self) -> None:
            if with_logs:
                super().start_log_monitor()

        def start_raylet(self, *args: Any, **options: Any) -> None:
            _write_ports_of_no_agents(self)
            super().start_raylet(*args, **options)

    def start_process(command: list[str], *args: Any, **options: Any) -> Any:
        command = [re.sub(r"^(--\w+_agent_command=).*", rf"\1{_NO_AGENT}", part) for part in command]
        return plain_start(command, *args, **options)

    def wait_for_port(folder: str, node_id: str, name: str, timeout_ms: int) -> int:
        path = Path(folder, node.get_port_filename(node_id, name))
        for _ in range(timeout_ms // _PORT_INTERVAL_MS):
            if path.exists():
                break
            time.sleep(_PORT_INTERVAL_MS / 1e3)
        port: int = plain_wait(folder, node_id, name, timeout_ms=0)
        return port

    plain, node.Node = node.Node, BareHead
    plain_start, services.start_ray_process = services.start_ray_process, start_process
    plain_wait: Any = getattr(node, "wait_for_persisted_port", None)  # older releases choose it beforehand
    if plain_wait is not None:
        node.wait_for_persisted_port = wait_for_port
    try:
        yield made
    finally:
        node.Node, services.start_ray_process = plain, plain_start
        if plain_wait is not None:
            node.wait_for_persisted_port = plain_wait


def _write_ports_of_no_agents(node: Any) -> None:
    """Write -1, for no agents, as the agents' ports: the raylet waits for these."""
    from ray import _raylet

    for name in ("METRICS_AGENT", "METRICS_EXPORT", "DASHBOARD_AGENT_LISTEN", "RUNTIME_ENV_AGENT"):
        port = getattr(_raylet, f"{name}_PORT_NAME", None)  # older releases choose the ports beforehand
        if port is not None:
            _raylet.persist_port(node.get_session_dir_path(), node.node_id, port, -1)  # type: ignore[attr-defined]


def _with_logs(error: Exception, nodes: list[Any]) -> str:
    """Return the error with the last errors of Ray's logs."""
    lines = [str(error)]
    for node in nodes:
        lines += last_errors(Path(node.get_logs_dir_path()))
    return "\n  ".join(lines)


def last_errors(logs: Path) -> list[str]:
    """Return the last errors and warnings of Ray's logs, each with its file's name."""
    found = []
    for path in sorted(logs.glob("gcs_server.*")) + sorted(logs.glob("raylet.*")):
        lines = [line for line in path.read_text(errors="replace").splitlines() if _TELLING.match(line)]
        found += [f"{path.name}: {line}" for line in lines[-_SHOWN_LINES:]]
    return found
