"""`tandem plan` compares layouts and recommends one, and tells when drafts pay."""

from __future__ import annotations

import errno
import json
import os
from io import StringIO
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console
from typer.testing import CliRunner

from deploy.cli import app
from planner.command import draft_choices, last_paying, parse, plan
from planner.profile import BUNDLED, DEFAULT_PROFILE, read_profile, write_profile
from planner.scenarios import PlanOutcome, Scenario, Slo, Spread, best, scenarios
from protocol.errors import ConfigError
from protocol.speculation import MethodState, SpeculationState, StepTimeState
from tests.planner.planned import profile

LINES = [
    {"timestamp": 200 * number, "input_length": 900, "output_length": 40, "hash_ids": [number % 5, number]}
    for number in range(60)
]
GIVEN = {"--slo-ttft": "2", "--slo-tpot": "0.05", "--workers": "3"}


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "trace.jsonl").write_text("\n".join(map(json.dumps, LINES)))
    write_profile(profile(itl_budget_s=0.04, kv_bytes=1000), tmp_path / "profile.json")
    return tmp_path


def run(files: Path, **changes: str):
    flags = {"--trace": str(files / "trace.jsonl"), "--profile": str(files / "profile.json"), **GIVEN}
    flags |= {"--output": str(files / "out")}
    flags |= {"--" + name.replace("_", "-"): value for name, value in changes.items()}
    return CliRunner().invoke(app, ["plan", *(part for pair in flags.items() for part in pair)])


def test_plan_compares_all_layouts_and_recommends_one(files):
    result = run(files)
    assert result.exit_code == 0, result.output
    for layout in ("colocated 3", "disaggregated 1:2", "disaggregated 2:1", "conditional 1:2"):
        assert layout in result.output
    assert "Recommended: " in result.output and "tandem serve --" in result.output
    assert "<svg" in (files / "out" / "plan.svg").read_text()[:2000]
    written = json.loads((files / "out" / "plan.json").read_text())
    assert len(written["outcomes"]) == 5
    for outcome in written["outcomes"]:
        assert 0 < outcome["good"] <= outcome["requests"] - outcome["refused"] <= 60
        is_split = outcome["split"] == outcome["requests"] - outcome["refused"]
        assert is_split or outcome["scenario"]["mode"] != "disaggregated"
        assert outcome["split"] == 0 or outcome["scenario"]["mode"] != "colocated"
    assert written["recommended"] in [outcome["scenario"] for outcome in written["outcomes"]]
    assert "Drafts" not in result.output, "the profile tells of none"


def test_paths_may_begin_in_the_home_folder(files, monkeypatch):
    """A shell expands no `~` after an equals sign."""
    monkeypatch.setenv("HOME", str(files))
    options = ["--trace=~/trace.jsonl", "--profile=~/profile.json", "--output=~/out"]
    given = [f"{flag}={value}" for flag, value in GIVEN.items()]
    result = CliRunner().invoke(app, ["plan", *options, *given])
    assert result.exit_code == 0, result.output
    assert (files / "out" / "plan.json").exists()


def test_a_plan_that_cannot_be_shown_is_written(files):
    options: dict[str, Any] = {"trace": str(files / "trace.jsonl"), "profile": str(files / "profile.json")}
    options |= {"slo_ttft": 2.0, "slo_tpot": 0.05, "workers": 2, "output": str(files / "out")}
    options |= {"trace_scale_lengths": 1.0, "trace_speedup": 1.0}

    class Full(StringIO):
        def write(self, text: str) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(OSError, match="No space left"):
        plan(parse(options), Console(file=Full()))
    assert len(json.loads((files / "out" / "plan.json").read_text())["outcomes"]) == 3


def test_the_bundled_profile_names_its_sources_and_drafts(files):
    bundled = read_profile(DEFAULT_PROFILE)
    assert len(bundled.sources) > 3 and all(map(str.strip, bundled.sources))
    result = run(files, profile=DEFAULT_PROFILE, workers="2")
    assert result.exit_code == 0 and "Drafts: eagle with 3 tokens" in result.output


@pytest.mark.parametrize(
    ("flag", "value", "complaint"),
    [
        ("workers", "1", "an integer from 2 to 1024, got 1"),
        ("workers", "two", "Invalid value for '--workers'"),
        ("workers", "2.5", "Invalid value for '--workers'"),
        ("slo_ttft", "0", "a finite number from 0.0001 to 86400, got 0.0"),
        ("slo_tpot", "nan", "a finite number from 0.0001 to 86400, got nan"),
        ("trace_speedup", "0", "a finite number from 1e-06 to 1e+06, got 0.0"),
        ("max_input_len", "0", "an integer from 1 to"),
        ("profile", "h200", "there is no file h200; bundled are h100-llama-3.1-8b"),
        ("trace", "nowhere.jsonl", "nowhere.jsonl: cannot be read"),
        ("output", "/dev/null/out", "--output: cannot write to /dev/null/out: Not a directory"),
    ],
)
def test_bad_options_are_named_with_their_limits(files, monkeypatch, flag, value, complaint):
    monkeypatch.setattr("planner.command._simulate", lambda *_: pytest.fail("simulated"))
    result = run(files, **{flag: value})
    assert result.exit_code == 2
    assert complaint in result.output and "Traceback" not in result.output
    assert ("--" + flag.replace("_", "-") in result.output) or flag == "trace"


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ('{"timestamp": 1, "input_length": 5, "output_length": 0, "hash_ids": [1]}', "$.output_length"),
        ('{"timestamp": -1, "input_length": 5, "output_length": 5, "hash_ids": [1]}', "$.timestamp"),
        ('{"timestamp": 1, "input_length": 900, "output_length": 5, "hash_ids": [1]}', "input_length"),
        ("{", "truncated"),
        ("\xff\xfe", "malformed"),
    ],
)
def test_a_bad_line_is_named_with_its_file_and_field(files, line, complaint):
    path = files / "trace.jsonl"
    path.write_bytes(json.dumps(LINES[0]).encode() + b"\n\n" + line.encode("latin-1"))
    result = run(files)
    assert result.exit_code == 2
    assert f"{path}, line 3: " in result.output.replace("\n", "") and complaint in result.output


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (("costs", "step_s", "slow"), "$.costs.step_s"),
        (("costs", "step_s", -1), "$.costs.step_s"),
        (("costs", "steps_s", 1), "there is no field steps_s"),
        (("link", "bytes_per_s", 0), "$.link.bytes_per_s"),
        (("link", "speed", 1), "speed"),
    ],
)
def test_a_bad_profile_is_named_with_its_field(files, change, complaint):
    path = files / "profile.json"
    content = json.loads(path.read_text())
    content[change[0]][change[1]] = change[2]
    path.write_text(json.dumps(content))
    result = run(files)
    assert result.exit_code == 2
    assert f"--profile: {path}: " in result.output.replace("\n", "") and complaint in result.output


def test_a_request_that_fits_no_worker_is_refused(files):
    write_profile(profile(kv_tokens=900), files / "profile.json")
    result = run(files)
    assert result.exit_code == 2 and "940 tokens" in result.output and "--max-input-len" in result.output
    assert run(files, max_input_len="300").exit_code == 0


def test_a_written_profile_is_read_again(tmp_path):
    written = profile(max_num_seqs=7)
    write_profile(written, tmp_path / "new" / "profile.json")
    assert read_profile(str(tmp_path / "new" / "profile.json")) == written
    with pytest.raises(ConfigError, match="--profile"):
        read_profile(str(tmp_path))


def test_every_split_is_a_scenario():
    found = scenarios(4)
    assert found[0] == Scenario("colocated", 0, 4)
    assert {(each.prefill, each.decode) for each in found[1:]} == {(1, 3), (2, 2), (3, 1)}
    assert len(set(found)) == len(found) == 7
    for each in found:
        layout = each.layout(Slo(1.0, 0.1))
        assert len(layout.roles) == 4 and layout.disaggregation == (each.mode != "colocated")


def test_the_best_layout_has_the_highest_goodput_then_the_shortest_wait():
    def outcome(good: int, ttft: float) -> PlanOutcome:
        spread, scenario = Spread(ttft, ttft, ttft), Scenario("colocated", 0, good)
        return PlanOutcome(scenario, 1000, good, 0, 0, good / 10, 1.0, spread, spread, 1.0)

    ahead, equal, behind = outcome(900, 2.0), outcome(899, 1.0), outcome(800, 0.1)
    assert best([ahead, equal, behind]) is equal
    assert best([ahead, behind]) is ahead


def test_bundled_profiles_are_complete():
    assert list(BUNDLED.glob("*.json"))
    for path in BUNDLED.glob("*.json"):
        assert msgspec.json.decode(path.read_bytes())["name"] == path.stem
        read_profile(path.stem)


def known(fixed: float, per_row: float, acceptance: float = 0.8, tokens: int = 4) -> SpeculationState:
    """Return costs of steps of `fixed + per_row * rows` seconds with drafts that take no time."""
    sequences, drafted = [1, 1024], [0, 4]
    seconds = [[fixed + per_row * count * (1 + each) for each in drafted] for count in sequences]
    return SpeculationState(
        max_tokens=tokens,
        methods=[MethodState(method="eagle", acceptance=[acceptance] * 4)],
        step_time=StepTimeState(sequences=sequences, drafted=drafted, seconds=seconds),
    )


@pytest.mark.parametrize("ratio", [10.0, 133.0])
def test_a_single_drafted_token_pays_up_to_the_crossover(ratio):
    """With K = 1, drafts pay below `ratio * (tau - 1) / (K + 1 - tau)` requests, here 4 times the ratio.

    They count as paying up to a gain of 3 %: (1 + a) (r + B) = 1.03 (r + 2 B).
    """
    choices = draft_choices(known(ratio * 1e-4, 1e-4, tokens=1), range(1, 1024))
    assert last_paying(choices) == int(ratio * (1.8 - 1.03) / (2 * 1.03 - 1.8))
    faster = [choice.rows for choice in choices if choice.speedup > 1]
    assert faster[-1] == pytest.approx(4 * ratio, abs=1)


def test_fewer_tokens_are_drafted_as_the_load_grows():
    choices = draft_choices(known(133e-4, 1e-4), range(1, 1024))
    counts = [choice.num_tokens for choice in choices]
    assert counts[0] == 4 and counts[-1] == 0 and counts == sorted(counts, reverse=True)
    tau = 1 + 0.8 + 0.64 + 0.512 + 0.4096
    assert choices[0].speedup == pytest.approx(tau * 134 / 138)


def test_no_drafts_pay_if_no_token_is_accepted():
    choices = draft_choices(known(1.0, 0.01, acceptance=0.0), [1, 8])
    assert [choice.num_tokens for choice in choices] == [0, 0] and last_paying(choices) == 0
