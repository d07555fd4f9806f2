"""Starts and ends the systems of a comparison, and parses their specs."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import typer

from bench import servers
from bench.peers.systems import SYSTEMS, SystemSettings, labels_of, parse_system
from bench.servers import Command, free_port, running
from tests.processes import is_running
from tests.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]

# Answers 200, and has a child process that would outlive it.
SERVER = """
import http.server, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("child", child.pid, flush=True)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def command(code: str, port: int) -> Command:
    return Command("server", [sys.executable, "-c", code, str(port)], f"http://127.0.0.1:{port}/health")


def child_in(folder: Path) -> psutil.Process:
    """Return the child process that the server's log names."""
    return psutil.Process(int((folder / "server.log").read_text().split()[1]))


def test_a_system_is_ready_when_entered_and_gone_with_its_children_when_left(tmp_path):
    port = free_port()
    with running([command(SERVER, port)], tmp_path, timeout=120):
        child = child_in(tmp_path)
        server = child.parent()
        assert server is not None and server.is_running()
    assert not server.is_running()
    assert not is_running(child)


def start_bench(tmp_path):
    bench = f"""
import signal, time
from pathlib import Path
from tests.bench.test_bench_systems import SERVER, command, running
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # tests may run under nohup
with running([command(SERVER, {free_port()})], Path({str(tmp_path)!r}), timeout=120):
    print("ready", flush=True)
    time.sleep(600)
"""
    process = subprocess.Popen([sys.executable, "-c", bench], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGKILL])
def test_a_killed_bench_leaves_no_server(tmp_path, number):
    process = start_bench(tmp_path)
    server = child_in(tmp_path).parent()
    process.send_signal(number)
    assert process.wait(60) == -number
    assert server is not None
    wait_until(lambda: not is_running(server), 60)
    child_in(tmp_path).kill()


def test_a_terminated_bench_leaves_no_server(tmp_path):
    process = start_bench(tmp_path)
    child = child_in(tmp_path)
    server = child.parent()
    process.terminate()
    assert process.wait(180) == 128 + signal.SIGTERM
    assert server is not None
    assert not server.is_running()


def test_a_server_that_ends_is_reported_with_its_log(tmp_path):
    failing = command("import sys; print('no such model'); sys.exit(3)", free_port())
    with (
        pytest.raises(RuntimeError, match=r"server ended with 3:\nno such model"),
        running([failing], tmp_path, timeout=120),
    ):
        pytest.fail("entered a system that isn't ready")


def test_a_server_that_ends_once_it_is_ready_is_reported_too(tmp_path):
    with running([command(SERVER, free_port())], tmp_path, timeout=120) as [server]:
        server.check()
        child_in(tmp_path).kill()
        os.kill(server.pid, signal.SIGKILL)
        os.waitid(os.P_PID, server.pid, os.WEXITED | os.WNOWAIT)
        with pytest.raises(RuntimeError, match="server ended with -9"):
            server.check()


def test_a_server_that_never_answers_is_ended_after_the_timeout(tmp_path):
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
    started = time.monotonic()
    with (
        pytest.raises(RuntimeError, match="in time"),
        running([command(code, free_port())], tmp_path, timeout=4),
    ):
        pytest.fail("entered a system that isn't ready")
    assert time.monotonic() - started < 60
    assert not psutil.pid_exists(int((tmp_path / "server.log").read_text().split()[0]))


def test_ports_are_given_once_in_all_processes(monkeypatch):
    monkeypatch.setattr(servers, "_PORTS", range(servers._PORTS.start, servers._PORTS.start + 40))
    code = "import sys; from bench import servers\n"
    code += "servers._PORTS = range(int(sys.argv[1]), int(sys.argv[2]))\n"
    code += "print(*[servers.free_port() for _ in range(10)], flush=True); input()"
    argv = [sys.executable, "-c", code, str(servers._PORTS.start), str(servers._PORTS.stop)]
    others = [
        subprocess.Popen(argv, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    given = [free_port() for _ in range(10)]
    for other in others:
        assert other.stdout is not None
        given += map(int, other.stdout.readline().split())
    for other in others:
        other.communicate("\n")
    assert len(set(given)) == 30


@pytest.fixture
def setting(tmp_path: Path) -> SystemSettings:
    folder = tmp_path / "vllm" / "bin"
    folder.mkdir(parents=True)
    os.symlink(sys.executable, folder / "python")
    built = tmp_path / "llama.cpp" / "build" / "bin"
    built.mkdir(parents=True)
    for tool in ("llama-server", "llama-quantize"):
        (built / tool).touch()
    return SystemSettings(tmp_path / "model", tmp_path)


@pytest.mark.parametrize("name", SYSTEMS)
def test_every_system_takes_a_label_and_flags(setting, name):
    system = parse_system(f"mine={name} --block-size 32", setting)
    assert system.label == "mine"
    assert len({c.ready_url for c in system.commands}) == len(system.commands)
    servers = [c for c in system.commands if "--model" in c.argv]
    assert servers
    assert all(c.argv[-2:] == ["--block-size", "32"] for c in servers)
    assert all(str(setting.model) in c.argv for c in servers)


def test_running_server_by_url(setting):
    system = parse_system("http://127.0.0.1:8000 tiny", setting)
    assert (system.base_url, system.model, system.commands) == ("http://127.0.0.1:8000", "tiny", ())
    assert parse_system("ours=http://127.0.0.1:8000", setting).label == "ours"


def test_both_servers_of_a_disaggregated_vllm_have_ports_of_their_own(setting):
    prefill, decode, proxy = parse_system("vllm-disaggregated-tamed", setting).commands
    assert prefill.env["VLLM_NIXL_SIDE_CHANNEL_PORT"] != decode.env["VLLM_NIXL_SIDE_CHANNEL_PORT"]
    assert "kv_producer" in " ".join(prefill.argv) and "kv_consumer" in " ".join(decode.argv)
    assert prefill.ready_url.removesuffix("/health") in proxy.argv
    assert decode.ready_url.removesuffix("/health") in proxy.argv


@pytest.mark.parametrize(("spec", "complaint"), [("sglang", "unknown system 'sglang'"), ("", "empty")])
def test_bad_spec(setting, spec, complaint):
    with pytest.raises(ValueError, match=complaint):
        parse_system(spec, setting)


def test_systems_with_one_label_are_refused(setting):
    assert labels_of(["tandem", "other=tandem"], setting) == ["tandem", "other"]
    with pytest.raises(typer.BadParameter, match="two are labelled 'tandem'"):
        labels_of(["tandem", "tandem"], setting)


def test_missing_environment_is_named(tmp_path):
    with pytest.raises(ValueError, match="tandem bench setup"):
        parse_system("vllm", SystemSettings(tmp_path, tmp_path))
    with pytest.raises(ValueError, match=r"llama-server is missing: run .*tandem bench setup llama.cpp"):
        parse_system("llama.cpp-q4_0", SystemSettings(tmp_path, tmp_path))
