"""Tables of LLM_SERVING.md equal the results that they name, or what the code computes."""

from __future__ import annotations

import itertools
import json
import operator
import re
import statistics
from pathlib import Path
from typing import Any

import msgspec
import pytest

from bench.five.factors import FACTORS, TITLES
from bench.simulate import LAYOUTS, LIMITS_S, RATES, SUMMARIES, Simulation
from planner.profile import DEFAULT_PROFILE, read_profile
from planner.scenarios import Scenario, Slo, Study
from planner.trace import TraceFit, fitted, read_trace

ROOT = Path(__file__).parents[2]
DOCUMENT = (ROOT / "LLM_SERVING.md").read_text()
RESULTS = ROOT / "bench/results"
LIGHT, BUSY = "speculate-amx-light", "speculate-amx"
PROMPT = 1024


def section(heading: str) -> str:
    return DOCUMENT.split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]


def table(heading: str) -> list[list[str]]:
    """Return the cells of the table below a heading, without the table's first two lines."""
    lines = [line for line in section(heading).splitlines() if line.startswith("|")]
    return [[cell.strip().replace("`", "") for cell in line.strip("|").split("|")] for line in lines[2:]]


def results_of(run: str, part: str = "figures") -> list[dict[str, Any]]:
    results: list[dict[str, Any]] = json.loads((RESULTS / run / "results.json").read_bytes())[part]
    return results


def sweep(method: str, requests: int, run: str = LIGHT, **block: object) -> dict[Any, dict[str, Any]]:
    """Return the figures of a sweep by K."""
    wanted = {"drafting": method, "concurrency": requests, **block}
    return {
        each["case"]["num_tokens"]: each
        for each in results_of(run)
        if wanted.items() <= each["case"]["block"].items()
    }


def expected_tokens(acceptance: float, drafted: int) -> float:
    return (1 - acceptance ** (drafted + 1)) / (1 - acceptance)


def acceptance_of(tau: float, drafted: int) -> float:
    """Find by bisection the acceptance rate that yields `tau` tokens."""
    low, high = 0.0, 1 - 1e-9
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if expected_tokens(middle, drafted) < tau else (low, middle)
    return low


def test_a_real_models_figures_by_workload_are_the_measured_ones() -> None:
    figures = {
        (each["case"]["block"]["workload"], each["case"]["num_tokens"]): each
        for each in results_of("speculate-smollm2")
    }
    rows = table("What does speculation bring on which text?")
    assert {row[0] for row in rows} == {workload for workload, _ in figures}
    for workload, *cells in rows:
        four = figures[workload, 4]
        positions = " ".join(f"{share:.0%}"[:-1] for share in four["by_position"][:4])
        speedups = [f"{figures[workload, k]['speedup']:.2f}" for k in (1, 4, 16, "auto")]
        assert cells == [f"{positions} %", f"{four['per_forward']:.2f}", *speedups], workload


def test_expected_tokens_follow_from_the_acceptance_rate() -> None:
    rows = table("How many tokens does a step bring?")
    assert [row[0] for row in rows] == ["draft_model", "ngram", "eagle"]
    for method, *cells in rows:
        taus = {k: each["tau"] for k, each in sweep(method, 1).items() if k in (2, 4, 6, 8)}
        a = acceptance_of(taus[4], 4)
        pairs = [f"{taus[k]:.2f}, {expected_tokens(a, k):.2f}" for k in (2, 6, 8)]
        assert cells == [f"{a:.3f}", pairs[0], f"{taus[4]:.2f}", *pairs[1:]]


def test_the_table_of_k_equals_the_measured_sweep() -> None:
    rows = table("How many tokens to draft?")
    assert len(rows) == 6
    for case, *cells in rows:
        method, requests = case.split(", ")
        figures = sweep(method, int(requests))
        assert cells == [f"{figures[k]['speedup']:.2f}" for k in (2, 4, 6, 8, "auto")]


def test_costs_of_a_wrong_k_equal_the_measured_ones() -> None:
    for load, method, *cells in table("What does a wrong K cost?"):
        name, _, detail = load.partition(", ")
        if name == "SmolLM2":
            figures = sweep(method, 1, "speculate-smollm2", workload=detail)
        else:
            run = f"speculate-{detail.lower()}" if detail else BUSY
            figures = sweep(method, int(name.split()[0]), run)
        costs = [f"{figures[k]['cost'] / figures[None]['cost']:.2f}" for k in (1, 2, 4, 8) if k in figures]
        assert [cell for cell in cells if cell] == costs, (load, method)


def test_methods_beside_each_other_equal_the_measured_ones() -> None:
    for method, _, *cells in table("Which way to draft?"):
        alone = sweep(method, 1)[4]
        shares = [f"{alone[name] * 100:.0f} %" for name in ("acceptance", "draft_share")]
        speedups = [alone, *(sweep(method, requests, BUSY)[4] for requests in (4, 16))]
        gains = ", ".join(f"{each['speedup']:.2f}" for each in speedups)
        assert cells == [f"{alone['per_forward']:.2f}", *shares, gains], method


HEADING = "From which concurrency does speculation stop paying, and why?"


def step_times(method: str, k: int = 4) -> list[tuple[int, float, float, float]]:
    """Return requests, seconds of a plain step and of a step with drafts, and the latter's tokens."""
    found: dict[int, dict[int | None, list[dict[str, Any]]]] = {}
    for each in (*results_of(LIGHT, "measurements"), *results_of(BUSY, "measurements")):
        block, case = each["case"]["block"], each["case"]["num_tokens"]
        if block["drafting"] == method and case in (None, k):
            found.setdefault(block["concurrency"], {}).setdefault(case, []).append(each)
    rows = []
    for requests, cases in sorted(found.items()):
        plain, drafted = ([m["step_s"] for m in cases[case] if m["step_s"] is not None] for case in (None, k))
        if drafted:
            tokens = sum(m["step_tokens"] for m in cases[k]) / sum(m["steps"] for m in cases[k])
            rows.append((requests, statistics.median(plain), statistics.median(drafted), tokens))
    return rows


def test_step_times_with_drafts_equal_the_measured_ones() -> None:
    expected = []
    for method in ("ngram", "draft_model"):
        for requests, plain, drafted, tokens in step_times(method):
            ratio = drafted / plain
            figures = (plain * 1e3, drafted * 1e3, ratio, tokens, tokens / ratio)
            expected.append([method, str(requests), *(f"{each:.2f}" for each in figures)])
    assert table(HEADING) == expected
    text = " ".join(section(HEADING).split())
    ngram, draft_model = ([row[4] for row in expected if row[0] == each] for each in ("ngram", "draft_model"))
    assert (
        f"grows from {ngram[0]} to {ngram[-1]} times with `ngram` and to {draft_model[-1]} with a draft model"
    ) in text


def test_the_crossover_equals_the_measured_one() -> None:
    verdicts = results_of(BUSY, "verdicts")
    [crossover] = [each["crossover"] for each in verdicts if each["block"]["drafting"] == "draft_model"]
    assert f"here at {crossover:.0f} requests with a draft model" in DOCUMENT
    costs = read_profile(DEFAULT_PROFILE).costs
    assert f"= {costs.step_s / costs.row_s:.0f} rows" in DOCUMENT


def test_what_an_example_costs_equals_the_profile() -> None:
    costs, price, context, answer = read_profile(DEFAULT_PROFILE).costs, 3 / 3600, 1152, 256
    prompt = costs.token_s * PROMPT + costs.attention_s * PROMPT**2 / 2
    text = section("What does a token cost?")
    assert f"A prompt takes {prompt * 1e3:.1f} ms, {PROMPT / prompt:,.0f} tokens a second" in " ".join(
        text.split()
    )
    assert f"computes {PROMPT / prompt:,.0f} tokens of a prompt a second, and decodes 164 for one" in DOCUMENT
    assert f"{price * prompt / PROMPT * 1e6:.3f} for a million" in " ".join(text.split())
    steps = f"step_s = {costs.step_s * 1e3:g} ms, row_s = {costs.row_s * 1e6:g} us"
    assert f"{steps}, context_s = {costs.context_s * 1e9:g} ns" in " ".join(text.split())
    assert (
        f"on that H100 {prompt * 1e3:.1f} ms and {costs.kv_bytes * PROMPT / 1e6:.0f} MB a request" in DOCUMENT
    )
    per_token = f"{costs.kv_bytes:,.0f} bytes a token in bf16, so 1,024 tokens take"
    assert f"{per_token} {costs.kv_bytes * PROMPT / 1e6:.0f} MB" in DOCUMENT
    for requests, *cells in table("What does a token cost?"):
        step = costs.step_s + (costs.row_s + costs.context_s * context) * int(requests)
        token = step / int(requests)
        figures = (f"{step * 1e3:.2f}", f"{1 / token:,.0f}", f"{price * token * 1e6:.2f}")
        assert cells == [*figures, f"{price * (prompt + answer * token) * 1e6:,.0f}"]


def test_what_a_chunk_costs_equals_the_profile() -> None:
    costs, streams, prompt = read_profile(DEFAULT_PROFILE).costs, 64, 4096
    decode = costs.decode_s(streams, streams * 1152)
    rows = table("How is a request scheduled?")
    assert [row[0] for row in rows] == ["256", "512", "1,024", "4,096"]
    for size, *cells in rows:
        chunk = int(size.replace(",", ""))
        steps = [decode + costs.chunks_s(chunk, before, chunk) for before in range(0, prompt, chunk)]
        figures = (f"{max(steps) * 1e3:.1f}", f"{sum(steps) * 1e3:.0f}")
        assert cells == [f"{len(steps)}", *figures, f"{streams * len(steps) / sum(steps):,.0f}"]


def test_what_drafts_bring_on_a_gpu_equals_the_profile() -> None:
    profile = read_profile(DEFAULT_PROFILE)
    assert profile.speculation is not None
    costs, [method] = profile.costs, profile.speculation.methods
    drafted = len(method.acceptance)
    tokens = 1 + sum(itertools.accumulate(method.acceptance, operator.mul))

    def gain(requests: int, context: int) -> float:
        plain = costs.decode_s(requests, requests * context)
        return tokens * plain / (plain + drafted * (costs.row_s * requests + method.level_s))

    text = " ".join(section(HEADING).split())
    assert f"decoding gains {gain(1, 1152):.2f} times at one request" in text
    never = next(requests for requests in itertools.count(1) if gain(requests, 0) <= 1)
    assert f"ends at {never * (drafted + 1)} rows: it gains nothing from {never} requests on" in text
    ridge = costs.step_s / costs.row_s
    assert f"Rows pass the ridge of {ridge:.0f} at {ridge / (drafted + 1):.0f} requests" in text
    assert f"it still gains {gain(64, 1152):.2f} at 64 and {gain(256, 1152):.2f} at 256" in text


def test_the_autoscalers_hours_equal_the_plannings() -> None:
    planning = (ROOT / "docs/planning.md").read_text()
    [day, trace] = re.findall(
        r"^\| .* \| [\d,]+ \| (0\.\d+) \| \d+ \| \d+ \| (\d\.\d\d) \|$", planning, re.MULTILINE
    )
    text = " ".join(section("How many workers does a load take?").split())
    assert day[1] == "1.00"
    assert (
        f"it keeps {float(day[0]):.1%}".replace("%", " %") + " of the requests within the SLO with as many"
        in text
    )
    assert (
        f"and {float(trace[0]):.1%}".replace("%", " %")
        + f" of a day of Mooncake's trace with {trace[1]} times"
        in text
    )


def test_pull_speeds_equal_the_profile() -> None:
    costs = read_profile(DEFAULT_PROFILE).costs
    compute = (costs.token_s + costs.attention_s * PROMPT / 2) * 1e6
    rates = (50e9, 12.5e9, 3.125e9, 0.125e9)
    rows = table("What does a transfer cost, and when does a pull beat recomputing?")
    for (_, *cells), rate in zip(rows, rates, strict=True):
        pull = costs.kv_bytes / rate * 1e6
        faster = "pull" if pull < compute else "compute"
        ratio = max(pull, compute) / min(pull, compute)
        prompt = f"{pull * PROMPT / 1e3:,.1f}"
        assert cells == [prompt, f"{pull:,.1f}", f"{compute:.1f}", f"{faster}, {ratio:.1f} times"]
    assert f"Break-even is at {costs.kv_bytes / compute / 1e3:.1f} GB/s" in DOCUMENT


def test_what_paging_saves_equals_the_lesson() -> None:
    lesson = (ROOT / "labs/paged_scheduler.md").read_text()
    rows = {
        name: re.findall(rf"^{name} +(.*)$", lesson, re.MULTILINE)[0].split()
        for name in ("static", "continuous", "paged")
    }
    steps = {name: int(cells[1]) for name, cells in rows.items()}
    assert f"{steps['continuous']:,} steps instead of {steps['static']:,}" in DOCUMENT
    filled, running = ({name: cells[place] for name, cells in rows.items()} for place in (4, 2))
    shares = (filled[name].replace("%", " %") for name in ("paged", "continuous"))
    quoted = "{} of the memory is filled instead of {}, and {} requests run instead of {}"
    assert quoted.format(*shares, running["paged"], running["continuous"]) in DOCUMENT


FORMATS = {
    "int8, inputs rounded": ("int8", "quantize-rounded", "quantize-rounded"),
    "FP8": ("fp8", "quantize", "quantize-bundled"),
    "int4, inputs rounded": ("int4", "quantize-rounded", "quantize-rounded"),
    "int4, AWQ": ("awq-g128", None, "quantize-bundled"),
    "int4, GPTQ": ("gptq-g128", None, "quantize-bundled"),
    "MXFP4": ("mxfp4", "quantize", "quantize-bundled"),
}
"""The format's name in the results, and the runs of its speed and of its quality."""


def test_formats_of_weights_equal_the_measured_ones() -> None:
    rows = {row[0]: row[1:] for row in table("When does quantization pay?")}
    assert rows.keys() == FORMATS.keys()
    for name, (short, speed_run, quality_run) in FORMATS.items():
        expected = [""] * 4
        if speed_run is not None:
            size: Any = results_of(speed_run, "weight_bytes")
            speed: Any = results_of(speed_run, "tokens_per_second")
            mine, plain = speed[short], speed["bf16"]
            expected = [f"{size[short] / size['bf16']:.2f}", f"{mine['prefill'] / plain['prefill']:.2f}"]
            expected += [f"{mine['decode'][count] / plain['decode'][count]:.2f}" for count in ("1", "16")]
        quality: Any = results_of(quality_run, "quality")
        more = quality[short]["bits_per_byte"] / quality["bf16"]["bits_per_byte"] - 1
        assert rows[name] == [*expected, f"+{100 * more:.2f} %", f"{100 * quality[short]['agreement']:.1f} %"]


def test_gaps_beside_long_prompts_equal_the_benchmarks() -> None:
    rows = table("When does disaggregation pay?")
    benchmarks = (ROOT / "docs/benchmarks.md").read_text()
    assert len(rows) == 2
    for row in rows:
        assert f"| {' | '.join(row)} |" in benchmarks


def test_rates_whole_and_split_equal_the_simulated_ones() -> None:
    found = {
        (each["load"], f"{each['limit_s'] * 1e3:g}", each["layout"]): f"{each['rate']:.1f}"
        for each in results_of("simulate", "highest")
    }
    rows = table("Where does splitting win goodput?")
    assert len(rows) == 10
    for load, limit, *rates in rows:
        assert rates == [found[load, limit, layout] for layout in ("whole", "split", "cost")]


def test_effects_on_a_fleet_equal_the_simulated_ones() -> None:
    figures = {
        (finding["workload"], figure["name"]): figure
        for finding in results_of("five-simulated", "findings")
        for figure in finding["figures"]
    }
    columns = [(load, "goodput") for load in ("chat", "long-prompts", "long-answers")]
    columns += [("chat", "TTFT"), ("chat", "TPOT")]
    *techniques, together = table("What would the five bring a fleet?")
    assert together == ["all on over all off", *(f"{figures[column]['all_on']:.2f}" for column in columns)]
    for (title, *cells), name in zip(techniques, FACTORS, strict=True):
        mains = [next(e for e in figures[column]["effects"] if e["factors"] == [name]) for column in columns]
        assert title == TITLES.get(name, name)
        assert cells == [f"{each['ratio']:.2f}" for each in mains]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_simulated_rates_are_the_simulators(layout: str) -> None:
    count = json.loads((RESULTS / "simulate/results.json").read_bytes())["count"]
    simulation = Simulation(read_profile(DEFAULT_PROFILE), count)
    [expected] = (
        each
        for each in results_of("simulate", "points")
        if (each["layout"], each["rate"]) == (layout, RATES[3])
    )
    assert msgspec.to_builtins(simulation.point(SUMMARIES, layout, LIMITS_S[1], RATES[3])) == expected


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Study:
    """Run the simulator on the trace that the document's own code writes."""
    code = section("How many workers does a load take?").split("```python\n", 1)[1].split("```", 1)[0]
    path = tmp_path_factory.mktemp("plan") / "chat.jsonl"
    exec(code.replace('"chat.jsonl"', repr(str(path))), {})
    fit = TraceFit()
    requests = fitted(read_trace(path), fit)
    return Study(read_profile(DEFAULT_PROFILE), requests, fit.block_tokens, Slo(1.0, 0.03))


def scenario_of(workers: int, layout: str) -> Scenario:
    if layout == "colocated":
        return Scenario("colocated", 0, workers)
    words = layout.split()
    return Scenario("disaggregated", int(words[0]), int(words[2]))


def test_plans_equal_the_simulators(study: Study) -> None:
    rows = table("How many workers does a load take?")
    assert len(rows) == 5
    for workers, layout, *cells in rows:
        outcome = study.outcome(scenario_of(int(workers), layout))
        assert cells == [
            f"{outcome.goodput:.2f}",
            f"{outcome.attainment:.1%}".replace("%", " %"),
            f"{outcome.ttft.p90:.2f}",
            f"{outcome.tpot.p90 * 1e3:.1f}",
        ]
