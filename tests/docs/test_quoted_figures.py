"""Figures quoted in LLM_SERVING.md equal the results that their paragraph links to, and ratios in README.md
the results of `tandem bench compare`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from bench.five.factors import FACTORS

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "LLM_SERVING.md"


class Quote(NamedTuple):
    """A sentence: `text` has places for the figures that `values` computes from the results in `files`."""

    text: str
    files: tuple[str, ...]
    values: Callable[..., list[float]]


def over_vllm(system: str) -> Callable[[Any], list[float]]:
    def ratios(document: Any) -> list[float]:
        return [each["throughput_ratio"] for each in document["medians"] if each["system"] == system]

    return ratios


def gains(*documents: Any) -> list[float]:
    """Return the smallest and the largest throughput ratio of our systems."""
    ours = [
        each["throughput_ratio"]
        for document in documents
        for each in document["medians"]
        if each["system"].startswith("tandem")
    ]
    return [min(ours), max(ours)]


def transfers(*names: str) -> Callable[[Any], list[float]]:
    """Return a function that gives the smallest and the largest value of these rows, or the only one."""

    def values(document: Any) -> list[float]:
        found = [
            each["value"]
            for each in document["figures"]
            if any(re.search(name, each["what"]) for name in names)
        ]
        return sorted({min(found), max(found)})

    return values


def hidden(document: Any) -> list[float]:
    return [100 * share for share in transfers("share of the transfer")(document)]


def delay(document: Any) -> list[float]:
    low, high = transfers("extra delay")(document)
    return [(low + high) / 2]


def changed(document: Any) -> list[float]:
    [agreeing] = transfers("bfloat16: 64-token greedy")(document)
    return [1 / (1 - agreeing)]


def last_gain(method: str) -> Callable[[Any], list[float]]:
    """Return a function that gives the most requests at which some K is faster than no drafts."""

    def values(document: Any) -> list[float]:
        [verdict] = [each for each in document["verdicts"] if each["block"]["drafting"] == method]
        return [max(int(requests) for requests, (_, speedup) in verdict["best"].items() if speedup > 1)]

    return values


def always_pay(document: Any) -> list[float]:
    """Check that n-gram and suffix drafts pay at every load. Returns no figure."""
    verdicts = [each for each in document["verdicts"] if each["block"]["drafting"] in ("ngram", "suffix")]
    assert len(verdicts) == 2 and all(each["crossover"] is None for each in verdicts)
    return []


def quantized(*requests: str) -> Callable[[Any], list[float]]:
    """Return a function that gives the speed of int8 and of int4 relative to bf16: decoding for these numbers
    of requests, or prefill if there are none.
    """

    def speeds(document: Any, format: str) -> list[float]:
        speed = document["tokens_per_second"][format]
        return [speed["decode"][each] for each in requests] or [speed["prefill"]]

    def values(document: Any) -> list[float]:
        plain = speeds(document, "bf16")
        return [
            a / b for format in ("int8", "int4") for a, b in zip(speeds(document, format), plain, strict=True)
        ]

    return values


def drafted(field: str, *cases: tuple[int, str, str]) -> Callable[[Any], list[float]]:
    """Return a function that gives a field of these cases of (requests, target's format, draft's format)."""

    def values(document: Any) -> list[float]:
        pairs = {
            (each["concurrency"], each["target"], each["draft"]): each[field] for each in document["pairs"]
        }
        return [pairs[case] for case in cases]

    return values


def busy_chats(document: Any) -> list[float]:
    """Return a real model's speed-ups at 4 and 16 requests: chats greedy and sampled, then rewriting."""
    cases = [each for each in document["figures"] if each["case"]["num_tokens"] == "auto"]
    return [each["speedup"] for each in cases]


def chats_accepted(document: Any) -> list[float]:
    """Return the percentages of accepted drafts of 4 chats, greedy and sampled."""
    shares = {
        each["case"]["block"]["temperature"]: 100 * each["acceptance"]
        for each in document["figures"]
        if each["acceptance"] is not None
        and (each["case"]["block"]["workload"], each["case"]["block"]["concurrency"]) == ("chat", 4)
    }
    return [shares[0.0], shares[0.7]]


def effects(figure: str, *techniques: str) -> Callable[[Any], list[float]]:
    """Return a function that gives the main effects of `tandem bench five` on a figure, as ratios."""

    def values(document: Any) -> list[float]:
        [finding] = document["findings"]
        [found] = [each for each in finding["figures"] if each["name"] == figure]
        ratios = {tuple(each["factors"]): each["ratio"] for each in found["effects"]}
        return [ratios[technique,] for technique in techniques]

    return values


def all_over_none(document: Any) -> list[float]:
    [finding] = document["findings"]
    return [each["all_on"] for each in finding["figures"] if each["name"] == "goodput"]


def all_of_both(one: Any, other: Any) -> list[float]:
    return all_over_none(one) + all_over_none(other)


TRANSFER = ("transfer/results.json",)
FIVE = ("five/results.json",)
CHATS = ("five-llama-29m/results.json",)
LONG_ANSWERS = ("five-llama-29m-long-answers/results.json",)
LONG_PROMPTS = ("five-llama-29m-long-prompts/results.json",)
QUANTIZE = ("quantize-rounded/results.json",)
DRAFTS = ("quantize-drafts/results.json",)
DELAY = ("transfer-delay/results.json",)
AMX = ("speculate-amx/results.json",)
REAL = ("speculate-smollm2-amx/results.json",)
QUOTES = (
    Quote(
        "chats: {:.2f} and {:.2f} times greedily, {:.2f} and {:.2f} times at temperature 0.7; "
        "- `rewrite`: {:.2f} and {:.2f} times greedily, {:.2f} and {:.2f} times at temperature 0.7.",
        REAL,
        busy_chats,
    ),
    Quote("{:.0f} % are accepted greedily, and {:.0f} % at temperature 0.7", REAL, chats_accepted),
    Quote(
        "{:.2f}, {:.2f} and {:.2f} times those of vLLM with all its threads",
        ("compare-llama-29m/colocated.json",),
        over_vllm("tandem-colocated"),
    ),
    Quote(
        "{:.2f}, {:.2f} and {:.2f} times as a prefill and a decode worker",
        ("compare-llama-29m/disaggregated.json",),
        over_vllm("tandem"),
    ),
    Quote(
        "a 0.5 B model gains {:.2f} to {:.2f}",
        ("compare-qwen3-0.5b/colocated.json", "compare-qwen3-0.5b/disaggregated.json"),
        gains,
    ),
    Quote("`shm` has {:.2f} times the rate of one `memcpy`", TRANSFER, transfers("^shm, blocks of 1792")),
    Quote("in blocks of 16 KiB {:.2f} times; `tcp`", TRANSFER, transfers("^shm, blocks of 16 K")),
    Quote("`tcp` {:.2f} to {:.2f} times that of a plain stream", TRANSFER, transfers("^tcp, blocks")),
    Quote(
        "`ucx` {:.2f} to {:.2f} times that of NIXL's",
        TRANSFER,
        transfers("^ucx, .*cma", "^ucx, UCX_TLS=tcp, blocks of 16 K"),
    ),
    Quote("but {:.2f} times with large blocks", TRANSFER, transfers("^ucx, UCX_TLS=tcp, blocks of 1792")),
    Quote("Prefill hides {:.0f} to {:.0f} % of a transfer", DELAY, hidden),
    Quote("delays the second token by about {:.0f} % of its prefill", DELAY, delay),
    Quote("`int8` on the wire sends {:.2f} of the bytes", TRANSFER, transfers("int8 on the wire, bytes")),
    Quote("changes one greedy continuation of 64 tokens in {:.0f}", TRANSFER, changed),
    Quote("`ngram` and `suffix` pay at every load", AMX, always_pay),
    Quote("a draft model up to {:.0f} requests, an EAGLE", AMX, last_gain("draft_model")),
    Quote("an EAGLE head up to {:.0f} (", AMX, last_gain("eagle")),
    Quote(
        "one request {:.2f} times as fast in int8 as in bf16 and {:.2f} times in int4",
        QUANTIZE,
        quantized("1"),
    ),
    Quote("16 requests {:.2f} and {:.2f} times", QUANTIZE, quantized("16")),
    Quote("prompts go at {:.2f} and {:.2f} of bf16's speed", QUANTIZE, quantized()),
    Quote(
        "one request up {:.2f} times on a target in bf16, {:.2f} in int8 and {:.2f} in int4",
        DRAFTS,
        drafted("speedup", *((1, target, "bf16") for target in ("bf16", "int8", "int4"))),
    ),
    Quote(
        "Four requests have {:.2f}, {:.2f} and {:.2f}",
        DRAFTS,
        drafted("speedup", *((4, target, "bf16") for target in ("bf16", "int8", "int4"))),
    ),
    Quote(
        "{:.2f} (disaggregation), {:.2f} (speculation), {:.2f} (paged KV), {:.2f} (prefix sharing) and "
        "{:.2f} (quantization), and the time per token by {:.2f}, {:.2f}, {:.2f}, {:.2f} and {:.2f}.",
        FIVE,
        lambda document: [*effects("goodput", *FACTORS)(document), *effects("TPOT", *FACTORS)(document)],
    ),
    Quote("All five bring {:.2f} times the goodput of none", FIVE, all_over_none),
    Quote(
        "{:.2f} of what it did with speculation, {:.2f} with prefix sharing and {:.2f} with quantization",
        FIVE,
        effects("cost", "speculation", "sharing", "quantization"),
    ),
    Quote(
        "gains {:.2f} from prefix sharing and {:.2f} from quantization",
        CHATS,
        effects("goodput", "sharing", "quantization"),
    ),
    Quote("TPOT falls to {:.2f} of what it was in chats", CHATS, effects("TPOT", "quantization")),
    Quote("in chats and TTFT to {:.2f} (", CHATS, effects("TTFT", "quantization")),
    Quote("with long prompts to {:.2f} and", LONG_PROMPTS, effects("TPOT", "quantization")),
    Quote("and {:.2f} ([five-llama-29m-long-prompts]", LONG_PROMPTS, effects("TTFT", "quantization")),
    Quote("it gains {:.2f} from quantization", LONG_PROMPTS, effects("goodput", "quantization")),
    Quote("All five bring {:.2f} and {:.2f}.", CHATS + LONG_PROMPTS, all_of_both),
    Quote(
        "gain {:.2f} from paged KV, {:.2f} from quantization and {:.2f} from speculation",
        LONG_ANSWERS,
        effects("goodput", "paging", "quantization", "speculation"),
    ),
    Quote("all five bring {:.2f}.", LONG_ANSWERS, all_over_none),
    Quote("{:.2f} times bf16 without drafts", DRAFTS, drafted("over_plain", (1, "int4", "bf16"))),
)


@pytest.mark.parametrize("quote", QUOTES, ids=lambda quote: quote.text)
def test_a_quoted_figure_equals_the_results(quote: Quote) -> None:
    documents = [json.loads((ROOT / "bench/results" / file).read_bytes()) for file in quote.files]
    text = quote.text.format(*quote.values(*documents))
    paragraphs = [" ".join(part.split()) for part in DOCUMENT.read_text().split("\n\n")]
    places = [paragraph for paragraph in paragraphs if text in paragraph]
    assert places, f"not in {DOCUMENT.name}: {text}"
    for file in quote.files:
        assert f"](bench/results/{Path(file).parent})" in places[0], "its paragraph does not name the results"


class Comparison(NamedTuple):
    """The tokens per second of one system over those of another, at 1, 4 and 16 requests at once.

    Both were measured in turns, unless each has a run of its own.
    """

    run: str
    system: str
    over: str
    over_run: str = ""

    def ratios(self) -> list[float]:
        ours = medians(self.run, self.system)
        if ours[0]["throughput_ratio"] is not None and not self.over_run:
            return [each["throughput_ratio"] for each in ours]
        theirs = medians(self.over_run or self.run, self.over)
        return [a[SPEED] / b[SPEED] for a, b in zip(ours, theirs, strict=True)]


def medians(run: str, system: str) -> list[dict[str, Any]]:
    document = json.loads((ROOT / f"bench/results/{run}.json").read_bytes())
    found = sorted(document["medians"], key=lambda each: each["concurrency"])
    return [each for each in found if each["system"] == system]


SPEED = "output_throughput"
ONE, SPLIT = "compare-llama-29m/colocated", "compare-llama-29m/disaggregated"
XEON, SMOL, GGUF = "compare-llama-29m-amx/results", "compare-smollm2", "compare-smollm2-gguf"
COMPARISONS = {
    "| Tandem, colocated | vLLM, one server | {:.2f} / {:.2f} / {:.2f} | {:.2f} / {:.2f} / {:.2f} |": [
        Comparison(ONE, "tandem-colocated", "vllm-tamed"),
        Comparison(XEON, "tandem-colocated", "vllm-tamed"),
    ],
    "(the default) | vLLM, one server | {:.2f} / {:.2f} / {:.2f} | {:.2f} / {:.2f} / {:.2f} |": [
        Comparison(SPLIT, "tandem", "vllm-tamed", ONE),
        Comparison(XEON, "tandem", "vllm-tamed"),
    ],
    "| the same | vLLM split in two over NIXL | {:.2f} / {:.2f} / {:.2f} |": [
        Comparison(SPLIT, "tandem", "vllm-disaggregated-tamed")
    ],
    "In bf16 it has {:.1f} / {:.1f} / {:.1f} times vLLM's tokens per second on the Xeon": [
        Comparison(f"{SMOL}-amx/results", "tandem-colocated", "vllm-tamed")
    ],
    "and {:.1f} / {:.1f} / {:.1f} times on an EPYC with AVX2 alone": [
        Comparison(f"{SMOL}/results", "tandem-colocated", "vllm-tamed")
    ],
    "Its Q4_1 GGUF file has {:.1f} / {:.1f} / {:.1f} times those of llama.cpp's server on the Xeon": [
        Comparison(f"{GGUF}-amx/results", "tandem-colocated", "llama.cpp")
    ],
    "{:.1f} / {:.1f} / {:.1f} times on that EPYC": [
        Comparison(f"{GGUF}/results", "tandem-colocated", "llama.cpp")
    ],
}


@pytest.mark.parametrize("text", COMPARISONS)
def test_the_readmes_ratios_equal_the_results(text: str) -> None:
    ratios = [ratio for comparison in COMPARISONS[text] for ratio in comparison.ratios()]
    assert text.format(*ratios) in " ".join((ROOT / "README.md").read_text().split())
