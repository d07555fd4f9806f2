"""The command line of `tandem bench`: its tables and JSON, and wrong options that are refused by name."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bench.cli import app
from bench.peers.vllm_proxy import LAST_CHUNK, ReceivedRequest, chunk, head
from bench.report import publish
from models.bundled import BUNDLED_MODEL
from tests.deploy.server_process import ROOT


async def complete(request: ReceivedRequest, writer: asyncio.StreamWriter) -> None:
    """Answer every request with `x`; refuse prompts that contain the token 13."""
    fields = json.loads(request.body)
    if fields["prompt"] == [13]:
        writer.write(head(400, 2) + b"{}")
        return
    writer.write(head(200, None, "text/event-stream"))
    for _ in range(fields["max_tokens"]):
        writer.write(chunk(b'data: {"choices": [{"text": "x"}]}\n\n'))
    usage = {"prompt_tokens": len(fields["prompt"]), "completion_tokens": fields["max_tokens"]}
    last = b"data: " + json.dumps({"usage": usage}).encode() + b"\n\ndata: [DONE]\n\n"
    writer.write(chunk(last) + LAST_CHUNK)


@pytest.fixture
async def url(start_server) -> str:
    return await start_server(complete)


async def run(*arguments: object):
    return await asyncio.to_thread(CliRunner().invoke, app, ["serve", "--model", "m", *map(str, arguments)])


async def test_table_and_json(url, tmp_path):
    path = tmp_path / "deep" / "figures.json"
    load = ("--num-prompts", 5, "--random-input-len", 7, "--random-output-len", 3, "--max-concurrency", 2)
    result = await run(
        "--base-url", url, *load, "--goodput", "ttft:5", "--api-key", "secret", "--output-json", path
    )
    assert result.exit_code == 0, result.output
    for words in ("time to first token", "output tokens/s", "p99", "goodput"):
        assert words in result.output
    figures = json.loads(path.read_text())
    assert figures["summary"]["completed"] == 5
    assert figures["summary"]["input_tokens"] == 35
    assert figures["summary"]["output_tokens"] == 15
    assert figures["settings"]["max_concurrency"] == 2
    assert "secret" not in path.read_text()


async def test_failed_requests_are_shown_by_kind(url, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": [1, 2]}\n{"prompt": [13]}\n{"prompt": [13]}\n')
    result = await run("--base-url", url, "--prompt-file", prompts, "--num-warmups", 0)
    assert result.exit_code == 0, result.output
    assert "2 x HTTP 400" in result.output
    prompts.write_text('{"prompt": [13]}\n')
    assert (await run("--base-url", url, "--prompt-file", prompts, "--num-warmups", 0)).exit_code == 1


async def test_trace(url, tmp_path):
    trace = tmp_path / "trace.jsonl"
    line = {"timestamp": 0, "input_length": 600, "output_length": 80, "hash_ids": [1, 2]}
    trace.write_text(json.dumps(line) + "\n" + json.dumps(line | {"timestamp": 1000}) + "\n")
    path = tmp_path / "figures.json"
    options = ("--trace-speedup", 10, "--max-input-len", 50, "--max-output-len", 5)
    result = await run("--base-url", url, "--trace", trace, *options, "--output-json", path)
    assert result.exit_code == 0, result.output
    summary = json.loads(path.read_text())["summary"]
    assert (summary["input_tokens"], summary["output_tokens"]) == (100, 10)
    assert summary["duration"] >= 0.1


async def test_no_server(unused_tcp_port):
    result = await run("--base-url", f"http://127.0.0.1:{unused_tcp_port}", "--num-prompts", 1)
    assert result.exit_code == 1
    assert "no connection" in result.output


def test_figures_that_cannot_be_written_are_shown(tmp_path, capsys):
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        publish(tmp_path / "file" / "out", {}, "the figures")
    assert "the figures" in capsys.readouterr().out


def test_figures_that_cannot_be_shown_are_written(tmp_path):
    script = (
        "import sys, pathlib; from bench.report import publish; publish(pathlib.Path(sys.argv[1]), {}, 'x')"
    )
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-c", script, tmp_path], cwd=ROOT, stdout=full)
    assert done.returncode != 0
    assert (tmp_path / "results.json").exists() and (tmp_path / "README.md").read_text() == "x"


async def test_paths_may_begin_in_the_home_folder(url, tmp_path, monkeypatch):
    """A shell expands no `~` after an equals sign."""
    monkeypatch.setenv("HOME", str(tmp_path))
    result = await run("--base-url", url, "--num-prompts", 1, "--output-json=~/figures.json")
    assert result.exit_code == 0, result.output
    assert (tmp_path / "figures.json").exists()


GOODPUT = "goodput --model {tmp_path} --system http://127.0.0.1:1 --trace {tmp_path}/trace.jsonl"
FIVE = "five --output {tmp_path}/out"


@pytest.mark.parametrize(
    ("command", "options", "complaint"),
    [
        ("serve --model m", "--request-rate 0", "--request-rate"),
        ("serve --model m", "--request-rate nan", "--request-rate must be above 0, got nan"),
        (
            "serve --model m",
            "--request-rate 1 --burstiness nan",
            "--burstiness must be above 0 and finite, got nan",
        ),
        ("serve --model m", "--goodput speed:1", "--goodput"),
        ("serve --model m", "--goodput ttft:nan", "--goodput needs seconds above 0, got 'ttft:nan'"),
        ("serve --model m", "--extra-body [1]", "--extra-body"),
        ("serve --model m", "--extra-body {", "--extra-body"),
        ("serve --model m", "--base-url localhost", "URL"),
        ("serve --model m", "--chat", "--prompt-file"),
        ("serve --model m", "--num-prompts 0", "num-prompts"),
        ("serve --model m", "--num-prompts 99999999999", "less than or equal to 16777216"),
        ("serve --model m", "--random-input-len 99999999999", "less than or equal to 16777216"),
        ("speculate", "--method magic", "--method: 'magic' is none of draft_model"),
        ("speculate", "--workload poetry", "--workload: 'poetry' is none of completion, edit"),
        ("speculate", "--num-tokens 1,x", "--num-tokens: "),
        ("speculate", "--concurrency many", "--concurrency: "),
        ("quantize", "--kv bf16,int4", "--kv: 'int4' is not one of bf16,int8,fp8"),
        ("quantize", "--checkpoint int4=folder", "has no name of its own, as in awq=folder"),
        ("quantize", "--checkpoint awq=/nowhere", "'/nowhere' is no folder with a model"),
        ("quantize", f"--checkpoint awq={BUNDLED_MODEL}", "--checkpoint: held-out texts are for --model"),
        ("quantize", "--format int8,int3", "'int3' is not one of bf16"),
        ("quantize", "--concurrency 1,x", "is no list of whole numbers"),
        ("quantize", "--concurrency 0", "is not within 1 to 64"),
        ("quantize", "--shape llama-70b", "is not one of llama-29m"),
        ("gpu", "--size 7B", "--size: '7B' is none of 0.6B"),
        ("gpu", "--batch 1,x", "--batch: '1,x' is no list of whole numbers"),
        ("gpu", "--num-tokens 64", "--num-tokens: '64' is not within 1 to 63"),
        ("gpu", "--chunk 0", "--chunk: '0' is not within 1 to 32768"),
        ("transfer", "--rows shm,carrier-pigeon", "carrier-pigeon"),
        (GOODPUT, "--speedups 4,2", "ascending"),
        (GOODPUT, "--seconds 0", "seconds"),
        (GOODPUT, "--rounds 0", "rounds"),
        (FIVE, "--factors sharing,batching", "--factors: 'batching' is none of disaggregation, speculation"),
        (FIVE, "--workload chats", "--workload: 'chats' is none of chat, long-prompts, long-answers"),
        (FIVE, "--max-model-len 512", "--max-model-len: requests of chat have 640 tokens, got 512"),
        (FIVE, "--speculative-config {}", "--speculative-config"),
        (FIVE, "--speculative-config x", "--speculative-config: must be JSON"),
        (FIVE, "--price 0", "--price"),
        (FIVE, "--repeats 0", "--repeats"),
        (FIVE, "--model /nowhere", "--model: there is no folder /nowhere"),
    ],
)
def test_bad_options_are_named(tmp_path: Path, command: str, options: str, complaint: str) -> None:
    (tmp_path / "trace.jsonl").touch()
    arguments = [each.replace("{tmp_path}", str(tmp_path)) for each in f"{command} {options}".split()]
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "300", "NO_COLOR": "1"})
    assert result.exit_code == 2
    assert complaint in " ".join(result.output.replace("│", " ").split())
    assert not (tmp_path / "out").exists()
