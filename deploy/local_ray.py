"""Starts Ray on this host for one server alone, with few processes, and again while the host is slow."""

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
"""Takes an agent's place: it has nothing to do but to end with the raylet, which holds its standard input."""

_LEAST_PATIENCE_S = 15.0
"""Ray waits for its processes at least so long: what fails sooner fails for another reason."""

_SHOWN_LINES = 4
"""Lines shown of each of Ray's logs."""
_TELLING = re.compile(r"^\[[^\]]* [WECF] \d+ \d+\] ")
"""A line of Ray's logs from the level of warnings on."""


class RayStartError(TandemError):
    """Ray could not be started, or joined."""


def start(options: Mapping[str, Any], timeout_s: float, stop: threading.Event) -> None:
    """Start Ray with these options of `ray.init`. An attempt ends after Ray's own 30 seconds; others follow
    until `timeout_s` (`--start-timeout`) or `stop`. Raises `RayStartError` with what Ray's logs say.

    Ray's two agents, for metrics and runtime environments, are not started. That halves the time, does not
    fail where they need more than Ray's 15 seconds for them, and leaves none when the server is killed.
    """
    import ray

    deadline = time.monotonic() + timeout_s
    while True:
        began = time.monotonic()
        with _bare_head() as nodes:
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
def _bare_head() -> Iterator[list[Any]]:
    """Let `ray.init` start no autoscaler, no agents, and no server for web pages, which it does even without
    a dashboard. Yields the nodes that it makes.

    A cluster of our own never grows, and nobody looks at it but us. Ray has no option for that.
    """
    from ray._private import node, services

    made: list[Any] = []

    class BareHead(node.Node):  # type: ignore[misc]
        def __init__(self, *args: Any, **options: Any) -> None:
            made.append(self)
            super().__init__(*args, **options)

        def start_monitor(self) -> None:
            """No autoscaler."""

        def start_api_server(self, **_: Any) -> None:
            """No web pages."""

        def start_raylet(self, *args: Any, **options: Any) -> None:
            _tell_ports_of_no_agents(self)
            super().start_raylet(*args, **options)

    def start_process(command: list[str], *args: Any, **options: Any) -> Any:
        command = [re.sub(r"^(--\w+_agent_command=).*", rf"\1{_NO_AGENT}", part) for part in command]
        return plain_start(command, *args, **options)

    plain, node.Node = node.Node, BareHead
    plain_start, services.start_ray_process = services.start_ray_process, start_process
    try:
        yield made
    finally:
        node.Node, services.start_ray_process = plain, plain_start


def _tell_ports_of_no_agents(node: Any) -> None:
    """Write what the agents would: the raylet waits for their ports, and -1 says that there are none."""
    from ray import _raylet

    for name in ("METRICS_AGENT", "METRICS_EXPORT", "DASHBOARD_AGENT_LISTEN", "RUNTIME_ENV_AGENT"):
        port = getattr(_raylet, f"{name}_PORT_NAME", None)  # older releases choose the ports beforehand
        if port is not None:
            _raylet.persist_port(node.get_session_dir_path(), node.node_id, port, -1)  # type: ignore[attr-defined]


def _with_logs(error: Exception, nodes: list[Any]) -> str:
    """The error, and the end of what Ray's own processes have logged."""
    lines = [str(error)]
    for node in nodes:
        lines += last_errors(Path(node.get_logs_dir_path()))
    return "\n  ".join(lines)


def last_errors(logs: Path) -> list[str]:
    """The last lines of Ray's logs that tell of errors or warnings, each with its file's name."""
    found = []
    for path in sorted(logs.glob("gcs_server.*")) + sorted(logs.glob("raylet.*")):
        lines = [line for line in path.read_text(errors="replace").splitlines() if _TELLING.match(line)]
        found += [f"{path.name}: {line}" for line in lines[-_SHOWN_LINES:]]
    return found
