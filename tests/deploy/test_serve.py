"""`tandem serve` on a real local Ray: it answers, heals and ends cleanly."""

from __future__ import annotations

import base64
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import msgspec
import psutil
import pytest
from typer.testing import CliRunner, Result

from bench.shapes.tokenizer import save_tokenizer
from deploy.cli import app
from messaging.sockets import ClusterKeys
from tests.deploy.server_process import (
    ANSWER_S,
    ROOT,
    ServerProcess,
    listening_ports,
    memory_has,
    of_each,
    read_events,
    shared_files,
    tandem_command,
    wide_listeners,
)

SMALL_MAMBA: dict[str, Any] = {
    "model_type": "mamba",
    "architectures": ["MambaForCausalLM"],
    "vocab_size": 300,
    "hidden_size": 16,
    "state_size": 4,
    "num_hidden_layers": 2,
    "max_position_embeddings": 1024,
}


TELL_KEYS = """if True:
    from messaging.sockets import ClusterKeys
    import msgspec, os
    keys = ClusterKeys.generate()
    ClusterKeys.generate = classmethod(lambda cls: keys)
    with open(os.open({path!r}, os.O_WRONLY | os.O_CREAT, 0o600), "wb") as file:
        file.write(msgspec.msgpack.encode(keys))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("serve")


@pytest.fixture(scope="module")
def server(tiny_folder: Path, folder: Path) -> Iterator[ServerProcess]:
    """Start the shared server in vLLM's spelling. It reports its cluster's keys to this module."""
    prelude = TELL_KEYS.format(path=str(folder / "keys"))
    vllm = ("--served-model-name", "tiny", "gpt-4", "--enable-chunked-prefill", "--swap_space=4", "-tp=1")
    options = ("--placement", "least_loaded", *vllm)
    with ServerProcess(tiny_folder, folder / "log", *options, prelude=prelude) as running:
        yield running.wait_ready()


@pytest.fixture
def started(request: pytest.FixtureRequest, tiny_folder: Path, tmp_path: Path) -> Iterator[ServerProcess]:
    """Start a server with one worker for one test."""
    options = getattr(request, "param", ["--no-disaggregation"])
    with ServerProcess(tiny_folder, tmp_path / "log", *options) as running:
        yield running


def test_completions_take_the_disaggregated_path(server: ServerProcess) -> None:
    before = server.workers()["decode-0"]["counters"]["handoffs_total"]
    answer = server.complete(list(range(1, 60)), max_tokens=10)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 10
    body = {"model": "tiny", "prompt": list(range(1, 60)), "temperature": 0, "max_tokens": 10, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=ANSWER_S) as stream:
        events = read_events(stream)
    text = "".join(choice["text"] for event in events for choice in event["choices"])
    assert text == answer.json()["choices"][0]["text"]
    server.wait(lambda: server.workers()["decode-0"]["counters"]["handoffs_total"] == before + 2, 30)


def test_the_announcement_lists_the_choices(server: ServerProcess) -> None:
    lines = server.log.splitlines()
    start = lines[: next(n for n, line in enumerate(lines) if line.startswith("Listening on http://")) + 1]
    for expected in ("threads per worker:", "  prefill-0: cpu, ", "  decode-0: cpu, ", " MiB", "Try:  curl "):
        assert expected in "\n".join(start)
    of_slow_hosts = (" took ", " s ago", " takes seconds")
    told = [line for line in start if not any(part in line for part in of_slow_hosts)]
    assert len(told) <= 10, "a calm start"
    curl = server.log.split("Try:  ")[1].splitlines()[0]
    answer = subprocess.run(["bash", "-c", f"{curl} -s"], capture_output=True, text=True, timeout=60)
    assert json.loads(answer.stdout)["choices"][0]["text"], answer.stderr


def test_others_cannot_write_into_rays_folders(server: ServerProcess) -> None:
    """Ray makes its folders world-writable, so the folder above must be closed."""
    (folder,) = Path("/tmp").glob(f"tandem-{server.process.pid}-*")
    assert folder.stat().st_mode & 0o777 == 0o700
    assert (folder / "ray").is_dir()


def test_it_listens_on_loopback_alone(server: ServerProcess) -> None:
    """Ray and the KV transports must do so too."""
    server.look()
    assert wide_listeners([psutil.Process(server.process.pid), *server.alive()]) == set()


def test_no_secret_of_the_cluster_shows(server: ServerProcess, folder: Path) -> None:
    """The secrets appear in no process list, environment, log, file, or Ray state."""
    keys = msgspec.msgpack.decode((folder / "keys").read_bytes(), type=ClusterKeys)
    raw = [keys.server_secret, keys.client_secret, keys.transfer_key]
    secrets = [*raw, *(base64.b64encode(each)[:-2] for each in raw), *(each.hex().encode() for each in raw)]
    server.look()
    processes = [psutil.Process(server.process.pid), *server.alive()]
    environments = of_each(server.alive(), lambda process: [process.environ()])
    given = {environment.get("RAY_AUTH_TOKEN", "").encode() for _, environment in environments}
    (token,) = given - {b""}
    for process in processes:
        command, environment = (Path(f"/proc/{process.pid}/{name}") for name in ("cmdline", "environ"))
        assert not any(each in content(command) for each in [*secrets, token])
        assert not any(each in content(environment) for each in secrets)
    assert {uids.real for _, uids in of_each(processes, lambda process: [process.uids()])} == {os.getuid()}
    (session,) = Path("/tmp").glob(f"tandem-{server.process.pid}-*")
    files = [file for file in session.rglob("*") if file.is_file() and not file.is_symlink()]
    assert len(files) > 5
    for file in [*files, folder / "log"]:
        assert not any(each in content(file) for each in [*secrets, token]), file
    named = [*of_each(processes, lambda process: [process.name()])]
    workers = [process for process, name in named if name.startswith("tandem:")]
    of_ray = [process for process, name in named if name in ("gcs_server", "raylet")]
    assert len(workers) == len(of_ray) == 2
    assert all(memory_has(process, raw) for process in workers), "else this would find nothing anywhere"
    assert not any(memory_has(process, raw) for process in of_ray)


def content(path: Path) -> bytes:
    """Return a file's content, or nothing if the file or its process has gone meanwhile."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return path.read_bytes()
    return b""


def test_status_and_complete(server: ServerProcess) -> None:
    def tandem(*arguments: str) -> Result:
        return CliRunner().invoke(app, [*arguments, "--url", server.url])

    status = tandem("status", "--json").stdout
    assert {worker["id"] for worker in json.loads(status)["workers"]} == {"prefill-0", "decode-0"}
    table = tandem("status", "--once").stdout
    assert "prefill-0" in table and "decode-0" in table
    cards = httpx.get(f"{server.url}/v1/models", timeout=ANSWER_S).json()["data"]
    assert [card["id"] for card in cards] == ["tiny", "gpt-4"]
    assert "--swap-space: not needed: " in server.log
    top = tandem("top", "--once", "--interval", "0.1").stdout
    assert "prefill-0" in top and "requests at workers" in top
    command = tandem_command("complete", "abc", "--url", server.url, "--max-tokens", "7")
    text = subprocess.run(command, cwd=ROOT, capture_output=True)
    wanted = server.complete("abc", max_tokens=7, ignore_eos=False).json()["choices"][0]["text"]
    assert text.returncode == 0
    assert text.stdout.decode() == wanted + "\n"
    refused = tandem("complete", "abc", "--model", "other")
    assert refused.exit_code == 1
    assert "other" in refused.stderr and "404" in refused.stderr


def test_all_workers_are_killed_and_no_request_fails(server: ServerProcess) -> None:
    """Running streams, and a request that arrives while no worker runs, wait for the next workers."""
    body = {"model": "tiny", "max_tokens": 300, "temperature": 0, "ignore_eos": True, "stream": True}
    body |= {"return_token_ids": True}
    prompts = [list(range(1 + number, 40 + number)) for number in range(4)]

    def tokens_of(prompt: list[int], started: threading.Semaphore | None = None) -> list[int]:
        tokens: list[int] = []
        request = httpx.stream(
            "POST", f"{server.url}/v1/completions", json=body | {"prompt": prompt}, timeout=ANSWER_S
        )
        with request as stream:
            assert stream.status_code == 200
            for line in stream.iter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line[6:])
                assert "error" not in event, event
                tokens += event["choices"][0]["token_ids"]
                if started is not None:
                    started.release()
                    started = None
        return tokens

    expected = [tokens_of(prompt) for prompt in prompts]
    started = threading.Semaphore(0)
    pids = [server.worker_pid(worker_id) for worker_id in server.workers()]
    with ThreadPoolExecutor(len(prompts)) as pool:
        running = [pool.submit(tokens_of, prompt, started) for prompt in prompts[:-1]]
        for _ in running:
            assert started.acquire(timeout=30)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        late = pool.submit(tokens_of, prompts[-1])
        assert [answer.result(90) for answer in (*running, late)] == expected
    assert "requests_parked_total" in httpx.get(f"{server.url}/metrics", timeout=ANSWER_S).text
    assert "no worker can take requests: they wait for prefill-0, decode-0" in server.log
    server.wait(lambda: httpx.get(f"{server.url}/ready", timeout=ANSWER_S).status_code == 200, 60)


@pytest.mark.parametrize(
    ("name", "number", "adopted"),
    [
        ("gcs_server", signal.SIGKILL, 2),
        ("raylet", signal.SIGSTOP, 2),
        ("ray::WorkerActor", signal.SIGKILL, 1),
    ],
    ids=["gcs", "frozen raylet", "actor"],
)
def test_workers_continue_when_ray_does_not(
    server: ServerProcess, name: str, number: signal.Signals, adopted: int
) -> None:
    """Clients notice nothing, and afterwards both workers are restarted as ever."""
    workers, told = server.workers(), server.log.count("continues with another actor")
    expected = server.complete(list(range(1, 60)), max_tokens=20).json()["choices"]
    os.kill(next(each for each in server.alive() if name in each.name()).pid, number)

    def is_over() -> bool:
        answer = server.complete(list(range(1, 60)), max_tokens=20)
        assert answer.json().get("choices") == expected, answer.text
        return server.log.count("continues with another actor") == told + adopted

    server.wait(is_over, 60)
    assert {name: each["pid"] for name, each in server.workers().items()} == {
        name: each["pid"] for name, each in workers.items()
    }
    for worker_id, worker in workers.items():
        os.kill(worker["pid"], signal.SIGKILL)

        def is_back(worker_id: str = worker_id, pid: int = worker["pid"]) -> bool:
            other = server.workers().get(worker_id)
            return other is not None and other["pid"] != pid and other["lifecycle"] == "ready"

        server.wait(is_back, 60)


def test_ctrl_c_drains_and_leaves_nothing(server: ServerProcess) -> None:
    """The last test of this module: it ends the shared server."""
    server.look()
    processes = [psutil.Process(server.process.pid), *server.alive()]
    ports, shared = listening_ports(processes), shared_files(processes)
    assert len(ports) > 3
    body = {"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 200, "temperature": 0}
    body |= {"ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=ANSWER_S) as stream:
        lines = stream.iter_lines()
        next(lines)
        server.signal(signal.SIGINT)
        events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert events[-1]["choices"][0]["finish_reason"] == "length"
    assert server.wait_end() == 0, server.log
    assert server.leftovers() == []
    assert not any(map(os.path.exists, shared))
    for port in ports:
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.1", port)) != 0 or not _ours(port, server)


@pytest.mark.parametrize("stage", ["imports", "raylet"])
def test_ctrl_c_during_the_start(started: ServerProcess, stage: str) -> None:
    """From the first imports on. Earlier, Python itself handles the signal."""
    maps = Path(f"/proc/{started.process.pid}/maps")
    if stage == "imports":
        started.wait(lambda: "msgspec" in maps.read_text(), 60)
    else:
        started.wait(lambda: started.has_begun(stage), 60)
    started.signal(signal.SIGINT)
    assert started.wait_end() == 130, started.log
    assert started.leftovers() == []
    if stage != "imports":
        assert started.log.splitlines()[-1] == "tandem: stopped before the server was ready"


PLACES = {"first imports": "builtins, '__import__'", "commands": "typer.utils, 'get_type_hints'"}


@pytest.mark.parametrize("place", PLACES)
def test_ctrl_c_in_the_command_line_leaves_no_traceback(place: str) -> None:
    """While it imports its libraries, and while the commands are made."""
    code = f"""if True:
        import builtins, os, signal, typer.utils
        from deploy.__main__ import main
        def interrupt(module, name):
            plain = getattr(module, name)
            def interrupted(what, *rest):
                if name != "__import__" or what == "deploy.cli": os.kill(os.getpid(), signal.SIGINT)
                return plain(what, *rest)
            setattr(module, name, interrupted)
        interrupt({PLACES[place]})
        main()
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_a_signal_during_the_imports_is_not_lost() -> None:
    """Python ignores exceptions in callbacks of weak references, which imports use."""
    code = """if True:
        import os, signal, weakref
        from deploy.processes import Patience
        class Lock: pass
        from protocol.config import ServeConfig
        signal.signal(signal.SIGINT, Patience(ServeConfig()).on_signal)
        lock = Lock()
        reference = weakref.ref(lock, lambda _: [os.kill(os.getpid(), signal.SIGINT), *range(9)])
        del lock
    """
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 130


def test_a_signal_before_the_server_is_ready_needs_no_terminal() -> None:
    """Nobody reads what the process prints."""
    code = """if True:
        import os, signal
        from deploy.processes import Patience
        from protocol.config import ServeConfig
        reader, writer = os.pipe()
        os.close(reader), os.dup2(writer, 2)
        signal.signal(signal.SIGTERM, Patience(ServeConfig()).on_signal)
        os.kill(os.getpid(), signal.SIGTERM)
    """
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 130


@pytest.mark.parametrize(
    "started",
    [["--no-disaggregation", "--log-format", "json", "--enable-log-requests", "--log-level", "debug"]],
    indirect=True,
    ids=["json"],
)
def test_a_second_signal_ends_at_once_and_a_structured_log_has_only_objects(started: ServerProcess) -> None:
    started.wait_ready()
    answer = started.complete([1, 2, 3], max_tokens=2)
    started.process.send_signal(signal.SIGHUP)  # a closed terminal's signal counts as SIGTERM
    started.signal(signal.SIGINT)
    assert started.wait_end() == 0
    assert started.leftovers() == []
    lines = [json.loads(line) for line in started.log.splitlines()]
    assert {line["process"] for line in lines} == {"server", "template", "decode-0"}
    (request,) = [line for line in lines if line.get("http_request_id") == answer.headers["x-request-id"]]
    assert request["level"] == "info" and request["timing"]["workers"] == {"decode": "decode-0"}


@pytest.mark.parametrize(
    ("content", "expected", "status"),
    [
        (None, "--model: ", 2),
        (SMALL_MAMBA, "worker decode-0 cannot start: UnsupportedModelError: mamba: ", 1),
    ],
    ids=["missing", "unsupported"],
)
def test_a_refused_model_is_one_clear_line(
    tmp_path: Path, content: dict[str, Any] | None, expected: str, status: int
) -> None:
    folder = tmp_path / "model"
    if content is not None:
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(content))
        save_tokenizer(folder, content["vocab_size"], 1024)
    options = ("--load-format", "dummy", "--no-disaggregation")
    with ServerProcess(folder, tmp_path / "log", *options) as running:
        assert running.wait_end(100) == status
        last = running.log.strip().splitlines()[-1]
        assert last.startswith(f"tandem: {expected}"), running.log
        assert running.leftovers() == []


def test_a_port_in_use_is_one_clear_line(tiny_folder: Path, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        with ServerProcess(tiny_folder, tmp_path / "log", "--port", port) as running:
            assert running.wait_end() == 2
    assert "--port" in running.log.splitlines()[-1]
    assert "Traceback" not in running.log


def _ours(port: int, server: ServerProcess) -> bool:
    return port in listening_ports(server.alive())
