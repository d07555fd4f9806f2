"""`tandem bench speculate`: its arguments, its figures, and a small run from end to end."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from typer.testing import CliRunner, Result

from bench.cli import app
from bench.speculate.engines import EngineRun, Engines, requests_of
from bench.speculate.figures import crossover, figures_of, verdicts_of
from bench.speculate.measurement import CaseMeasurement, TimedAnswer, summarize
from bench.speculate.plan import Case, CaseGroup, NumTokens, SpeculationPlan, parse_drafting
from bench.speculate.workload import WorkloadPrompt, edit_prompt, entries, load_prompts
from models.bundled import BUNDLED_FOLDER, BUNDLED_MODEL
from protocol.errors import ConfigError
from protocol.outputs import FinishReason, TokenOutput
from protocol.requests import EngineRequest
from protocol.sampling import SamplingParams

BLOCK = CaseGroup(workload="completion", temperature=0.0, concurrency=1, drafting="ngram")
CASE = Case(msgspec.structs.replace(BLOCK, concurrency=2), 3)
QUICK = ("--compile", "off", "--threads", "1", "--rounds", "1", "--requests", "2", "--output-len", "6")


def run(folder: Path, *arguments: object) -> Result:
    return CliRunner().invoke(app, ["speculate", *QUICK, "--output", str(folder), *map(str, arguments)])


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(BUNDLED_MODEL)


# --- arguments ------------------------------------------------------------------------------------


def test_a_drafting_is_a_method_or_a_labelled_config() -> None:
    assert parse_drafting("ngram", str(BUNDLED_MODEL)).config.method == "ngram"
    draft = parse_drafting("draft_model", str(BUNDLED_MODEL))
    assert draft.config.model == str(BUNDLED_FOLDER / "tandem-code-1m")
    tree = parse_drafting('tree={"method": "draft_model", "tree": true}', str(BUNDLED_MODEL))
    assert (tree.label, tree.config.tree) == ("tree", True)


@pytest.mark.parametrize("spec", ["magic", "=ngram", "", "x={", 'x={"method": "magic"}', "x="])
def test_anything_else_is_refused(spec: str) -> None:
    with pytest.raises(ConfigError, match="--method"):
        parse_drafting(spec, str(BUNDLED_MODEL))


def test_held_out_prompts_are_code_and_edits_of_it(tokenizer: PreTrainedTokenizerBase) -> None:
    completions = load_prompts("completion", tokenizer, 400)
    assert len(completions) == 64 and max(len(prompt.token_ids) for prompt in completions) == 400
    edits = load_prompts("edit", tokenizer, 1000)
    assert len(edits) > 48
    text = tokenizer.decode(edits[0].token_ids)
    before, after = text.split("# After renaming ")
    name = after.split(" to ")[0]
    begun = after.split("\n", 1)[1]
    assert begun.replace(f"new_{name}", name).strip() in before
    assert f"new_{name}" not in before


def test_an_edit_needs_a_name_to_change() -> None:
    assert edit_prompt("if a:\n    return b\n") is None
    assert edit_prompt("value = 1\nprint(value)\nreturn value\n") == (
        "# Before:\nvalue = 1\nprint(value)\nreturn value\n\n"
        "# After renaming value to new_value:\nnew_value = 1\n"
    )


def test_a_chat_model_is_asked_by_its_template_and_ends_its_answers(
    tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = load_prompts("chat", tokenizer, 400)[0]
    assert tokenizer.decode(base.token_ids) == f"{entries('chat')[0]['prompt']}\n\n", "text to continue"
    monkeypatch.setattr(tokenizer, "chat_template", "<{{ messages[0].content }}>")
    for workload in ("chat", "code", "json", "long-form", "rewrite"):
        prompts = load_prompts(workload, tokenizer, 1000)
        assert len(prompts) >= 16
        assert all(tokenizer.decode(prompt.token_ids)[0::-1] == "<" and prompt.ends for prompt in prompts)
        assert all((prompt.grammar is not None) == (workload == "json") for prompt in prompts)
    shorter = min(len(prompt.token_ids) for prompt in prompts)
    assert load_prompts("rewrite", tokenizer, shorter - 1) == []


def plan(**changes: Any) -> SpeculationPlan:
    fields: dict[str, Any] = {
        "workloads": ["completion"],
        "temperatures": [0.0],
        "concurrencies": [1, 8],
        "draftings": [parse_drafting("ngram", ""), parse_drafting("suffix", "")],
        "num_tokens": [0, 3, "auto"],
        "rounds": 2,
        "requests": 4,
        "output_len": 8,
    }
    return SpeculationPlan(**fields | changes)


def test_every_second_round_runs_backwards() -> None:
    made = plan()
    assert len(made.blocks(made.draftings[0])) == 2
    assert len(plan(temperatures=[0.0, 0.7]).blocks(made.draftings[0])) == 4
    order = [case.num_tokens for case in made.cases(BLOCK, 0)]
    assert order == [None, 0, 3, "auto"]
    assert [case.num_tokens for case in made.cases(BLOCK, 1)] == order[::-1]


def test_a_rounds_prompts_differ_and_change_with_the_round() -> None:
    prompts = [WorkloadPrompt([index]) for index in range(10)]
    assert plan().chosen(prompts, 1, 0) == prompts[:4]
    assert plan().chosen(prompts, 1, 2) == [*prompts[8:], *prompts[:2]]
    assert len(plan().chosen(prompts, 8, 1)) == 8
    assert sorted(plan().chosen(prompts, 10, 3)) == prompts


def test_prompts_come_again_where_there_are_fewer_than_requests() -> None:
    """A further copy has another seed, and shares neither prefixes nor earlier answers with the first."""
    chosen = plan().chosen([WorkloadPrompt([index]) for index in range(10)], 64, 3)
    assert len(chosen) == 64
    requests = requests_of(CASE, chosen, 5, 8)
    assert len({request.sampling.seed for request in requests}) == 64
    assert len({(*request.prompt_token_ids, request.cache_salt) for request in requests}) == 64
    assert len({request.cache_salt for request in requests}) == 7
    other = requests_of(CASE, chosen, 6, 8)
    assert {request.cache_salt for request in requests}.isdisjoint(each.cache_salt for each in other)


class Stepping:
    """An engine that generates one token per step for each request, four in all."""

    def __init__(self, log: list[str], name: str) -> None:
        self.log, self.name = log, name
        self.requests: dict[str, int] = {}

    def add(self, request: EngineRequest) -> None:
        self.requests[request.request_id] = 0

    def counters(self) -> dict[str, float]:
        return {}

    def step(self) -> Any:
        self.log.append(self.name)
        outputs = []
        for request_id, count in list(self.requests.items()):
            reason: FinishReason | None = "length" if count == 3 else None
            outputs.append(TokenOutput(request_id=request_id, token_ids=[1], finish_reason=reason))
            self.requests[request_id] += 1
            if reason:
                del self.requests[request_id]
        return SimpleNamespace(outputs=outputs)


def test_a_run_keeps_its_concurrency_and_measures_its_own_time(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = itertools.count()
    monkeypatch.setattr("bench.speculate.engines.time.perf_counter", lambda: next(ticks) * 0.5)
    log: list[str] = []
    runs = {}
    for name in "ab":
        requests = [
            EngineRequest(
                request_id=f"{name}{index}", prompt_token_ids=[1], sampling=SamplingParams(max_tokens=4)
            )
            for index in range(4)
        ]
        engine: Any = Stepping(log, name)
        runs[name] = EngineRun(engine, requests, CASE)
    running = [*runs.values()]
    while running:
        running = [run for run in running if run.take_turn(1.0)]
    assert "".join(log) == "aabb" * 4, "two steps of half a second a turn"
    for run in runs.values():
        measurement = run.measurement(0)
        assert (measurement.seconds, measurement.num_tokens, measurement.steps) == (4.0, 16, 12)
        assert (measurement.ttft, measurement.tpot, measurement.step_s) == (0.5, 0.5, 0.5)


# --- figures --------------------------------------------------------------------------------------


def measured(
    num_tokens: NumTokens | None, seconds: float, number: int = 0, block: CaseGroup = BLOCK, **counts: Any
) -> CaseMeasurement:
    """Return a measurement of one request with 100 tokens."""
    answer = TimedAnswer(start=1.0, first=1.0, last=1.0 + seconds, token_ids=[7] * 100, steps=100)
    for name, value in counts.items():
        setattr(answer, name, value)
    return summarize(
        Case(block, num_tokens), number, [answer], draft_s=seconds / 4, step_s=seconds / answer.steps
    )


def test_figures_are_medians_and_ratios_within_rounds() -> None:
    """The machine is half as fast in the third round; the ratio stays the same."""
    counts: dict[str, Any] = {"steps": 40, "drafted": 90, "lengths": Counter({1: 10, 2: 10, 3: 10})}
    rounds = [(1.0, 0.5), (1.0, 0.5), (2.0, 1.0)]
    measurements = []
    for number, (base, mine) in enumerate(rounds):
        measurements += [measured(None, base, number), measured(3, mine, number, **counts)]
    base_figure, figure = figures_of(measurements, price=3.6)
    assert (base_figure.speedup, base_figure.acceptance, base_figure.tau) == (1.0, None, None)
    assert figure.speedup == pytest.approx(2.0)
    assert figure.throughput == pytest.approx(200.0)
    assert figure.cost == pytest.approx(5.0)
    assert (figure.acceptance, figure.tau) == (pytest.approx(2 / 3), pytest.approx(3.0))
    assert figure.by_position == pytest.approx([1.0, 2 / 3, 1 / 3])
    assert figure.per_forward == pytest.approx(99 / 39)
    assert figure.predicted == pytest.approx(99 / 39 * (1.0 / 100) / (0.5 / 40))
    assert figure.draft_share == pytest.approx(0.25)
    assert figure.decode_speedup == pytest.approx(2.0)
    assert figure.same


def test_tokens_are_the_same_only_if_they_are_in_every_round() -> None:
    rounds = [measured(None, 1.0, number) for number in (0, 1)]
    equal, other = measured(3, 1.0, 0), measured(3, 1.0, 1, token_ids=[8] * 100)
    assert figures_of([*rounds, equal, measured(3, 1.0, 1)], 1.0)[1].same
    assert not figures_of([*rounds, equal, other], 1.0)[1].same


def test_the_crossover_lies_between_measured_loads() -> None:
    assert crossover({1: 1.5, 4: 1.2, 16: 1.1}) is None
    assert crossover({1: 0.9, 4: 0.8}) == 1.0
    assert crossover({1: 1.5, 4: 1.1, 16: 0.9}) == pytest.approx(8.0)
    assert crossover({1: 0.9, 4: 1.1, 16: 0.9}) == pytest.approx(8.0), "the last gain counts"


def test_verdicts_recommend_a_choice() -> None:
    seconds: dict[int, dict[NumTokens | None, float]] = {
        1: {None: 1.0, 0: 1.02, 3: 0.5, 5: 0.8, "auto": 0.52},
        16: {None: 1.0, 0: 1.01, 3: 1.25, 5: 2.0, "auto": 1.02},
    }
    measurements = [
        measured(k, each, block=CaseGroup("completion", 0.0, concurrency, "ngram"))
        for concurrency, by_k in seconds.items()
        for k, each in by_k.items()
    ]
    [verdict] = verdicts_of(figures_of(measurements, 1.0))
    assert verdict.best == {1: (3, pytest.approx(2.0)), 16: (3, pytest.approx(0.8))}
    assert verdict.crossover is not None and 8 < verdict.crossover < 16
    assert verdict.auto_worst == pytest.approx(1 / 1.02)
    assert verdict.auto_of_best == pytest.approx(0.5 / 0.52)
    assert verdict.tax == pytest.approx(1 - 1 / 1.02)


# --- from end to end ------------------------------------------------------------------------------


def check_files(folder: Path, cases: int) -> dict[str, Any]:
    assert {path.name for path in folder.iterdir()} == {"results.json", "README.md"}
    document: dict[str, Any] = json.loads((folder / "results.json").read_text())
    assert len(document["figures"]) == len(document["measurements"]) == cases
    assert all(figure["same"] for figure in document["figures"])
    return document


def test_engines_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With coupled verification every answer equals the baseline's."""
    monkeypatch.setattr(Engines, "max_prompt_len", 16)
    options = ("--method", "draft_model", "--num-tokens", "0,3,auto", "--dtype", "float32")
    longer = ("--output-len", "20")  # long enough for two requests to decode at the same time
    result = run(tmp_path, *options, *longer, "--concurrency", "1,2", "--temperature", "0.7")
    assert result.exit_code == 0, result.output
    document = check_files(tmp_path, cases=8)
    drafted = {str(each["case"]["num_tokens"]): each["acceptance"] for each in document["figures"]}
    assert drafted["None"] is None and drafted["0"] is None
    assert 0 < drafted["3"] <= 1
    assert all(each["predicted"] > 0 for each in document["figures"])
    assert "| 1 | draft_model | 3 |" in (tmp_path / "README.md").read_text()
