"""Starts a local Ray with its resources and environment, and notices the end of a joined Ray."""

from __future__ import annotations

import os
import queue
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from ray._private import node

from deploy import local_ray, ray_cluster
from deploy.local_ray import last_errors
from deploy.ray_cluster import HeadWatch, fixed_types, may_grow, sets_up_nodes

HOSTS = "available_node_types: {local.cluster.node: {min_workers: 2, max_workers: %d, resources: {}}}"
CLOUD = "available_node_types: {head: {max_workers: 12}, decode: {min_workers: 1, max_workers: 6}}"


def test_listed_hosts_limit_the_number_of_nodes(tmp_path: Path) -> None:
    files = {"all": HOSTS % 2, "some": HOSTS % 3, "cloud": CLOUD}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert fixed_types(tmp_path / "all") == {"local.cluster.node"}
    assert {fixed_types(tmp_path / name) for name in ("some", "cloud", "missing")} == {frozenset()}


def test_hosts_being_set_up_differ_from_hosts_that_do_not_answer() -> None:
    pending = ["192.0.2.11", "local.cluster.node"]
    for status, expected in {"waiting-for-ssh": False, "syncing-files": True, "setting-up": True}.items():
        assert sets_up_nodes({"pending_nodes": [[*pending, status]]}) == expected
    assert not sets_up_nodes({})


def test_without_an_autoscaler_no_node_is_expected() -> None:
    assert not may_grow({}) and not may_grow({"node_type_mapping": {"1": "node_1"}})
    assert may_grow({"node_type_mapping": {"1": "node_1", "2": "decode"}})


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_cluster, "HEAD_INTERVAL_S", 0.02)


def listen(port: int = 0) -> socket.socket:
    listener = socket.create_server(("127.0.0.1", port))
    listener.settimeout(10)
    return listener


def test_a_head_that_refuses_connections_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_cluster, "REFUSED_S", 0.1)
    listener = listen()
    port = listener.getsockname()[1]
    lost: queue.Queue[str] = queue.Queue()
    watch = HeadWatch("127.0.0.1", port, lost.put)
    watch.start()
    for _ in range(3):
        listener.accept()[0].close()
    assert lost.empty()
    listener.close()
    assert lost.get(timeout=10).startswith(f"the Ray cluster at 127.0.0.1:{port} has ended (")
    watch.join(10)
    assert not watch.is_alive() and lost.empty()


def test_a_head_that_answers_again_in_time_has_not_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long it had answered before."""
    clock = [0.0]
    monkeypatch.setattr(ray_cluster, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    listener = listen()
    port = listener.getsockname()[1]
    lost: queue.Queue[str] = queue.Queue()
    watch = HeadWatch("127.0.0.1", port, lost.put)
    watch.start()
    listener.accept()[0].close()
    clock[0] = 100.0
    for _ in range(2):
        listener.accept()[0].close()
    listener.close()
    time.sleep(0.1)  # a few refusals
    with listen(port) as again:
        again.accept()[0].close()
    watch.stop()
    watch.join(10)
    assert not watch.is_alive() and lost.empty()


def test_an_unreachable_head_gets_more_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: object) -> socket.socket:
        raise OSError("no route to host")

    monkeypatch.setattr(ray_cluster, "REFUSED_S", 0.0)
    monkeypatch.setattr(ray_cluster, "UNREACHABLE_S", 0.3)
    monkeypatch.setattr(socket, "create_connection", unreachable)
    lost: queue.Queue[str] = queue.Queue()
    began = time.monotonic()
    watch = HeadWatch("192.0.2.1", 6379, lost.put)
    watch.start()
    assert "no route to host" in lost.get(timeout=10)
    assert time.monotonic() - began >= 0.3


START = """if True:
    import logging, os, sys, threading, time
    from types import SimpleNamespace
    import psutil
    os.environ |= {{"RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}}
    os.environ |= {{"RAY_AUTH_MODE": "disabled", "RAY_raylet_start_wait_time_s": "2"}}
    import ray
    from ray._private import node, services
    from deploy import local_ray
    from deploy.processes import PrivateDirectory, adopt_orphans, kill_descendants
    adopt_orphans()
    folder = PrivateDirectory()
    raylets = []
    plain_start, plain_time = services.start_ray_process, time.monotonic
    def start_process(command, *rest, **options):
        if command[0].endswith("raylet"):
            raylets.append(command)
            command = {change}
        return plain_start(command, *rest, **options)
    passed = 0.0
    def monotonic():  # Ray's 30 seconds are over soon for raylets that will not come
        global passed
        passed += 100 * ({fails_soon})
        return plain_time() + passed
    services.start_ray_process = start_process
    node.time = local_ray.time = SimpleNamespace(monotonic=monotonic, time=time.time, sleep=time.sleep)
    options = dict(num_cpus=0, include_dashboard=False, object_store_memory=80 << 20, configure_logging=False)
    options |= dict(_temp_dir=str(folder.path), _node_ip_address="127.0.0.1")
    try:
        local_ray.start(options, {timeout}, threading.Event())
        names = sorted(child.name() for child in psutil.Process().children(recursive=True))
        print(len(raylets), *names)
    except local_ray.RayStartError as error:
        print(error)
    finally:
        ray.shutdown()
        kill_descendants()
        folder.remove()
"""


HELD_UP = """
import threading, time
from ray._private import services
from deploy import local_ray
from deploy.processes import PrivateDirectory, adopt_orphans, kill_descendants
services.GCS_SERVER_EXECUTABLE = {slow!r}
adopt_orphans()
folder = PrivateDirectory()
longest, over = 0.0, threading.Event()
def watch():
    global longest
    last = time.monotonic()
    while not over.wait(0.01):
        now = time.monotonic()
        longest, last = max(longest, now - last), now
watcher = threading.Thread(target=watch)
watcher.start()
stop = threading.Event()
stop.set()
try:
    local_ray.start(dict(num_cpus=0, include_dashboard=False, _temp_dir=str(folder.path)), 10.0, stop)
except local_ray.RayStartError as error:
    print(str(error).splitlines()[0])
over.set()
watcher.join()
print(longest)
kill_descendants()
folder.remove()
"""


def run_start(change: str, fails_soon: str, timeout: float) -> tuple[str, str]:
    code = START.format(change=change, fails_soon=fails_soon, timeout=timeout)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    return done.stdout, done.stderr


def test_a_raylet_that_does_not_start_is_started_again() -> None:
    """The second one runs without agents, and nothing is left of the first."""
    output, errors = run_start(
        "command if len(raylets) > 1 else ['sleep', '1000']", "len(raylets) == 1", 600.0
    )
    assert output.split() == ["2", "cat", "cat", "gcs_server", "python", "raylet"], errors
    assert "Ray is started again, since it did not start: The current node timed out" in errors


def test_waiting_for_a_slow_gcs_server_holds_up_no_other_thread(tmp_path: Path) -> None:
    slow = tmp_path / "gcs_server"
    slow.write_text("#!/bin/sh\nsleep 60\n")
    slow.chmod(0o755)
    code = HELD_UP.format(slow=str(slow))
    env = {**os.environ, "RAY_gcs_server_port_wait_time_s": "3"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, env=env)
    error, longest_s = done.stdout.splitlines()
    assert error.startswith("cannot start Ray: Timed out waiting for file"), done.stderr
    assert float(longest_s) < 1.5, "of 3 seconds"


def test_a_release_that_waits_for_no_port_is_started_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Releases such as 2.50 choose the port of `gcs_server` before its start."""
    monkeypatch.delattr(node, "wait_for_persisted_port")
    with local_ray._bare_head(with_logs=False):
        assert node.Node.__name__ == "BareHead"
    assert node.Node.__name__ == "Node" and not hasattr(node, "wait_for_persisted_port")


def test_a_failed_start_shows_rays_logs() -> None:
    output, _ = run_start("[*command, '--node_id=short']", "True", 0.0)
    first, *rest = output.splitlines()
    assert first.startswith("cannot start Ray within 0 s (--start-timeout): The current node timed out")
    assert any(line.strip().startswith("raylet.out: [") for line in rest), output


def test_the_last_errors_and_warnings_are_found(tmp_path: Path) -> None:
    lines = [f"[2026-01-01 10:00:0{n},000 {level} 7 9] (raylet) it {n}" for n, level in enumerate("IEWCIEE")]
    (tmp_path / "raylet.out").write_text("\n".join([*lines, "*** StackTrace Information ***", "main"]))
    (tmp_path / "gcs_server.out").write_text(lines[0])
    (tmp_path / "worker-1.err").write_text(lines[1])
    assert last_errors(tmp_path) == [f"raylet.out: {lines[n]}" for n in (2, 3, 5, 6)]
