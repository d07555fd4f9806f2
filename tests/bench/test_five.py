"""The factorial experiment without its effects: search, loads, server options, kept and refused results."""

from __future__ import annotations

import asyncio
import json
import re
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
import msgspec
import pytest

from bench.five import measure
from bench.five.command import five
from bench.five.experiment import Experiment, PlannedRun, runs_of
from bench.five.factors import FACTORS, cells_of, request_fields, serve_options, served
from bench.five.figures import finding
from bench.five.measure import CellOutcome, ExperimentSetting, MeasuredServer, Objective, Trial
from bench.five.report import as_markdown
from bench.five.search import NoRateError, highest
from bench.five.workloads import LEAST_REQUESTS, WORKLOADS, Prompts, Traffic
from bench.report import write_results
from bench.servers import Command, ServerProcess, running
from deploy.config import load_config
from protocol.speculation import parse_request_speculation
from tests.bench.test_bench_client import DONE, stream, token

TEXTS = [list(range(1000)), list(range(1000, 9000))]
SETTING = ExperimentSetting("model", 1024, 16, '{"method": "ngram"}', Objective(0.5, 0.02, 0.9), 1.0, 2)


# --- the search ---------------------------------------------------------------------------------------


def search(limit: float, first: float, probes: int, step: float = 2.0) -> tuple[float, list[float]]:
    tried: list[float] = []

    def trial(rate: float) -> tuple[bool, float]:
        tried.append(rate)
        return rate <= limit, rate

    rate, brought = highest(first, probes, trial, step)
    assert rate == brought
    return rate, tried


@pytest.mark.parametrize("limit", [0.9, 7.0, 8.0, 21.0, 300.0])
def test_the_highest_rate_is_found_from_any_side(limit: float) -> None:
    rate, tried = search(limit, 8.0, probes=3)
    assert rate <= limit < rate * 1.11
    assert len(tried) <= 10


def test_few_probes_give_a_coarser_rate() -> None:
    rate, tried = search(21.0, 8.0, probes=0)
    assert (rate, tried) == (16.0, [8.0, 16.0, 32.0])
    assert search(21.0, 8.0, probes=1)[1] == [8.0, 16.0, 32.0, pytest.approx(22.6, abs=0.1)]


def test_a_search_near_the_rate_takes_few_trials() -> None:
    rate, tried = search(21.0, 20.0, probes=5, step=1.2)
    assert 21.0 / 1.025 < rate <= 21.0 and len(tried) <= 6
    assert search(21.0, 20.0, probes=5)[0] == pytest.approx(21.0, rel=0.022), "five probes: 2 % at most"


def test_a_rate_that_no_load_meets_is_reported() -> None:
    with pytest.raises(NoRateError, match=r"not even 0.0625 requests/s meet the SLO"):
        search(0.001, 8.0, probes=3)


# --- loads --------------------------------------------------------------------------------------------


def test_prompts_share_prefixes_as_the_workload_says() -> None:
    for workload in WORKLOADS.values():
        load = Prompts(TEXTS, workload, 0, "name", shares=True).load(rate=50.0, seconds=2.0)
        assert {request.salt for request in load} == {"name"}
        alone = Prompts(TEXTS, workload, 0, "name", shares=False).load(rate=50.0, seconds=2.0)
        assert len({request.salt for request in alone}) == 100, "no prefix is reused"
        assert [request.prompt for request in alone] == [request.prompt for request in load]
        prompts = [request.prompt for request in load]
        assert len(load) == 100 and {len(prompt) for prompt in prompts} == {workload.prompt}
        assert len({tuple(prompt[: workload.shared]) for prompt in prompts}) == 1
        own = [tuple(prompt[workload.shared :]) for prompt in prompts]
        assert len({text[:16] for text in own}) > 95
        arrivals = [request.arrival for request in load if request.arrival is not None]
        assert len(arrivals) == len(load)
        assert arrivals == sorted(arrivals) and arrivals[0] >= 0 and arrivals[-1] <= 2.0
    assert len(Prompts(TEXTS, workload, 0, "", shares=True).load(rate=1.0, seconds=2.0)) == LEAST_REQUESTS
    with pytest.raises(ValueError, match="the workload chat needs 1024 tokens of text, got 1000"):
        Prompts(TEXTS[:1], WORKLOADS["chat"], 0, "", shares=True)


async def test_a_rate_that_cannot_be_met_is_abandoned_early(start_server) -> None:
    """The server takes 10 ms for each running request, at most a second."""
    active = 0

    async def serve(request, writer):
        nonlocal active
        active += 1
        await asyncio.sleep(min(0.01 * active, 1.0))
        active -= 1
        await stream(writer, [token("a"), token("b", "length"), DONE], 0.0)

    url = await start_server(serve)
    workload = Traffic("few", 0, 16, 2, 40.0, 20.0)
    setting = msgspec.structs.replace(SETTING, objective=Objective(0.4, 0.4, 0.9), seconds=0.5)
    prompts = Prompts(TEXTS, workload, 0, "", shares=True)
    server = MeasuredServer(url, setting, workload, prompts)
    strict = msgspec.structs.replace(setting, objective=Objective(0.4, 0.4, 0.99), seconds=20.0)
    crowded = MeasuredServer(url, strict, workload, prompts)

    def trials() -> tuple[bool, bool, float, Trial]:
        light = server.measure(20.0)
        slow, _ = server.search(30.0)
        began = time.monotonic()
        fast, _ = crowded.search(400.0)
        return slow, fast, time.monotonic() - began, light

    slow, fast, seconds, light = await asyncio.to_thread(trials)
    assert 0.01 <= light.ttft_s < 0.4 and light.errors == 0 and light.rate == 20.0
    assert slow and not fast
    passed, missed = *server.trials, *crowded.trials
    assert passed.goodput == pytest.approx(passed.attainment * 30.0) and passed.attainment >= 0.9
    assert missed.attainment < 0.99 and seconds < 10, "the load comes within 20 s"


# --- cells --------------------------------------------------------------------------------------------


def test_cells_that_differ_in_their_requests_share_a_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts of 576 tokens share 512 of them in one of the two cells."""
    starts, hits = [], []

    @contextmanager
    def counted(commands: Sequence[Command], logs: Path) -> Iterator[list[ServerProcess]]:
        starts.append(logs.name)
        with running(commands, logs) as processes:
            yield processes
            metrics = httpx.get(f"{commands[-1].base_url}/metrics").text
        hits.extend(re.findall(r"^tandem_prefix_cache_hits_total\S* (\S+)", metrics, re.MULTILINE))

    monkeypatch.setattr(measure, "running", counted)
    five(workload="chat", factors="sharing", seconds=0.5, probes=0, output=tmp_path)
    assert starts == ["none, repeat 0"]
    outcomes = json.loads((tmp_path / "results.json").read_bytes())["outcomes"]
    assert sorted(len(each["cell"]) for each in outcomes) == [0, 1]
    assert sum(map(float, hits)) >= 512


def test_each_technique_is_an_option_of_the_server_or_a_field_of_a_request() -> None:
    seen = set()
    for cell in cells_of(FACTORS):
        options = serve_options(cell, '{"method": "ngram"}')
        flags: dict[str, object] = {}
        for number, option in enumerate(options):
            if option.startswith("--no-"):
                flags[option[5:].replace("-", "_")] = False
            elif option.startswith("--"):
                flags[option[2:].replace("-", "_")] = options[number + 1]
        config = load_config(flags, environ={})
        assert config.num_workers == 2
        assert config.disaggregation == ("disaggregation" in cell)
        fields = request_fields(cell)
        asked = parse_request_speculation(fields.get("speculative"))
        assert config.speculative_config is not None
        assert (asked is None or asked.enabled) == ("speculation" in cell)
        assert config.paged_kv == ("paging" in cell)
        assert config.enable_prefix_caching, "without sharing, each prompt has a salt of its own"
        quantized = (config.quantization, config.kv_cache_dtype)
        assert quantized == (("int4", "int8") if "quantization" in cell else (None, "auto"))
        seen.add((tuple(options), str(fields)))
    assert len(seen) == 16, "and each with and without salts"


def test_each_repeat_runs_in_another_order() -> None:
    runs = runs_of(["chat"], ["sharing", "paging"], 3, seed=1)
    assert len(runs) == 12 and [run.repeat for run in runs] == [0] * 4 + [1] * 4 + [2] * 4
    assert len({tuple(run.cell for run in runs[at : at + 4]) for at in (0, 4, 8)}) > 1
    assert runs == runs_of(["chat"], ["sharing", "paging"], 3, seed=1)


def test_runs_of_one_server_follow_each_other() -> None:
    runs = runs_of(["chat", "long-answers"], FACTORS, 1, seed=0)
    servers = [served(run.cell) for run in runs]
    starts = [
        server for server, before in zip(servers, [None, *servers[:-1]], strict=True) if server != before
    ]
    assert len(runs) == 64 and len(starts) == len(set(starts)) == 8


def test_a_later_repeat_begins_at_the_rate_of_an_earlier_one(tmp_path: Path) -> None:
    first, second = runs_of(["chat"], [], 2, seed=0)
    experiment = Experiment(tmp_path, SETTING)
    assert experiment.near(first) is None
    list(experiment.measure([first], outcome))
    assert experiment.near(second) == 10.0


def outcome(run: PlannedRun, goodput: float | None = 10.0) -> CellOutcome:
    trial = Trial(goodput or 0.5, goodput or 0.1, 0.95, 0.02, 0.002, 0)
    best = trial if goodput is not None else None
    return CellOutcome(run.workload, sorted(run.cell), run.repeat, [trial], best, trial, 1 << 28)


def test_an_experiment_resumes_where_it_stopped(tmp_path: Path) -> None:
    runs = runs_of(["chat"], ["sharing", "paging"], 1, seed=0)
    measured: list[PlannedRun] = []

    def one(run: PlannedRun) -> CellOutcome:
        if len(measured) == 2:
            raise KeyboardInterrupt
        measured.append(run)
        if run == runs[0]:
            raise RuntimeError("tandem ended with 1")
        return outcome(run)

    with pytest.raises(KeyboardInterrupt):
        list(Experiment(tmp_path, SETTING).measure(runs, one))
    again = Experiment(tmp_path, SETTING)
    assert again.missing(runs) == [runs[0], *runs[2:]], "what failed is missing too"
    assert [run for run, _ in again.measure(runs, outcome)] == [runs[0], *runs[2:]]
    assert Experiment(tmp_path, SETTING).missing(runs) == []


def test_tables_show_complete_workloads_and_repeats(tmp_path: Path) -> None:
    experiment = Experiment(tmp_path, SETTING)
    factors = ["sharing", "paging"]
    runs = runs_of(["chat", "long-prompts"], factors, 2, seed=0)
    list(experiment.measure(runs[:-1], outcome))
    [lacks] = experiment.missing(runs)
    other = "chat" if lacks.workload == "long-prompts" else "long-prompts"
    assert len(experiment.complete(other, factors)) == 8
    assert {each.repeat for each in experiment.complete(lacks.workload, factors)} == {0}
    assert len(experiment.complete(other, ["sharing"])) == 4, "the cells in which the other is off"
    assert experiment.complete("long-answers", factors) == []


def test_cells_of_another_setting_are_not_mixed(tmp_path: Path) -> None:
    write_results(tmp_path, Experiment(tmp_path, SETTING).content())
    with pytest.raises(ValueError, match="was measured with kv_mib 16, now it is 8: choose another folder"):
        Experiment(tmp_path, msgspec.structs.replace(SETTING, kv_mib=8))
    (tmp_path / "results.json").write_text("{}")
    with pytest.raises(ValueError, match=r"results.json holds no experiment: 'outcomes'"):
        Experiment(tmp_path, SETTING)


def test_findings_are_shown_as_tables() -> None:
    factors = ["paging", "sharing"]
    runs = runs_of(["chat"], factors, 2, seed=0)
    outcomes = [
        outcome(run, (4.0 if "sharing" in run.cell else 2.0) * (1.0 + 0.1 * run.repeat))
        if run.cell
        else outcome(run, None)
        for run in runs
    ]
    found = finding(SETTING, "chat", factors, outcomes, price=2.0)
    assert [figure.name for figure in found.figures] == ["goodput", "TTFT", "TPOT", "memory", "cost"]
    goodput, cost = found.figures[0], found.figures[-1]
    assert goodput.all_on == pytest.approx(1 / cost.all_on), "a token costs what its worker's time costs"
    assert found.floored == ["none", "none"]
    text = as_markdown(SETTING, 2.0, [found], outcomes)
    assert "| paged KV x prefix sharing |" in text and "No rate met the SLO in: none, none." in text
    both = 4.0 * 1.05
    assert f"| paging+sharing | {both:.2f} | 20.0 | 2.00 | 256 |" in text
    lacking = [each for each in outcomes if each.cell != ["paging"] or each.repeat]
    with pytest.raises(ValueError, match="cell paging has 1 repeats, none 2"):
        finding(SETTING, "chat", factors, lacking, 2.0)


def test_results_describe_how_they_were_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for arguments in (["tandem", "bench", "five", "--seconds", "1"], ["bench", "five", "--seconds", "1"]):
        monkeypatch.setattr(sys, "argv", arguments)
        write_results(tmp_path, Experiment(tmp_path, SETTING).content())
        document = json.loads((tmp_path / "results.json").read_text())
        assert document["command"] == "tandem bench five --seconds 1" and document["machine"]["cores"]
    assert document["setting"]["objective"] == {"ttft_s": 0.5, "tpot_s": 0.02, "attainment": 0.9}
