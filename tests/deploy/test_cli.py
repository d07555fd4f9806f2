"""The command line: its options, its errors and how fast it answers."""

from __future__ import annotations

import errno
import os
import resource
import socket
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from deploy.cli import app
from deploy.client import client
from deploy.launcher import warn_of_exposure
from deploy.preflight import check_start
from protocol.config import ServeConfig, field_docs, flag_name
from router.api_keys import hash_of, read_key_file
from tests.deploy.server_process import ROOT, tandem_command
from tests.full_disk import REASON, full_disk


def invoke(*arguments: str, **environment: str) -> Result:
    return CliRunner().invoke(app, arguments, env=environment)


def shown(*arguments: str) -> str:
    return " ".join(CliRunner().invoke(app, ["serve", *arguments], env={"COLUMNS": "200"}).stdout.split())


def test_help_names_every_option_and_tells_of_a_few() -> None:
    first, every = shown("--help"), shown("--help", "all")
    for field in field_docs():
        assert flag_name(field) in every and flag_name(field) in first
    assert "--disaggregation / --no-disaggregation" in every
    assert "(default: 8000)" in every and "(default: 8000)" in first
    assert "[auto|cpu|cuda]" in every and "[auto|cpu|cuda]" not in first
    assert "[MODEL]" in first
    assert "--itl-budget" in shown("--help=batch") and "--port" not in shown("--help=batch")
    assert "Sequences in one step" in shown("-h", "--max-num-seqs")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--port", "99999"], "--port: must be an integer from 0 to 65535, got '99999'"),
        (["--enable-prefix-caching=maybe"], "'--enable-prefix-caching' does not take a value"),
        (["--model", "a", "b"], "--model: given twice"),
        (["--model", ""], "--model: must name a folder, a file or a hub id, got ''"),
        (["--served-model-name", " , "], "--served-model-name: names no model"),
        (
            ["--request-timeout", "inf"],
            "--request-timeout: must be a finite number above 0, at most 1e+09, got 'inf'",
        ),
        (["--max-model-len", "1"], "--max-model-len: must be an integer from 2 to 2147483647, got '1'"),
        (["--worker-threads", "10000"], "--worker-threads: must be an integer from 1 to 1024, got '10000'"),
        (["--api-key", "good,schlüssel"], "--api-key: must have printable ASCII characters only"),
        (["/no/such/folder"], "--model: there is no folder /no/such/folder"),
        (["--config", "{tmp_path}/bad.yaml"], "bad.yaml: while parsing a flow sequence"),
        (["--config", "{tmp_path}/typo.yaml"], "-length: there is no such option; is --max-model-len meant?"),
        (["--speculative-config", '{"metod": "ngram"}'], "metod: there is no such field; is method meant?"),
        (["--speculative-config.method=ngram", "--spec-tokens=99"], "integer from 0 to 32 or 'auto', got 99"),
    ],
)
def test_bad_options_are_one_line_that_names_the_flag(
    arguments: list[str], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server's start stops where it would bind the port."""
    monkeypatch.setattr("deploy.serve.serve", check_start)
    for name, text in (("bad.yaml", "port: [1\n"), ("typo.yaml", "max-model-length: 5\n")):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o600)
    arguments = [argument.replace("{tmp_path}", str(tmp_path)) for argument in arguments]
    done = CliRunner().invoke(app, ["serve", "--device", "cpu", *arguments])
    assert done.exit_code == 2, done
    assert done.stderr.startswith("tandem: ") and done.stderr.count("\n") == 1
    assert expected in done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["status", "--intervall", "3"], "--intervall: there is no such option; is --interval meant?"),
        (["serv"], "No such command 'serv'. Did you mean 'serve'?"),
        (["serve", "a", "b"], "Got unexpected extra argument(s) (b)"),
        (["top", "--url", "a:80"], "--url: must be like http://127.0.0.1:8000, got 'a:80'"),
        (
            ["quantize", "--method", "int8", "--output", "o", "--model", "m.gguf"],
            "--model: m.gguf: only `tandem serve` reads GGUF files; give the folder or hub id of the model "
            "that the file was made from",
        ),
        (["batch", "a", "b", "--url", "http://"], "--url: must be like http://127.0.0.1:8000, got 'http://'"),
        (["scale", "--url", "http://[::1"], "--url: must be like http://127.0.0.1:8000, got 'http://[::1'"),
        (["complete", "x", "--temperature", "inf"], "--temperature: must be a finite number, got inf"),
        (["complete", os.fsdecode(b"\xff")], "PROMPT: must be UTF-8"),
        (["complete", "x", "--stop", os.fsdecode(b"\xff")], "--stop: must be UTF-8"),
        (["complete", "x", "--model", os.fsdecode(b"\xff")], "--model: must be UTF-8"),
        (["drain", os.fsdecode(b"\xff")], "WORKER: must be UTF-8"),
        (["top", "--interval", "inf"], "--interval: must be a finite number, got inf"),
        (["top", "--url", "http://.."], "--url: must be like http://127.0.0.1:8000, got 'http://..'"),
        (["top", "--url", "http://☃.a"], "--url: must be like http://127.0.0.1:8000, got 'http://☃.a'"),
        (["status", "--api-key", "schlüssel"], "--api-key: must have printable ASCII characters only"),
    ],
)
def test_wrong_arguments_are_one_line(arguments: list[str], said: str) -> None:
    done = CliRunner().invoke(app, arguments)
    assert (done.exit_code, done.stderr) == (2, f"tandem: {said}\n")


def test_a_prompt_of_another_encoding_is_one_line() -> None:
    done = CliRunner().invoke(app, ["complete", "-"], input=b"a\xff")
    said = "PROMPT: standard input must be UTF-8: invalid start byte at byte 1"
    assert (done.exit_code, done.stderr) == (2, f"tandem: {said}\n")


def test_a_key_is_added_to_a_file_in_the_home_folder(tmp_path: Path) -> None:
    done = invoke("key", "add", "me", HOME=str(tmp_path), TANDEM_API_KEY_FILE="~/keys")
    assert done.exit_code == 0, done
    assert [entry.name for entry in read_key_file(str(tmp_path / "keys"))] == ["me"]


def test_a_file_in_the_home_folder_is_found_after_an_equals_sign(tmp_path: Path) -> None:
    options = ["--method=int8", "--model=tandem-code-10m", "--output=~/out", "--data=~/none.txt"]
    done = invoke("quantize", *options, HOME=str(tmp_path))
    assert (done.exit_code, done.stderr) == (2, f"tandem: --data: {tmp_path}/none.txt does not exist\n")


def test_a_fault_of_the_disk_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "plan/plan.svg")

    monkeypatch.setattr("planner.command.parse", full)
    arguments = ["plan", "--trace", "t", "--slo-ttft", "1", "--slo-tpot", "1", "--workers", "2"]
    done = CliRunner().invoke(app, arguments)
    assert (done.exit_code, done.stderr) == (1, "tandem: plan/plan.svg: No space left on device\n")


@pytest.mark.parametrize("arguments", [["status", "--once"], ["complete", "abc"]])
def test_commands_without_a_server_fail_clearly(arguments: list[str]) -> None:
    done = invoke(*arguments, "--url", "http://127.0.0.1:9")
    assert done.exit_code == 1
    assert done.stderr.startswith("tandem: http://127.0.0.1:9"), done.stderr


def test_a_server_that_never_answers_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel accepts connections of a process that hangs."""
    monkeypatch.setattr("deploy.client.ANSWER_TIMEOUT_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as hanging:
        url = f"http://127.0.0.1:{hanging.getsockname()[1]}"
        for command in (["status", "--once"], ["top"], ["doctor", "--seconds", "0.1"], ["complete", "x"]):
            result = invoke(*command, "--url", url)
            assert result.exit_code == 1, result.output
            assert result.stderr == f"tandem: {url}: it is connected, but does not answer\n"


def test_a_host_that_takes_no_connection_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deploy.client._CONNECT_TIMEOUT_S", 0.1)
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full:
        url = f"http://127.0.0.1:{full.getsockname()[1]}"
        with socket.create_connection(full.getsockname()):  # the kernel drops further ones
            for command in (["status", "--once"], ["doctor", "--seconds", "0.1"], ["complete", "x"]):
                begun = time.monotonic()
                assert invoke(*command, "--url", url).exit_code == 1
                assert time.monotonic() - begun < 10


def test_a_host_that_vanishes_is_not_waited_for() -> None:
    """The kernel asks the host for signs of life while an answer takes long."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(10)
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        with client(url, None, waits=True) as http, ThreadPoolExecutor() as pool:
            asked = pool.submit(http.get, "/")
            with server.accept()[0] as connection:
                connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
                answer = asked.result(10)
                ours = answer.extensions["network_stream"].get_extra_info("socket")
                assert ours.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)


@pytest.mark.parametrize("answer", [b"<html>", b"[]", b"{}"])
@pytest.mark.parametrize(
    "arguments", [["status", "--once"], ["top", "--once"], ["doctor"], ["restart"], ["complete", "x"]]
)
def test_another_kind_of_server_is_named(arguments: list[str], answer: bytes) -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(answer)

        def do_POST(self) -> None:
            self.do_GET()

        def log_message(self, *_: object) -> None:
            """Write nothing."""

    with HTTPServer(("127.0.0.1", 0), Handler) as other:
        threading.Thread(target=other.serve_forever, args=[0.01], daemon=True).start()
        done = invoke(*arguments, "--url", f"http://127.0.0.1:{other.server_port}")
        other.shutdown()
    assert done.exit_code == 1 and done.stderr.startswith(f"tandem: http://127.0.0.1:{other.server_port}/")
    assert "not an answer of Tandem: a JSON object with " in done.stderr and done.stderr.count("\n") == 1


def test_a_deleted_working_folder_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    done = invoke("version")
    assert (done.exit_code, done.stderr) == (
        2,
        "tandem: the working folder was deleted: change to another one\n",
    )


def test_version() -> None:
    assert invoke("version").stdout.strip() and invoke("--version").stdout == invoke("version").stdout


def test_help_is_fast() -> None:
    """Measured in CPU time, which a busy machine does not stretch."""
    before = _children_seconds()
    subprocess.run(tandem_command("serve", "--help"), cwd=ROOT, capture_output=True, check=True, timeout=60)
    assert _children_seconds() - before < 1.5


def _children_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def test_a_key_is_added_and_shown_once(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    options = ("--api-key-file", str(path), "--requests-per-minute", "60", "--priority", "5")
    done = invoke("key", "add", "alice", *options)
    assert (done.exit_code, done.stderr) == (0, "")
    (entry,) = read_key_file(str(path))
    assert (entry.name, entry.requests_per_minute, entry.priority) == ("alice", 60, 5)
    assert entry.sha256 == hash_of(done.stdout.strip()) and done.stdout.strip() not in path.read_text()
    again = invoke("key", "add", "alice", *options)
    assert (again.exit_code, again.stdout) == (2, "")
    assert again.stderr.startswith("tandem: --api-key-file: ") and again.stderr.count("\n") == 1


def test_a_full_disk_leaves_the_keys_as_they_were(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    assert invoke("key", "add", "alice", "--api-key-file", str(path)).exit_code == 0
    before = path.read_bytes()
    with full_disk(len(before) + 20):
        done = invoke("key", "add", "bob", "--api-key-file", str(path))
    said = f"tandem: --api-key-file: cannot write {path}: {REASON}\n"
    assert (done.exit_code, done.stdout, done.stderr) == (2, "", said)
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, ""),
        ({"host": "::1"}, ""),
        ({"host": "0.0.0.0"}, "takes requests of everybody"),
        ({"host": "gpu-3", "api_key": ","}, "takes requests of everybody"),
        ({"host": "0.0.0.0", "api_key": "x"}, "is not encrypted"),
        ({"host": "0.0.0.0", "api_key_file": "x", "tls_cert": "x", "tls_key": "x"}, ""),
    ],
)
def test_listening_beyond_loopback_is_warned_about(
    options: dict[str, Any], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert ServeConfig().host == "127.0.0.1"
    warn_of_exposure(ServeConfig(**options))
    assert said in caplog.text and bool(said) == bool(caplog.text)
