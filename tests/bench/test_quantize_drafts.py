"""`tandem bench quantize-drafts`: what a pair's figures are, a small run, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bench.cli import app
from bench.quantize.drafts import config_of, drafting_of, pairs_of
from bench.speculate.figures import figures_of
from bench.speculate.measurement import Answer, Measurement, summarize
from bench.speculate.plan import Block, Case
from models.bundled import BUNDLED_FOLDER, BUNDLED_MODEL


def measured(seconds: float, num_tokens: int | None) -> Measurement:
    """Of one request of 20 tokens, of which 9 of 12 drafted ones were accepted in 3 rounds."""
    case = Case(Block("completion", 0.0, 1, "int4"), num_tokens)
    drafted = {"draft_rounds": 3, "drafted": 12, "accepted": 9} if num_tokens else {}
    answer = Answer(first=seconds / 10, last=seconds, token_ids=list(range(20)), steps=10, **drafted)
    return summarize(case, 0, [answer])


def test_a_pair_is_held_against_its_own_target_and_against_the_plain_one() -> None:
    figures = {
        "bf16": figures_of([measured(4.0, None), measured(2.0, 4)], price=1.0),
        "int8": figures_of([measured(2.0, None), measured(1.6, 4)], price=1.0),
    }
    plain, quantized = pairs_of(figures)
    assert (plain.target, plain.draft, plain.speedup, plain.over_plain) == ("bf16", "int4", 2.0, 2.0)
    assert (quantized.target, quantized.speedup, quantized.over_plain) == ("int8", 1.25, 2.5)
    assert quantized.acceptance == 0.75 and quantized.tau == 4.0 and quantized.same


def test_targets_and_drafts_have_the_formats_of_their_pair() -> None:
    model = str(BUNDLED_MODEL)
    assert [config_of(name, model, 4).quantization for name in ("bf16", "int4")] == [None, "int4"]
    drafts = [drafting_of(name, None, model) for name in ("bf16", "fp8")]
    assert [draft.label for draft in drafts] == ["bf16", "fp8"]
    assert [draft.config.quantization for draft in drafts] == [None, "fp8"]
    assert all(draft.config.model == str(BUNDLED_FOLDER / "tandem-code-1m") for draft in drafts)


def test_drafts_change_no_token_in_whatever_formats(tmp_path: Path) -> None:
    options = [
        "--target",
        "int4",
        "--draft",
        "int8",
        "--concurrency",
        "1",
        "--rounds",
        "1",
        "--requests",
        "1",
    ]
    options += ["--output-len", "8", "--threads", "1", "--output", str(tmp_path)]
    result = CliRunner().invoke(app, ["quantize-drafts", *options])
    assert result.exit_code == 0, result.output
    pairs = json.loads((tmp_path / "results.json").read_text())["pairs"]
    assert [(each["target"], each["draft"]) for each in pairs] == [("bf16", "int8"), ("int4", "int8")]
    assert all(each["same"] and each["throughput"] > 0 for each in pairs)
    assert "| 1 | int4 | int8 |" in (tmp_path / "README.md").read_text()


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--target", "int3"], "--target: 'int3' is not one of bf16,int8,int4,fp8,mxfp4"),
        (["--draft", "bf16,"], "--draft: '' is not one of"),
        (["--concurrency", "0"], "--concurrency: 0 is not within 1 to 64"),
        (["--concurrency", "one"], "--concurrency: 'one' is not numbers with commas"),
        (["--num-tokens", "many"], "--num-tokens: 'many' is neither a number nor auto"),
        (["--draft-model", "/nowhere"], "/nowhere"),
    ],
)
def test_bad_input_is_refused(options: list[str], complaint: str) -> None:
    result = CliRunner().invoke(app, ["quantize-drafts", *options], env={"COLUMNS": "300"})
    assert result.exit_code == 2 and complaint in " ".join(result.output.split())
