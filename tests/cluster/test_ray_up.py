"""`ray up deploy/cluster.yaml` over SSH, on hosts made of namespaces: a laptop, a head and two workers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.cluster.hosts import NETWORK, ROOT, Host, Hosts, why_not
from tests.cluster.streams import Stream
from tests.waiting import wait_until

WHY_NOT = why_not()
pytestmark = [pytest.mark.timeout(600), pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)]

DOWN_S = 100.0
UP_S = SERVES_S = STREAMS_S = HEALED_S = 200.0
ENDS_S = 10.0
STREAMS = 48
TOKENS = 500
"""Long enough that all streams have begun before one ends, also on a busy machine."""
HOME = "/home/tandem"
NAMED_PORTS = {8000, *range(6379, 6385), *range(6400, 6600)}


class Cluster:
    """The cluster that `ray up` makes, as the laptop sees it."""

    def __init__(self, folder: Path) -> None:
        self.hosts = Hosts(folder, ["head", "worker1", "worker2"])
        self.head, *self.workers = self.hosts.others
        self.url = f"http://{self.head.address}:8000"
        edit = f"s/192\\.0\\.2\\./{NETWORK}/g; s/TANDEM_HOST=/TANDEM_PLACEMENT=least_loaded &/"
        self._in_checkout("sed", "-i", edit, "deploy/cluster.yaml", timeout_s=10)

    def up(self) -> None:
        self._in_checkout(
            ".venv/bin/ray", "up", "-y", "--no-config-cache", "deploy/cluster.yaml", timeout_s=UP_S
        )

    def down(self) -> None:
        self._in_checkout(".venv/bin/ray", "down", "-y", "deploy/cluster.yaml", timeout_s=DOWN_S)

    def _in_checkout(self, *command: str, timeout_s: float) -> None:
        script = 'cd ~/tandem && exec "$@"'
        done = self.hosts.laptop.run_as_user("bash", "-c", script, "-", *command, timeout_s=timeout_s)
        assert done.returncode == 0, done.stdout + done.stderr + self.log

    @property
    def log(self) -> str:
        """Return the output of `tandem serve`."""
        return self.head.read(f"{HOME}/tandem-serve.log")

    def get(self, path: str, key: str | None = None, body: Any = None) -> tuple[int, Any]:
        """Return status and body of a GET, or of a POST if there is a body."""
        header = f"Authorization: Bearer {key or self.key}"
        command = ["curl", "-sS", "-m", "10", "-w", "\n%{http_code}", "-H", header, self.url + path]
        if body is not None:
            command += ["-H", "content-type: application/json", "-d", json.dumps(body)]
        body, _, status = self.hosts.laptop.run(*command).stdout.rpartition("\n")
        return int(status), json.loads(body) if body else None

    @property
    def key(self) -> str:
        return self.head.read(f"{HOME}/.tandem/api_key")

    def workers_by_id(self) -> dict[str, dict[str, Any]]:
        return {worker["id"]: worker for worker in self.get("/workers")[1]["workers"]}

    def host_of(self, worker_id: str) -> Host:
        address = self.workers_by_id()[worker_id]["start_up"]["host"]
        return next(host for host in self.workers if host.address == address)

    def start_streams(self) -> subprocess.Popen[str]:
        namespace = ["nsenter", "-n", "-t", str(self.hosts.laptop.init.pid), "--"]
        program = [sys.executable, "-m", "tests.cluster.streams", self.url, str(STREAMS), str(TOKENS)]
        return subprocess.Popen(
            [*namespace, *program],
            cwd=ROOT,
            env=os.environ | {"TANDEM_API_KEY": self.key, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            text=True,
        )


def underway(streams: subprocess.Popen[str]) -> None:
    assert streams.stdout is not None and streams.stdout.readline() == "underway\n"


def results(cluster: Cluster, streams: subprocess.Popen[str]) -> list[Stream]:
    try:
        output, _ = streams.communicate(timeout=STREAMS_S)
    except subprocess.TimeoutExpired:
        streams.kill()
        pytest.fail(f"streams take more than {STREAMS_S:g} s\n{cluster.log}")
    return msgspec.json.decode(output.splitlines()[-1], type=list[Stream])


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path)
    try:
        yield cluster
    finally:
        cluster.hosts.close()


def test_a_cluster_comes_serves_loses_a_node_goes_and_comes_again(cluster: Cluster) -> None:
    began = time.monotonic()
    cluster.up()
    wait_until(lambda: "Listening on" in cluster.log, SERVES_S, lambda: cluster.log)
    check_what_serves(cluster)
    underway(whole := cluster.start_streams())
    print(f"first tokens after {time.monotonic() - began:.1f} s")
    expected = results(cluster, whole)
    assert whole.returncode == 0 and not any(stream.error for stream in expected)
    (wire,) = [pair for pair in cluster.workers_by_id()["prefill-0"]["pairs"] if pair.get("in_use")]
    assert (wire["peer"], wire["transport"]) == ("decode-0", "tcp")
    assert wire["counters"]["kv_transfers_total"] >= STREAMS
    lose_a_node(cluster, expected)
    cluster.down()
    for host in (host for host in cluster.hosts.others if host.is_up):
        assert leftovers(host) == []
    cluster.up()
    end_ray(cluster)


def check_what_serves(cluster: Cluster) -> None:
    """Check that both workers use all cores of their hosts, that nothing alarms, and that a key is needed."""
    assert cluster.get("/cluster", key="wrong")[0] == 401
    workers = cluster.workers_by_id()
    prefill, decode = (cluster.host_of(worker_id) for worker_id in ("prefill-0", "decode-0"))
    assert prefill is not decode
    assert all(worker["start_up"]["threads"] == str(os.cpu_count()) for worker in workers.values())
    log = cluster.log
    assert f"Listening on {cluster.url}" in log
    assert "there is no room for prefill-0, decode-0 on --min-nodes 2" in log, "it says what it waits for"
    assert all(process.nice() == 0 for host in (prefill, decode) for process in host.processes())
    assert "UCX" not in log and "nixl" not in log.lower()
    assert "Traceback" not in log and " E deploy" not in log
    status, refusal = cluster.get("/scale", body={"decode": 3})
    assert status == 409 and "the nodes take at most 2" in str(refusal)
    for host in cluster.hosts.others:
        assert [port for port in host.ports() if not is_named(port)] == []


def is_named(address: str) -> bool:
    """Tell whether docs/cluster.md names the port, or the port is reachable from its own host only."""
    host, _, port = address.rpartition(":")
    return host in ("127.0.0.1", "[::1]") or int(port) in NAMED_PORTS


def lose_a_node(cluster: Cluster, expected: list[Stream]) -> None:
    """Lose a node during streams: they go on with the same tokens, and the worker comes back elsewhere."""
    streams = cluster.start_streams()
    underway(streams)
    lost = cluster.host_of("decode-0")
    cluster.hosts.lose(lost)
    killed = time.monotonic()
    wait_until(lambda: is_back(cluster, "decode-0", lost), HEALED_S, lambda: cluster.log)
    print(f"decode-0 is back elsewhere after {time.monotonic() - killed:.1f} s")
    seen = results(cluster, streams)
    assert [stream.error for stream in seen] == [""] * len(seen)
    assert [stream.text for stream in seen] == [stream.text for stream in expected]
    assert all(stream.events_before < stream.events for stream in seen), "none has to wait for another's end"
    print(f"longest gap {max(stream.longest_gap_s for stream in seen):.1f} s")


def is_back(cluster: Cluster, worker_id: str, lost: Host) -> bool:
    worker = cluster.workers_by_id().get(worker_id)
    return worker is not None and worker["start_up"]["host"] != lost.address and worker["silent_s"] < 1


def leftovers(host: Host) -> list[str]:
    """Return processes and ports of the user, after waiting a moment for those that are ending."""
    deadline = time.monotonic() + ENDS_S
    while (left := [*map(str, host.processes()), *host.ports()]) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def end_ray(cluster: Cluster) -> None:
    """End Ray under a starting `tandem serve`, which must end too and say why."""
    wait_until(lambda: "there is no room" in cluster.log, SERVES_S, lambda: cluster.log)
    pid = cluster.head.read(f"{HOME}/.tandem/serve.pid").strip()
    cluster.head.run_as_user(f"{HOME}/tandem/.venv/bin/ray", "stop")
    stopped = time.monotonic()
    wait_until(
        lambda: cluster.head.run("test", "-d", f"/proc/{pid}").returncode != 0, ENDS_S, lambda: cluster.log
    )
    print(f"`tandem serve` ended {time.monotonic() - stopped:.1f} s after Ray")
    assert "the Ray cluster at" in cluster.log and "has ended" in cluster.log
