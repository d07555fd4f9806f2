"""`tandem bench quantize`: its JSON for a small model, and the flags that it refuses."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForCausalLM
from typer.testing import CliRunner, Result

from bench.cli import app
from models.bundled import BUNDLED_MODEL


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["quantize", *map(str, arguments)])


def test_formats_are_compared_with_bf16(tmp_path: Path) -> None:
    shape: dict[str, Any] = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 128}
    config = AutoConfig.for_model("llama", **shape, num_hidden_layers=2, num_attention_heads=2)
    config.save_pretrained(tmp_path)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    limits = ["--rounds", 1, "--texts", 2, "--prompt-len", 20, "--output-len", 3, "--threads", 1]
    done = run("--model", tmp_path, "--format", "int4", "--concurrency", "1,2", *limits, "--output", tmp_path)
    assert done.exit_code == 0, done.output
    found = json.loads((tmp_path / "results.json").read_text())
    assert found["weight_bytes"]["int4"] < found["weight_bytes"]["bf16"]
    for name in ("bf16", "int4"):
        speed = found["tokens_per_second"][name]
        assert speed["prefill"] > 0 and speed["decode"].keys() == {"1", "2"}
    plain, int4 = found["quality"]["bf16"], found["quality"]["int4"]
    assert (plain["divergence"], plain["agreement"]) == (0, 1)
    assert 0 < int4["divergence"] < 0.2 and 0.7 < int4["agreement"] < 1
    assert plain["bits_per_byte"] == pytest.approx(int4["bits_per_byte"], rel=0.1)


def test_each_weight_format_is_compared_with_each_kv_format(tmp_path: Path) -> None:
    """A copy of the bundled model serves as the checkpoint. Its quality is measured on the bundled model."""
    shutil.copytree(BUNDLED_MODEL, tmp_path / "copy")
    limits = ["--rounds", 1, "--texts", 2, "--prompt-len", 20, "--output-len", 3, "--threads", 1]
    done = run(
        *("--model", BUNDLED_MODEL.name, "--format", "int4+head", "--kv", "bf16,int8"),
        *("--checkpoint", f"copy={tmp_path / 'copy'}", "--concurrency", "2", *limits, "--output", tmp_path),
    )
    assert done.exit_code == 0, done.output
    found = json.loads((tmp_path / "results.json").read_text())
    assert list(found["quality"]) == ["bf16", "int4+head", "int4+head, KV int8", "copy", "copy, KV int8"]
    plain, rounded = found["quality"]["bf16"], found["quality"]["copy, KV int8"]
    assert found["quality"]["copy"] == plain and plain["divergence"] == 0
    assert 0 < rounded["divergence"] < found["quality"]["int4+head"]["divergence"]
    assert found["kv_token_bytes"]["copy, KV int8"] < 0.6 * found["kv_token_bytes"]["copy"]
    tokens = 2 * (16 + 3)
    for name, memory in found["memory_bytes"].items():
        assert memory == found["weight_bytes"][name] + tokens * found["kv_token_bytes"][name]
    table = (tmp_path / "README.md").read_text()
    assert "| int4+head | int8 |" in table
