"""Ray's autoscaler starts and ends nodes of cluster-cloud.yaml, made by `fake_multinode` on this machine."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import pytest
import yaml
from ray.autoscaler._private.fake_multi_node.node_provider import FAKE_HEAD_NODE_ID, FAKE_HEAD_NODE_TYPE

from tests.cluster.hosts import ROOT, Isolated, why_not
from tests.waiting import wait_until

WHY_NOT = why_not()
pytestmark = [pytest.mark.timeout(600), pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)]

URL = "http://127.0.0.1:8000"
WAIT_S = 120.0
STREAMS, TOKENS = 24, 400
QUICK = "import router.scaling.decide as decide; decide.INTERVAL_S, decide.SHORT_S = 1.0, 5.0"
"""Makes the autoscaler act after a few seconds of load instead of half a minute."""

INIT = """
mount -t proc proc /proc; mount -t tmpfs tmpfs /dev/shm
"$@" &
while :; do wait -n || sleep 0.2; done
"""
"""Starts the command under an init process, which reaps orphans."""


def node_types() -> dict[str, Any]:
    """Return the node types of cluster-cloud.yaml without their numbers of cores, which Ray detects."""
    types = yaml.safe_load((ROOT / "deploy" / "cluster-cloud.yaml").read_text())["available_node_types"]
    for kind in types.values():
        kind["resources"] = {"CPU": 2, **kind["resources"]}
        kind["node_config"] = {}
    types[FAKE_HEAD_NODE_TYPE] = {**types.pop("head"), "max_workers": 0}
    return types


def cluster_file() -> dict[str, Any]:
    """Return a configuration for nodes with one address. Ray ends serving nodes without the `True` fields."""
    provider = {
        "type": "fake_multinode",
        "gcs_address": "127.0.0.1:6379",
        "use_node_id_as_ip": True,
        "disable_node_updaters": True,
        "disable_launch_config_check": True,
    }
    lists = ("cluster_synced_files", "rsync_exclude", "rsync_filter", "initialization_commands")
    commands = ("setup_commands", "head_setup_commands", "worker_setup_commands")
    starts = ("head_start_ray_commands", "worker_start_ray_commands")
    return {
        "cluster_name": "tandem",
        "provider": provider,
        "max_workers": 8,
        "upscaling_speed": 1.0,
        "idle_timeout_minutes": 0.05,
        "available_node_types": node_types(),
        "head_node_type": FAKE_HEAD_NODE_TYPE,
        "auth": {},
        "docker": {},
        "file_mounts": {},
        "file_mounts_sync_continuously": False,
        **{name: [] for name in (*lists, *commands, *starts)},
    }


class Growing(Isolated):
    """A Ray head with its autoscaler, and `tandem serve` in the cluster."""

    def __init__(self, folder: Path, session: str) -> None:
        super().__init__("growing", folder / "ray.log")
        self._serve_log = folder / "serve.log"
        self._serve_log.touch()
        file = folder / "cluster.yaml"
        file.write_text(json.dumps(cluster_file()))
        kernels = os.environ.get("TANDEM_CACHE_DIR") or str(Path.home() / ".cache" / "tandem")
        home = {"HOME": str(folder), "TANDEM_CACHE_DIR": kernels}
        # All nodes have the address 127.0.0.1.
        of_ray = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
        plain = {k: v for k, v in os.environ.items() if not k.startswith(("TANDEM_", "RAY_"))}
        self._environment = plain | home | of_ray
        of_head = {
            "RAY_FAKE_CLUSTER": "1",
            "RAY_OVERRIDE_NODE_ID_FOR_TESTING": FAKE_HEAD_NODE_ID,
            "RAY_enable_autoscaler_v2": "0",
            "RAY_worker_niceness": "0",
            "AUTOSCALER_UPDATE_INTERVAL_S": "1",
        }
        start = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--num-cpus=0"]
        start += [f"--autoscaling-config={file}", f"--temp-dir={session}", "--object-store-memory=80000000"]
        start += ["--node-ip-address=127.0.0.1", "--port=6379", "--include-dashboard=false"]
        self.launch(["bash", "-c", INIT, "-", *start], self._environment | of_head, cwd=ROOT)

    def serve(self, *options: str) -> None:
        program = f"{QUICK}\nfrom deploy.__main__ import main\nmain()"
        command = [sys.executable, "-c", program, "serve", "--ray-address", "127.0.0.1:6379", *options]
        with self._serve_log.open("wb") as output:
            self._within(command, stdout=output, stderr=subprocess.STDOUT)

    def stream(self) -> list[dict[str, Any]]:
        """Stream some completions side by side."""
        command = ["env", "TANDEM_API_KEY=none", sys.executable, "-m", "tests.cluster.streams"]
        asker = self._within([*command, URL, str(STREAMS), str(TOKENS)], stdout=subprocess.PIPE)
        output, _ = asker.communicate(timeout=WAIT_S)
        streams: list[dict[str, Any]] = json.loads(output.splitlines()[-1])
        return streams

    def _within(self, command: Sequence[str], **streams: Any) -> subprocess.Popen[str]:
        enter = ["nsenter", "-a", "-t", str(self.init.pid), f"--wd={ROOT}", "--"]
        return subprocess.Popen([*enter, *command], env=self._environment, text=True, **streams)

    def get(self, path: str) -> Any:
        return json.loads(self.run("curl", "-sS", "-m", "60", URL + path).stdout)

    def serving(self) -> set[str]:
        return {each["id"] for each in self.get("/workers")["workers"] if each["lifecycle"] == "ready"}

    def load(self) -> str:
        """Return the loads that the router and its workers report."""
        try:
            return f"{self.get('/workers')}\n{self.run('curl', '-sS', '-m', '10', URL + '/metrics').stdout}"
        except (subprocess.SubprocessError, ValueError) as error:
            return repr(error)

    def nodes(self) -> Counter[str]:
        """Count the running nodes of each type by their processes."""
        found: Counter[str] = Counter()
        for process in self.init.children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.name() == "raylet" and process.status() != psutil.STATUS_ZOMBIE:
                    found[process.environ().get("RAY_NODE_TYPE_NAME", "head")] += 1
        return found

    @property
    def logs(self) -> str:
        return self.log + self._serve_log.read_text(errors="replace")


@pytest.fixture
def growing(tmp_path: Path) -> Iterator[Growing]:
    with TemporaryDirectory(prefix="tandem-", dir="/tmp") as session:  # Paths of Ray's sockets must be short
        growing = Growing(tmp_path, session)
        yield growing
        growing.kill()


def test_nodes_come_under_load_and_go_after_it(growing: Growing) -> None:
    began = time.monotonic()

    def until(done: Callable[[], bool], what: str) -> None:
        wait_until(done, WAIT_S, lambda: f"{what}: {dict(growing.nodes())}\n{growing.logs}\n{growing.load()}")
        print(f"{time.monotonic() - began:.1f} s: {what}, {dict(growing.nodes())}")

    until(lambda: "Ray runtime started" in growing.log, "Ray runs")
    scaled = ("--autoscale", "decode=1:2", "--scale-down-after", "15", "--max-num-seqs", "4")
    growing.serve(*scaled, "--placement", "least_loaded")  # costs measured on a busy machine mislead
    until(lambda: "Listening on" in growing.logs, "it serves")
    assert growing.nodes() == {"head": 1, "prefill": 1, "decode": 1}
    with under_load(growing) as asker:

        def one_more_serves() -> bool:
            assert not asker.done(), asker.exception()
            return growing.serving() == {"prefill-0", "decode-0", "decode-1"}

        until(one_more_serves, "one more serves")
        assert growing.nodes() == {"head": 1, "prefill": 1, "decode": 2}
    until(lambda: growing.nodes() == {"head": 1, "prefill": 1, "decode": 1}, "its node has gone")
    assert len(growing.serving()) == 2


@contextlib.contextmanager
def under_load(growing: Growing) -> Iterator[Future[None]]:
    """Keep completions running, check that none fails, and yield a function that reads the load."""
    is_over = threading.Event()

    def ask_again_and_again() -> None:
        while not is_over.is_set():
            assert [stream["error"] for stream in growing.stream()] == [""] * STREAMS

    with ThreadPoolExecutor(1) as pool:
        asker = pool.submit(ask_again_and_again)
        try:
            yield asker
        finally:
            is_over.set()
    asker.result()
