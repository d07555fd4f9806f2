"""`tandem batch` against a small HTTP server."""

from __future__ import annotations

import fcntl
import json
import resource
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from typer.testing import CliRunner

from deploy import batch
from deploy.cli import app
from tests.full_disk import REASON, full_disk

NAMES = [f"request-{number}" for number in range(20)]


class Server(ThreadingHTTPServer):
    """Echoes each prompt and counts requests. `faults` has the statuses that requests get first."""

    def __init__(self) -> None:
        self.faults: dict[str, list[int]] = {}
        self.seen: Counter[str] = Counter()
        self.bodies: list[dict] = []
        self.keys: set[str | None] = set()
        super().__init__(("127.0.0.1", 0), Handler)


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        server = self.server
        assert isinstance(server, Server)
        server.seen[body["prompt"]] += 1
        server.bodies.append(body)
        server.keys.add(self.headers.get("authorization"))
        left = server.faults.get(body["prompt"])
        status = left.pop(0) if left else 200
        answer = {"echo": body["prompt"]} if status == 200 else {"error": {"message": f"a {status}"}}
        raw = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(raw)))
        self.send_header("x-request-id", "id-" + body["prompt"])
        self.end_headers()
        self.wfile.write(raw)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr(batch, "MAX_WAIT_S", 0.01)
    with Server() as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield running
        running.shutdown()
        thread.join()


@pytest.fixture
def run(server, tmp_path):
    def call(*options: str, lines: list[str] | None = None):
        source = tmp_path / "in.jsonl"
        source.write_text("\n".join(lines if lines is not None else map(line, NAMES)) + "\n")
        url = f"http://127.0.0.1:{server.server_address[1]}"
        arguments = ["batch", str(source), str(tmp_path / "out.jsonl"), "--url", url, *options]
        return CliRunner().invoke(app, arguments)

    return call


def line(name: str, **changes) -> str:
    return json.dumps(
        {"custom_id": name, "method": "POST", "url": "/v1/completions", "body": {"prompt": name}} | changes
    )


def answers(tmp_path) -> dict[str, dict]:
    lines = (tmp_path / "out.jsonl").read_text().splitlines()
    found = {answer["custom_id"]: answer for answer in map(json.loads, lines)}
    assert len(found) == len(lines)
    return found


def test_answers_are_written(server, run, tmp_path):
    result = run("--api-key", "secret,other", "--priority", "7")
    assert (result.exit_code, result.stdout.splitlines()[-1]) == (0, "20 completed, 0 failed")
    assert answers(tmp_path) == {
        name: {
            "id": f"batch_req_id-{name}",
            "custom_id": name,
            "response": {"status_code": 200, "request_id": f"id-{name}", "body": {"echo": name}},
            "error": None,
        }
        for name in NAMES
    }
    assert {body["priority"] for body in server.bodies} == {7}
    assert server.keys == {"Bearer secret"}


def test_a_request_keeps_its_own_priority(server, run):
    run(lines=[line("a", body={"prompt": "a", "priority": -1})])
    assert server.bodies == [{"prompt": "a", "priority": -1}]


def test_an_interrupted_batch_resumes(server, run, tmp_path):
    assert run(lines=[line(name) for name in NAMES[:8]]).exit_code == 0
    output = tmp_path / "out.jsonl"
    *whole, last = output.read_text().splitlines()
    output.write_text("\n".join(whole) + "\n" + last[:25])
    assert run().exit_code == 0
    assert set(answers(tmp_path)) == set(NAMES)
    again = json.loads(last)["custom_id"]
    assert server.seen == Counter({name: 1 + (name == again) for name in NAMES})


def test_refusals_are_answers_and_temporary_failures_are_retried(server, run, tmp_path):
    server.faults = {NAMES[0]: [400], NAMES[1]: [429, 503]}
    assert run().exit_code == 1
    found = answers(tmp_path)
    assert found[NAMES[0]]["response"]["status_code"] == 400
    assert found[NAMES[0]]["error"] == {"message": "a 400"}
    assert found[NAMES[1]]["error"] is None and server.seen[NAMES[1]] == 3


def test_failures_are_counted_and_reported(server, run):
    """Failures of an earlier run count too, and are not tried again."""
    server.faults = {"b": [404]}
    for _ in range(2):
        result = run(lines=[line("a"), line("b"), line("c")])
        assert result.exit_code == 1
        assert result.stdout.splitlines()[-1] == "2 completed, 1 failed"
        assert result.stderr == "tandem: 1 of 3 requests failed. b: a 404\n"
    assert server.seen["b"] == 1


def test_requests_that_keep_failing_are_left_for_another_run(server, run, tmp_path):
    server.faults = {NAMES[0]: [500] * batch.MAX_ATTEMPTS}
    result = run()
    assert result.exit_code == 1
    assert "19 completed, 0 failed, 1 without an answer" in result.stdout
    assert f"1 of {len(NAMES)} requests have no answer" in result.stderr and NAMES[0] in result.stderr
    assert set(answers(tmp_path)) == set(NAMES[1:])
    assert run().exit_code == 0 and set(answers(tmp_path)) == set(NAMES)


def test_a_wrong_key_ends_it(server, run, tmp_path):
    server.faults = {name: [401] for name in NAMES}
    result = run("--concurrency", "1")
    assert result.exit_code == 1 and "401" in result.stderr
    assert server.seen.total() == 1 and not answers(tmp_path)


def test_a_server_that_is_gone_ends_it(run, server):
    server.server_close()
    result = run()
    assert result.exit_code == 1 and "http://127.0.0.1" in result.stderr


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        (["{"], "line 1: "),
        ([line("a"), '{"custom_id": 1}'], "line 2: "),
        ([line("a"), line("a")], "line 2: custom_id: 'a' occurs twice"),
        ([line("")], "custom_id"),
        ([line("a", method="GET")], "method: must be POST, got 'GET'"),
        ([line("a", url="http://elsewhere")], "url"),
        ([line("a", url="/v1/\x01")], "url"),
        ([line("a", url="/v1/completions\n")], "url"),
        ([line("a", body={"prompt": "a", "stream": True})], "body.stream: "),
    ],
)
def test_bad_lines_are_named_before_anything_is_sent(server, run, lines, reason):
    result = run(lines=lines)
    assert result.exit_code == 2 and reason in result.stderr and "line" in result.stderr
    assert not server.seen


@pytest.mark.parametrize("text", ["something else", line(NAMES[0])], ids=["text", "requests"])
def test_an_existing_other_file_is_not_overwritten(server, run, tmp_path, text):
    (tmp_path / "out.jsonl").write_text(f"{text}\n")
    result = run()
    assert result.exit_code == 2 and "out.jsonl, line 1: not an answer of a batch: " in result.stderr
    assert (tmp_path / "out.jsonl").read_text() == f"{text}\n" and not server.seen


@pytest.mark.parametrize(
    "text", ["notes", '{"id":"other"}', line(NAMES[0])], ids=["text", "json", "requests"]
)
def test_a_file_without_a_last_line_end_is_not_cut(server, run, tmp_path, text):
    """Only an answer that was cut off is removed."""
    (tmp_path / "out.jsonl").write_text(text)
    result = run()
    assert result.exit_code == 2 and "out.jsonl, line 1: not an answer of a batch: " in result.stderr
    assert (tmp_path / "out.jsonl").read_text() == text and not server.seen


def test_requests_as_output_are_kept(tmp_path):
    source = tmp_path / "in.jsonl"
    source.write_text(line("a"))
    result = CliRunner().invoke(app, ["batch", str(source), str(source)])
    assert result.exit_code == 2 and source.read_text() == line("a")


def test_answers_to_other_requests_do_not_count(server, run, tmp_path):
    assert run(lines=[line(name) for name in NAMES[:8]]).exit_code == 0
    result = run(lines=[line(NAMES[0]), line("more")])
    assert (result.exit_code, result.stdout.splitlines()[-1]) == (0, "2 completed, 0 failed")
    assert set(answers(tmp_path)) == {*NAMES[:8], "more"}


def test_the_limit_of_open_files_is_raised_for_the_connections(run, monkeypatch):
    limits = {"soft": 256, "hard": 4096}
    monkeypatch.setattr(resource, "getrlimit", lambda _: tuple(limits.values()))
    monkeypatch.setattr(resource, "setrlimit", lambda _, both: limits.update(soft=both[0]))
    assert run("--concurrency", "16").exit_code == 0 and limits["soft"] == 256
    assert run("--concurrency", "2000").exit_code == 0 and limits["soft"] == 2064


def test_one_run_at_a_time_writes_the_answers(server, run, tmp_path):
    with open(tmp_path / "out.jsonl", "wb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        result = run()
    assert result.exit_code == 2 and "another run of `tandem batch` writes to it" in result.stderr
    assert not server.seen


def test_a_full_disk_is_named_and_its_batch_resumes(server, run, tmp_path):
    with full_disk(3000):
        result = run("--concurrency", "1")
    assert result.exit_code == 1
    assert result.stderr == f"tandem: the answers cannot be written: {REASON}\n"
    assert " completed, 0 failed, " in result.stdout
    assert run().exit_code == 0 and set(answers(tmp_path)) == set(NAMES)


def test_an_interrupt_still_counts_the_answers(server, run, monkeypatch):
    def interrupted(running):
        running.close()
        raise KeyboardInterrupt

    monkeypatch.setattr(batch.asyncio, "run", interrupted)
    result = run()
    assert result.exit_code != 0
    assert "0 completed, 0 failed, 20 without an answer" in result.stdout


def test_answers_are_not_written_to_another_users_file(server, run, tmp_path):
    output = tmp_path / "out.jsonl"
    output.touch()
    output.chmod(0o666)
    assert "out.jsonl can be written by others (mode 666)" in run().stderr
    output.unlink()
    output.symlink_to(tmp_path / "elsewhere")
    assert "out.jsonl is a symbolic link" in run().stderr
    assert not server.seen and not (tmp_path / "elsewhere").exists()


def test_a_missing_file_is_named(tmp_path):
    result = CliRunner().invoke(app, ["batch", str(tmp_path / "none"), str(tmp_path / "out")])
    assert result.exit_code == 2 and "No such file" in result.stderr
