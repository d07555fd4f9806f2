"""Wrong options of `tandem bench` are refused by name before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from bench.cli import app
from models.bundled import BUNDLED_MODEL

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
