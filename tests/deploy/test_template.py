"""A host's template forks workers, holds their weights once, and leaves nothing behind."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from pathlib import Path

import msgspec
import psutil
import pytest
from hypothesis import strategies as st
from transformers import LlamaConfig

from deploy.resources import thread_environment
from deploy.template.client import Adopt, Spawn, TemplateClient, TemplateError, WorkerProcess
from protocol.config import ServeConfig
from protocol.roles import ROLES
from protocol.router_to_worker import Generate
from tests.fuzzing import GROWTH_BYTES, SECONDS, altered, damaged, fuzz
from tests.worker.harness import Cluster, request, tiny_config
from worker.launch import Launch

pytestmark = [pytest.mark.timeout(600)]

PROMPT = list(range(1, 40))
PATIENCE_S = 300.0
"""The patience of clients: a template may have to compile the kernels first, or wait while others do."""
ANSWERED = 400
"""More answers than a connection's buffer holds."""
RESTART_CPU_S = 2.0
"""The limit of a restart. A fork takes a quarter of a CPU second, importing everything takes five."""


class Host:
    """A host's workers from one template, and a router's side of them."""

    def __init__(self) -> None:
        self.cluster = Cluster()
        self.name = f"test-{secrets.token_hex(8)}"
        self.workers: list[WorkerProcess] = []
        self.clients: list[TemplateClient] = []
        self.num_requests = 0

    def client(self, launcher_pid: int = 0) -> TemplateClient:
        client = TemplateClient(self.name, thread_environment(1), own_stderr=True, launcher_pid=launcher_pid)
        self.clients.append(client)
        return client

    def spawn(
        self,
        worker_id: str,
        config: ServeConfig,
        client: TemplateClient | None = None,
        shares_cores: bool = False,
    ) -> WorkerProcess:
        launch = Launch(
            role=ROLES["decode"],
            worker_id=worker_id,
            router_endpoints=[self.cluster.endpoint],
            config=config,
            keys=self.cluster.keys,
            shares_cores=shares_cores,
        )
        self.cluster.registered.pop(worker_id, None)
        worker = (client or self.client()).spawn(msgspec.msgpack.encode(launch), PATIENCE_S)
        self.workers.append(worker)
        return worker

    def wait_ready(self, *worker_ids: str, timeout_s: float = 30.0) -> None:
        self.cluster.wait(lambda: all(each in self.cluster.registered for each in worker_ids), timeout_s)

    def tokens(self, worker_id: str) -> list[int]:
        self.num_requests += 1
        name = f"request-{self.num_requests}"
        incarnation = self.cluster.registered[worker_id].address.incarnation
        self.cluster.send(worker_id, Generate(incarnation=incarnation, request=request(name, PROMPT)))
        self.cluster.run(name)
        return self.cluster.tokens(name)

    def lent_steps(self, worker_id: str) -> float:
        """Return the steps on lent cores by the next heartbeat but one: the next may be on its way."""
        incarnation = self.cluster.registered[worker_id].address.incarnation
        for _ in range(2):
            known = self.cluster.states.get(incarnation)
            self.cluster.wait(lambda known=known: self.cluster.states.get(incarnation) is not known)
        return self.cluster.states[incarnation].counters["lent_core_steps_total"]

    def template(self) -> psutil.Process:
        """Return the parent of the last living worker."""
        for worker in reversed(self.workers):
            with suppress(psutil.NoSuchProcess):
                parent = psutil.Process(worker.pid).parent()
                if parent is not None:
                    return parent
        raise AssertionError("no worker lives")

    def close(self) -> None:
        for client in self.clients:
            client.close()
        self.cluster.close()


@pytest.fixture(scope="module")
def host(tiny_folder: Path) -> Iterator[Host]:
    """Start a host with a template that has imported everything, and check that it leaves nothing behind.

    It asks no hub for models of fuzzed launches.
    """
    with pytest.MonkeyPatch.context() as patch, closing(Host()) as host:
        patch.setenv("HF_HUB_OFFLINE", "1")
        host.client().connect()
        yield host
        left = [psutil.Process(host.spawn("last-0", tiny_config(tiny_folder)).pid), host.template()]
        for worker in host.workers[:-1]:
            with suppress(psutil.NoSuchProcess):
                left.append(psutil.Process(worker.pid))
        host.close()
        assert not psutil.wait_procs(left, timeout=30)[1]
        assert host.name not in Path("/proc/net/unix").read_text()


def test_a_killed_worker_comes_back_at_once_and_serves_the_same_tokens(host: Host, tiny_folder: Path) -> None:
    config, client = tiny_config(tiny_folder), host.client()
    worker = host.spawn("decode-0", config, client)
    host.wait_ready("decode-0")
    before = host.tokens("decode-0")
    os.kill(worker.pid, signal.SIGKILL)
    ended = worker.wait()
    assert ended.signal == signal.SIGKILL and "SIGKILL" in ended.reason
    again = host.spawn("decode-0", config, client)
    host.wait_ready("decode-0")
    assert sum(psutil.Process(again.pid).cpu_times()[:2]) < RESTART_CPU_S
    assert host.tokens("decode-0") == before
    assert host.template().num_threads() == 1
    again.stop()
    ended = again.wait()
    assert (ended.reason, ended.signal) == ("", None)


def test_a_killed_workers_ranks_go_with_it(host: Host, tiny_folder: Path) -> None:
    worker = host.spawn("decode-2", tiny_config(tiny_folder, decode_tensor_parallel_size=2))
    host.wait_ready("decode-2")
    (rank,) = psutil.Process(worker.pid).children()
    os.kill(worker.pid, signal.SIGKILL)
    assert worker.wait().signal == signal.SIGKILL
    _, left = psutil.wait_procs([rank], timeout=30)
    assert not left, "and its exit is seen: a zombie would be there"


def test_a_frozen_worker_is_killed(host: Host, tiny_folder: Path) -> None:
    worker = host.spawn("decode-1", tiny_config(tiny_folder))
    host.wait_ready("decode-1")
    os.kill(worker.pid, signal.SIGSTOP)
    worker.kill()
    assert worker.wait().signal == signal.SIGKILL
    worker.kill()  # nobody else will collect it


def test_a_model_that_cannot_be_loaded_is_the_workers_error(host: Host, tmp_path: Path) -> None:
    ended = host.spawn("decode-0", tiny_config(tmp_path)).wait()
    assert "--model" in ended.reason and ended.signal is None


def test_a_worker_ends_with_its_client(host: Host, tiny_folder: Path) -> None:
    client = host.client()
    worker = psutil.Process(host.spawn("decode-2", tiny_config(tiny_folder), client).pid)
    client.close()
    assert psutil.wait_procs([worker], timeout=30)[0]


def test_a_model_is_loaded_ahead_and_held_once(host: Host, tmp_path: Path) -> None:
    LlamaConfig(
        hidden_size=1024, intermediate_size=4096, num_hidden_layers=8, vocab_size=8192
    ).save_pretrained(tmp_path)
    config = tiny_config(tmp_path, dtype="bfloat16", load_format="dummy", compile="auto", max_model_len=64)
    used: list[int] = []
    workers: list[WorkerProcess] = []
    client = host.client()
    client.connect()
    assert client._watch is not None
    template = client._watch.pid
    before = proportional_bytes(template)
    client.preload(config)
    host.cluster.wait(lambda: proportional_bytes(template) > before + 150e6, 60)
    for worker_id in ("memory-0", "memory-1"):
        workers.append(host.spawn(worker_id, config))
        host.wait_ready(worker_id, timeout_s=60)
        host.tokens(worker_id)
        used.append(sum(map(proportional_bytes, [host.template().pid, *(each.pid for each in workers)])))
    assert used[0] > 300e6, "the weights are there"
    assert used[1] <= 1.15 * used[0]


def proportional_bytes(pid: int) -> int:
    """Return a process's memory, with its share of shared pages."""
    line = next(x for x in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines() if x.startswith("Pss:"))
    return 1024 * int(line.split()[1])


@pytest.mark.skipif(os.cpu_count() == 1, reason="needs two cores")
def test_cores_of_idle_and_dead_workers_are_lent(host: Host, tiny_folder: Path) -> None:
    """The configured number of threads is 1, so any further threads are lent."""
    config = tiny_config(tiny_folder, dtype="bfloat16", compile="auto", load_format="dummy")
    for shares_cores in (False, True):
        names = [f"{kind}-{shares_cores}" for kind in ("one", "other")]
        one, other = [host.spawn(name, config, shares_cores=shares_cores) for name in names]
        host.wait_ready(*names)
        before = host.tokens(names[0])
        assert (host.lent_steps(names[0]) > 0) == shares_cores
        other.kill()
        other.wait()
        steps = host.lent_steps(names[0])
        assert host.tokens(names[0]) == before
        assert (host.lent_steps(names[0]) > steps) == shares_cores
        one.stop()
        one.wait()


def test_workers_share_their_servers_session_but_not_its_process_group(host: Host, tiny_folder: Path) -> None:
    """Linux's autogroups divide busy cores by session, and Ctrl-C ends a terminal's process group."""
    worker = host.spawn("decode-5", tiny_config(tiny_folder))
    host.wait_ready("decode-5")
    assert os.getsid(worker.pid) == os.getsid(0)
    assert os.getpgid(worker.pid) != os.getpgid(0)
    worker.stop()
    worker.wait()


def test_fuzz_a_client(host: Host, tiny_folder: Path) -> None:
    """Afterwards the template starts workers as before, and holds no more memory or descriptors."""
    one = host.spawn("fuzzed-0", tiny_config(tiny_folder))
    host.wait_ready("fuzzed-0")
    before, template = host.tokens("fuzzed-0"), host.template()
    others = {each.pid for each in template.children()} - {one.pid}
    num_fds, rss = template.num_fds(), template.memory_info().rss
    launch = Launch(
        role=ROLES["decode"],
        worker_id="decode-9",
        router_endpoints=[host.cluster.endpoint],
        config=tiny_config(tiny_folder),
        keys=host.cluster.keys,
    )
    inner = [msgspec.msgpack.encode(launch)]
    outer = [
        msgspec.msgpack.encode(each) for each in (Spawn(b"launch", {"NAME": "value"}), Adopt("decode-9"))
    ]
    launches = (damaged(inner) | altered(inner)).map(lambda raw: msgspec.msgpack.encode(Spawn(raw, {})))
    messages = damaged(outer) | altered(outer) | launches

    def check(parts: Sequence[tuple[bytes, int]]) -> None:
        with connected(host.name) as client, open(os.devnull) as file, suppress(ConnectionError):
            for message, num_fds in parts:  # an empty part ends the connection
                if message or num_fds:
                    socket.send_fds(client, [message], [file.fileno()] * num_fds)

    fuzz(check, st.lists(st.tuples(messages, st.integers(0, 3)), max_size=3), examples=60)
    check([(b"", 2)] * 20)
    with connected(host.name) as client:
        client.settimeout(60.0)
        for _ in range(ANSWERED):  # more than the socket holds, and nobody reads the answers
            client.send(b"\xc1")
        other = host.spawn("fuzzed-1", tiny_config(tiny_folder))
        host.wait_ready("fuzzed-1")
    assert [each.replaced for each in host.clients if each.replaced] == []
    assert host.tokens("fuzzed-1") == before and host.template() == template
    host.cluster.wait(lambda: template.num_fds() <= num_fds + 2, 10)  # its connection and control socket
    assert not SECONDS or template.memory_info().rss - rss < GROWTH_BYTES
    assert {each.pid for each in template.children()} - others == {one.pid, other.pid}


def connected(name: str) -> socket.socket:
    client = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    client.connect(f"\0{name}")
    return client


def test_workers_outlive_the_template_and_a_new_one_replaces_it(host: Host, tiny_folder: Path) -> None:
    config, client = tiny_config(tiny_folder), host.client()
    old = host.spawn("decode-3", config, client)
    host.wait_ready("decode-3")
    template, other = host.template(), host.client()
    template.suspend()  # so that only killing helps
    before = host.tokens("decode-3")
    host.spawn("decode-4", config, other)
    host.wait_ready("decode-4")
    assert other.replaced == [f"process {template.pid} is stopped (SIGSTOP)"]
    assert host.template() != template
    assert host.tokens("decode-4") == before
    old.stop()
    assert old.wait().reason == ""
    host.spawn("decode-3", config, client)
    host.wait_ready("decode-3")
    assert host.tokens("decode-3") == before


def test_a_worker_outlives_its_client_as_long_as_the_launcher_runs(tiny_folder: Path) -> None:
    """Even a stopped worker ends after both, and any worker though the template is stopped."""
    config = tiny_config(tiny_folder)
    with closing(Host()) as host, subprocess.Popen(["sleep", "600"]) as launcher:
        host.client(launcher.pid).connect()
        pids = [host.spawn(name, config, host.client()).pid for name in ("decode-1", "decode-2")]
        host.wait_ready("decode-1", "decode-2")
        before = host.tokens("decode-1")
        for client in host.clients:
            client.close()
        again = host.client().adopt("decode-1", 30.0)
        assert again.pid == pids[0]
        assert host.tokens("decode-1") == before
        again.stop()
        assert again.wait().reason == ""
        with pytest.raises(TemplateError, match="it ended while no actor watched it"):
            host.client().adopt("decode-1", 30.0)
        stopped, running = psutil.Process(pids[1]), psutil.Process(host.spawn("decode-3", config).pid)
        host.wait_ready("decode-3")
        template = host.template()
        stopped.suspend()
        template.suspend()
        launcher.kill()
        host.cluster.wait(lambda: running.status() == psutil.STATUS_ZOMBIE)
        template.resume()
        assert psutil.wait_procs([stopped], timeout=30)[0]


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be somebody else for a moment")
def test_another_users_process_gets_no_secrets() -> None:
    """It may take an ended template's name, and a client would send it the cluster's keys."""
    name = f"test-{secrets.token_hex(8)}"
    ready, told = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.setuid(65534)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(f"\0{name}")
            listener.listen()
            os.write(told, b"x")
            connection, _ = listener.accept()
            os._exit(1 if connection.recv(1 << 16) else 0)
    os.read(ready, 1)
    with (
        closing(TemplateClient(name, {}, own_stderr=False)) as client,
        pytest.raises(TemplateError, match="another user's process"),
    ):
        client.spawn(b"the cluster's keys", 5.0)
    assert os.waitpid(pid, 0)[1] == 0
