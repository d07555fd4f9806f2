"""Ray on this host for one server alone: few processes, and a start that is tried again."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from deploy.local_ray import last_errors

START = """if True:
    import logging, os, sys, threading, time
    from types import SimpleNamespace
    import psutil
    os.environ |= {{"RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}}
    os.environ |= {{"RAY_AUTH_MODE": "disabled", "RAY_raylet_start_wait_time_s": "2"}}
    import ray
    from ray._private import node, services
    from deploy import local_ray
    from deploy.cleanup import PrivateDirectory, adopt_orphans, kill_descendants
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


def run_start(change: str, fails_soon: str, timeout: float) -> tuple[str, str]:
    code = START.format(change=change, fails_soon=fails_soon, timeout=timeout)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    return done.stdout, done.stderr


def test_a_raylet_that_does_not_come_is_started_again() -> None:
    """Its successor runs without agents, and nothing of the first attempt is left."""
    output, errors = run_start(
        "command if len(raylets) > 1 else ['sleep', '1000']", "len(raylets) == 1", 600.0
    )
    assert output.split() == ["2", "cat", "cat", "gcs_server", "python", "raylet"], errors
    assert "Ray is started again, since it did not start: The current node timed out" in errors


def test_a_start_that_fails_shows_what_rays_logs_say() -> None:
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
