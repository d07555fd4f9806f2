"""`tandem profile`: the costs computed from workers' reports, and a profile of a real server."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

from deploy.cli import app
from planner import calibration
from planner.calibration import (
    Pace,
    decode_costs,
    drafts_of,
    measured_handoff_s,
    paced,
    times_as_long,
    with_prompts,
)
from planner.profile import LinkProfile, read_profile
from protocol.speculation import MethodState, SpeculationState
from tests.deploy.server_process import ROOT
from tests.processes import is_running
from tests.waiting import wait_until


def told(role: str, **costs: float) -> dict:
    known = {
        "step_s": 1.0, "row_s": 1.0, "context_s": 1.0, "chunk_s": 0.0, "token_s": 1.0, "attention_s": 1.0,
        "tokens_per_row": 1.0, "chunk_tokens": 512, "error": 0.1, "kv_bytes": 8, "itl_budget_s": 0.02,
    }  # fmt: skip
    return {"role": role, "costs": known | costs}


def test_decode_costs_come_from_decode_workers():
    looks = [
        told("prefill", step_s=3.0, row_s=99.0),
        told("decode", step_s=2.0, row_s=0.5),
        told("prefill", step_s=3.0, row_s=99.0),
        told("decode", step_s=2.0, row_s=0.7),
    ]
    costs = decode_costs(looks)
    assert (costs.step_s, costs.row_s) == pytest.approx((2.0, 0.6))
    assert (costs.chunk_tokens, costs.kv_bytes, costs.itl_budget_s) == (512, 8, 0.02)


def test_prompt_costs_come_from_lone_requests():
    decode = decode_costs([told("decode", step_s=2e-3)])
    took = {tokens: 7e-3 + 1e-4 * tokens + 1e-7 * tokens**2 / 2 for tokens in (32, 64, 128, 256, 512)}
    costs, request_s = with_prompts(decode, took)
    assert request_s == pytest.approx(5e-3, rel=0.01)
    assert (costs.token_s, costs.attention_s) == pytest.approx((1e-4, 1e-7), rel=0.01)
    for tokens, seconds in took.items():
        assert request_s + costs.step_s + costs.chunks_s(tokens, 0, 512) == pytest.approx(seconds)
    assert with_prompts(decode, {64: 1e-3, 128: 2e-3})[1] == 0.0


def test_the_slowdown_by_workers_of_the_same_host():
    assert times_as_long([0.2, 0.4], [0.1, 0.3]) == pytest.approx(1.5)
    assert times_as_long([0.1, 0.2], [0.1, 0.3]) == 1.0, "that is noise"
    assert times_as_long([0.1], [0.0]) == 1.0


@pytest.mark.parametrize(
    ("steps_s", "found_s", "left"), [([1e-6, 2e-3, 9e-3], 2e-3, 1), ([1e-6, 0.0, 2e-6, 1e-6, 2e-3], 2e-6, 1)]
)
async def test_an_answer_that_came_all_at_once_is_measured_again(steps_s, found_s, left):
    """A router that waited for a core has it ready as a whole."""
    answers = [Pace(0.1, 0.1, step_s) for step_s in steps_s]

    async def ask() -> Pace:
        return answers.pop(0)

    assert (await paced(ask, 1e-3)).step_s == found_s
    assert len(answers) == left


def test_hand_off_time_excludes_the_wire_and_the_step():
    costs = decode_costs([told("decode", step_s=2e-3, row_s=1e-3, context_s=0.0, kv_bytes=1000)])
    link = LinkProfile(latency_s=1e-3, bytes_per_s=1e8)
    alone = {100: Pace(0.1, 1e-3 + 1e-3 + 3e-3 + 4e-3), 200: Pace(0.2, 1e-3 + 2e-3 + 3e-3 + 4e-3)}
    assert measured_handoff_s(costs, link, alone) == pytest.approx(4e-3)
    assert measured_handoff_s(costs, link, {100: Pace(0.1, 2e-3)}) == 0.0


def test_draft_rates_come_from_methods_that_have_drafted_without_momentary_values():
    method = MethodState(method="ngram", num_requests=3, num_tokens=6, acceptance=[0.5, 0.25])
    idle = MethodState(method="suffix")
    told = [SpeculationState(max_tokens=8), SpeculationState(max_tokens=8, methods=[idle, method])]
    known = SpeculationState(max_tokens=8, methods=[MethodState(method="ngram", acceptance=[0.5, 0.25])])
    assert drafts_of(told) == known
    assert drafts_of(told[:1]) is None


def test_a_real_server_is_measured(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(calibration, "BURSTS", (4,))
    monkeypatch.setattr(calibration, "ROUNDS", 2)
    monkeypatch.setattr(calibration, "LONE_REQUESTS", 2)
    monkeypatch.setattr(calibration, "LONE_PAUSE_S", 0.0)
    monkeypatch.setattr(calibration, "PACED_REQUESTS", 5)
    monkeypatch.setattr(calibration, "DRAFT_BURSTS", (2,))
    monkeypatch.setattr(calibration, "DRAFT_ROUNDS", 2)
    path = tmp_path / "mine.json"
    options = ["--output", str(path), "--max-num-seqs", "5", "--kv-cache-memory-bytes", "16000000"]
    options += ["--speculative-config", '{"method": "draft_model"}']
    result = CliRunner().invoke(app, ["profile", *options], env={"TANDEM_API_KEY": "secret"})
    assert result.exit_code == 0, result.output
    measured = read_profile(str(path))
    costs = measured.costs
    assert measured.max_num_seqs == 5 and 1000 < measured.kv_tokens < 16_000_000
    assert 1e-5 < costs.decode_s(1, 100) < 1.0 and 0 < costs.chunks_s(100, 0, 512) < 10.0
    assert measured.link.bytes_per_s > 1e6 and costs.kv_bytes > 0
    assert 0 <= measured.request_s < 1.0 and 0 <= measured.handoff_s < 1.0
    assert 1 <= measured.decode_beside < 100 and 1 <= measured.prefill_beside < 100
    drafts = measured.speculation
    assert drafts is not None and drafts.max_tokens == 8 and drafts.step_time.seconds
    assert [each.method for each in drafts.methods] == ["draft_model"]
    assert drafts.methods[0].by_class and drafts.methods[0].level_s > 0
    assert "tandem-code-10m" in measured.name and "Measured by tandem profile" in measured.sources[0]


def test_a_killed_profile_leaves_no_server():
    code = "from deploy.profile import _serving\nwith _serving(['--port', '0'], 60): pass"
    profile = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
    wait_until(
        lambda: any("serve" in child.cmdline() for child in psutil.Process(profile.pid).children()), 60
    )
    (server,) = psutil.Process(profile.pid).children()
    profile.kill()
    profile.wait()
    wait_until(lambda: not is_running(server), 60)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--output", "/"], "--output: / cannot be written"),
        (["--output", "/nowhere/profile.json"], "--output: /nowhere/profile.json cannot be written"),
        (["--max-num-seqs", "0"], "--max-num-seqs"),
        (["one", "--model", "two"], "--model: given twice"),
        (["--model", "/nowhere"], "there is no folder /nowhere"),
    ],
)
def test_bad_options_are_named(options, complaint):
    result = CliRunner().invoke(app, ["profile", *options])
    assert result.exit_code == 2 and complaint in result.output.replace("\n", " ")
