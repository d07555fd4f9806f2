"""The experiment on a simulated fleet: what techniques make of a profile, loads, and the command."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from bench.cli import app
from bench.five.factors import FACTORS
from bench.five.fleet import (
    BLOCK_TOKENS,
    FLEET_WORKLOADS,
    Fleet,
    choices_of,
    drafting,
    load,
    quantized,
    simulate_cell,
)
from planner.profile import DEFAULT_PROFILE, read_profile, write_profile
from planner.scenarios import Slo

H100 = read_profile(DEFAULT_PROFILE)
FLEET = Fleet(H100, 2, 16384, Slo(2.0, 0.03), 0.9, 4.0, 1)


def test_quantized_weights_and_kv_are_fewer_bytes_to_read_and_leave_more_room() -> None:
    changed, costs = quantized(H100), H100.costs
    bytes_per_s = costs.kv_bytes / costs.context_s
    linear = 6.98e9 * 2
    assert changed.costs.step_s * bytes_per_s == pytest.approx(16.06e9 - linear * (1 - 4.125 / 16), rel=0.01)
    assert (changed.costs.kv_bytes, changed.costs.context_s) == (65536, costs.context_s / 2)
    assert changed.costs.token_s == costs.token_s and changed.costs.row_s == costs.row_s
    room = 72e9 - changed.costs.step_s * bytes_per_s - 2e9
    assert changed.kv_tokens * 65536 == pytest.approx(room, rel=0.01), "as the profile's own room"


def test_drafts_cost_levels_and_rows_and_bring_what_survives() -> None:
    changed = drafting(H100, 2).costs
    assert changed.tokens_per_row == pytest.approx(1 + 0.73 + 0.521, abs=1e-3)
    assert changed.row_s == pytest.approx(3 * H100.costs.row_s)
    assert changed.step_s == pytest.approx(0.006 + 2 * 0.0005)
    assert drafting(H100, 0) is H100


def test_cells_choose_among_layouts_and_drafts() -> None:
    fleet = msgspec.structs.replace(FLEET, workers=8)
    [plain] = choices_of(fleet, frozenset())
    assert plain.scenario.mode == "colocated" and plain.profile.max_num_seqs == 412000 // 16384
    [paged] = choices_of(fleet, frozenset({"paging"}))
    assert paged.profile.max_num_seqs == 256
    every = choices_of(fleet, frozenset(FACTORS))
    assert {(each.scenario.prefill, each.scenario.decode) for each in every} == {(2, 6), (4, 4), (6, 2)}
    assert {each.drafted for each in every} == {0, 1, 2, 3} and len(every) == 12


def test_prompts_share_the_prefix_or_nothing() -> None:
    chat = FLEET_WORKLOADS["chat"]
    shared = load(chat, 10.0, 10.0, is_shared=True, seed=0)
    assert len(shared) == 100 and shared[-1].arrival <= 10.0
    assert {request.input_len for request in shared} == {chat.prompt}
    prefix = chat.shared // BLOCK_TOKENS
    assert len({tuple(request.hash_ids[:prefix]) for request in shared}) == 1
    apart = load(chat, 10.0, 10.0, is_shared=False, seed=0)
    for requests, common in ((shared, prefix), (apart, 0)):
        ids = [block for request in requests for block in request.hash_ids[common:]]
        assert len(set(ids)) == len(ids) and all(
            len(request.hash_ids) * BLOCK_TOKENS == 2560 for request in requests
        )


def test_sharing_and_quantization_raise_the_goodput_of_a_fleet() -> None:
    chat = FLEET_WORKLOADS["chat"]
    plain, shared, quick = (
        simulate_cell(FLEET, chat, frozenset(cell), 0) for cell in ((), {"sharing"}, {"quantization"})
    )
    assert shared.goodput > 1.2 * plain.goodput and shared.ttft_s < plain.ttft_s
    assert quick.goodput > plain.goodput and quick.tpot_s < 0.6 * plain.tpot_s
    assert plain.cost(FLEET, 3.0) == pytest.approx(3.0 * 2 / 3600 / (plain.goodput * chat.output) * 1e6)


def test_the_command_says_that_it_is_simulated(tmp_path: Path) -> None:
    options = ["--workload", "long-answers", "--factors", "quantization", "--workers", "2", "--seconds", "2"]
    options += ["--repeats", "2", "--probes", "0", "--output", str(tmp_path)]
    result = CliRunner().invoke(app, ["five-simulated", *options])
    assert result.exit_code == 0, result.output
    text = (tmp_path / "README.md").read_text()
    assert "**Simulated: nothing here was measured.** 2 workers of the profile `h100-llama-3.1-8b`" in text
    assert "NVIDIA H100 SXM data sheet" in text and "| quantization | " in text
    document = json.loads((tmp_path / "results.json").read_text())
    assert document["simulated"] is True and len(document["outcomes"]) == 4
    assert "<svg" in (tmp_path / "effects.svg").read_text()[:2000]


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--max-model-len", "2048"], "--max-model-len: requests of chat have 2816 tokens, got 2048"),
        (["--max-model-len", "500000"], "--max-model-len: a worker of h100-llama-3.1-8b has room for 412000"),
        (["--profile", "h200"], "--profile: there is no file h200"),
        (["--profile", "PLAIN"], "--profile: plain does not tell the acceptance of 1 drafted tokens"),
        (["--workers", "1"], "--workers"),
        (["--factors", "batching"], "--factors: 'batching' is none of disaggregation"),
    ],
)
def test_bad_input_is_refused(tmp_path: Path, options: list[str], complaint: str) -> None:
    plain = msgspec.structs.replace(H100, name="plain", speculation=None)
    write_profile(plain, tmp_path / "plain.json")
    given = [str(tmp_path / "plain.json") if option == "PLAIN" else option for option in options]
    result = CliRunner().invoke(
        app, ["five-simulated", "--output", str(tmp_path / "out"), *given], env={"COLUMNS": "300"}
    )
    assert result.exit_code == 2 and complaint in " ".join(result.output.split())
    assert not (tmp_path / "out").exists()
