"""Recurrent layers: the operators' arithmetic and bits, and an engine that serves models with such layers."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import transformers
from torch import Tensor

from engine.engine import Engine
from engine.recurrent.layout import RecurrentLayer, StateLayout
from engine.recurrent.native import CpuOperators
from engine.recurrent.operators import StepOperators, TorchOperators
from engine.recurrent.seats import RowSpan, Seats
from kvtransfer.blocks.layout import conversion_problem
from protocol.config import ServeConfig
from protocol.errors import ConfigError
from protocol.outputs import TokenOutput
from protocol.speculation import SpeculativeConfig
from tests.e2e.architectures import write_model
from tests.engine.test_engine import ask, prompt_of, run, tokens
from tests.worker.tiny_model import greedy, load

needs_seam = pytest.mark.skipif(
    tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 23),
    reason="this Transformers' recurrent layers call other functions",
)

LAYER = RecurrentLayer(channels=24, taps=4, num_heads=4, num_key_heads=2, key_dim=20, value_dim=70)
LAYERS = {
    "sum": LAYER,
    "delta": LAYER,
    "delta by channel": replace(LAYER, decay_dim=LAYER.key_dim),
    "scan": replace(LAYER, num_heads=70, num_key_heads=1, value_dim=1),
}
"""By what a token adds: its value or, by the delta rule, what lacks of it; decays of heads or channels; heads
of one value each, more than the kernel takes at once.
"""
LENGTH = 53
"""Tokens: three grid points, and some behind the last one."""
MATES = 2


class Text:
    """Rows of one sequence for each input of the operators."""

    def __init__(self, seed: int, rule: str, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(LENGTH, *shape, generator=generator)

        self.layer = LAYERS[rule]
        self.inputs = normal(LAYER.channels).to(dtype)
        layer = self.layer
        self.query, self.key = (0.3 * normal(layer.num_key_heads, layer.key_dim) for _ in range(2))
        self.value = normal(layer.num_heads, layer.value_dim)
        self.decay = -0.2 * normal(layer.num_heads, layer.decay_dim).abs()
        self.beta = normal(layer.num_heads).sigmoid() if "delta" in rule else None

    def rows(self, start: int, end: int) -> list[Tensor]:
        parts = self.inputs, self.query, self.key, self.value, self.decay
        return [part[start:end] for part in (*parts, *([] if self.beta is None else [self.beta]))]


WEIGHT = torch.randn(LAYER.channels, LAYER.taps, generator=torch.Generator().manual_seed(9))


def served(
    kind: type[StepOperators], texts: list[Text], rng: random.Random | None
) -> list[tuple[Tensor, Tensor]]:
    """Of each text, what the operators give: in chunks at random places beside the others, or whole."""
    seats = Seats(StateLayout((texts[0].layer,), texts[0].inputs.dtype), len(texts) + 1, torch.device("cpu"))
    operators = kind(seats)
    done = [0] * len(texts)
    found: list[list[tuple[Tensor, Tensor]]] = [[] for _ in texts]
    while min(done) < LENGTH:
        left = [index for index, count in enumerate(done) if count < LENGTH]
        taken = left if rng is None else rng.sample(left, rng.randint(1, len(left)))
        counts = [
            LENGTH - done[i] if rng is None else min(rng.randint(1, 20), LENGTH - done[i]) for i in taken
        ]
        operators.begin_step(
            [RowSpan(i + 1, done[i], count, done[i] + count) for i, count in zip(taken, counts, strict=True)]
        )
        chunks = [texts[i].rows(done[i], done[i] + count) for i, count in zip(taken, counts, strict=True)]
        inputs, query, key, value, decay, *beta = (torch.cat(part) for part in zip(*chunks, strict=True))
        conv = operators.causal_conv(0, inputs, WEIGHT, None).split(counts)
        out = attended(operators, texts[0].layer, query, key, value, decay, *beta).split(counts)
        for i, count, *outputs in zip(taken, counts, conv, out, strict=True):
            found[i].append((outputs[0], outputs[1]))
            done[i] += count
    return [(torch.cat([a for a, _ in parts]), torch.cat([b for _, b in parts])) for parts in found]


RATES = torch.rand(70, LAYER.key_dim, generator=torch.Generator().manual_seed(8))


def attended(operators: StepOperators, layer: RecurrentLayer, *rows: Tensor) -> Tensor:
    if layer.value_dim > 1:
        return operators.linear_attention(0, *rows[:4], rows[4] if len(rows) > 4 else None)
    query, key, value, times = rows
    scanned = operators.selective_scan(0, query[:, 0], key[:, 0], value[..., 0], times[..., 0], RATES)
    return scanned[..., None]


def token_by_token(text: Text) -> tuple[Tensor, Tensor]:
    """float64, as the papers have it."""
    padded = torch.cat([torch.zeros(LAYER.taps - 1, LAYER.channels), text.inputs]).double()
    conv = torch.stack([(padded[t : t + LAYER.taps] * WEIGHT.double().t()).sum(0) for t in range(LENGTH)])
    layer = text.layer
    state = torch.zeros(layer.state_shape, dtype=torch.float64)
    group = layer.num_heads // layer.num_key_heads
    rates = RATES.double() if layer.value_dim == 1 else 1
    out = []
    for t in range(LENGTH):
        query, key = (rows[t].double().repeat_interleave(group, 0) for rows in (text.query, text.key))
        state = state * (text.decay[t].double() * rates).exp()[..., None]
        delta = text.value[t].double()
        if text.beta is not None:
            delta = text.beta[t].double()[:, None] * (delta - torch.einsum("hk,hkv->hv", key, state))
        state = state + key[..., None] * delta[:, None]
        out.append(torch.einsum("hk,hkv->hv", query, state))
    return conv, torch.stack(out)


@pytest.mark.parametrize("kind", [TorchOperators, CpuOperators])
@pytest.mark.parametrize("rule", LAYERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_are_right_and_have_the_same_bits_in_any_chunks_and_company(
    kind: type[StepOperators], rule: str, dtype: torch.dtype
) -> None:
    texts = [Text(seed, rule, dtype) for seed in range(1 + MATES)]
    alone = served(kind, texts[:1], None)[0]
    for got, exact in zip(alone, token_by_token(texts[0]), strict=True):
        torch.testing.assert_close(got.double(), exact, rtol=1e-4, atol=1e-5)
    for seed in range(4):
        crowd = served(kind, texts, random.Random(seed))[0]
        assert all(torch.equal(one, other) for one, other in zip(alone, crowd, strict=True))


def rows_of(text: Text, noise: Text, places: list[int | None]) -> list[Tensor]:
    """The text's rows at these places, and others for None."""
    chosen = [
        text.rows(place, place + 1) if place is not None else noise.rows(index, index + 1)
        for index, place in enumerate(places)
    ]
    return [torch.cat(part) for part in zip(*chosen, strict=True)]


@pytest.mark.parametrize("kind", [TorchOperators, CpuOperators])
@pytest.mark.parametrize("rule", LAYERS)
@pytest.mark.parametrize("trees", [False, True])
def test_drafted_rows_have_the_bits_of_certain_ones_and_leave_nothing_behind(
    kind: type[StepOperators], rule: str, trees: bool
) -> None:
    """Drafts across two grid points, right for a while and then wrong; some of what is right is kept."""
    text, noise = Text(0, rule, torch.bfloat16), Text(1, rule, torch.bfloat16)
    whole = served(kind, [text], None)[0]
    num_accepted = 0
    for seed in range(6):
        rng = random.Random(seed)
        layout = StateLayout((text.layer,), torch.bfloat16).with_drafts(40)
        seats = Seats(layout, 2, torch.device("cpu"))
        operators = kind(seats)
        done = 0
        while done < LENGTH:
            certain = done + rng.randint(1, min(6, LENGTH - done))
            drafted: list[int | None] = []
            masks, last = [1], 1
            nodes: list[int] = []
            for place in range(certain, min(certain + rng.randint(0, 20), LENGTH)):
                siblings: list[int | None] = rng.choice(
                    [[place], [place, None], [None, place]][: 1 + 2 * trees]
                )
                for sibling in siblings:
                    drafted.append(sibling)
                    masks.append(last | 1 << len(masks))
                    nodes += [len(masks) - 2] if sibling is not None else []
                last = masks[nodes[-1] + 1]
            if not trees:
                drafted += [None] * rng.randint(0, 40 - len(drafted))
            start = certain - 1 if trees else done  # a tree's root is the last certain token
            if trees and start > done:
                inputs, *others = text.rows(done, start)
                operators.begin_step([RowSpan(1, done, start - done, start)])
                operators.causal_conv(0, inputs, WEIGHT, None)
                attended(operators, text.layer, *others)
            places = [*range(start, certain), *drafted]
            inputs, *others = rows_of(text, noise, places)
            operators.begin_step([RowSpan(1, start, len(places), certain, masks if trees else None, start)])
            conv = operators.causal_conv(0, inputs, WEIGHT, None)
            out = attended(operators, text.layer, *others)
            known = [index for index, place in enumerate(places) if place is not None]
            for got, exact in zip((conv, out), whole, strict=True):
                assert torch.equal(got[known], exact[[places[index] for index in known]])
            accepted = nodes[: rng.randint(0, len(nodes))]
            seats.move(1, certain, accepted)
            num_accepted += len(accepted)
            done = certain + len(accepted)
    assert num_accepted > 100


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hybrid")
    write_model("qwen3_5_text", folder)
    return folder


@pytest.fixture
def make_engine(folder: Path) -> Callable[..., Engine]:
    def make(**options: Any) -> Engine:
        config = ServeConfig(
            model=str(folder),
            dtype="float32",
            device="cpu",
            compile="off",
            max_model_len=128,
            max_num_batched_tokens=64,
            max_num_seqs=6,
            kv_cache_memory_bytes=2**21,
        )
        return Engine(msgspec.structs.replace(config, **options))

    return make


def assert_empty(engine: Engine) -> None:
    assert sum(engine.blocks.available) == engine.blocks.num_blocks
    assert engine.pool.seats is not None
    assert sorted(engine.pool.seats._free) == list(range(engine.config.max_num_seqs))


@needs_seam
def test_preempted_sequences_go_on_with_the_same_tokens(
    make_engine: Callable[..., Engine], folder: Path
) -> None:
    reference = load(folder)
    seats_and_nine_blocks = make_engine().pool
    assert seats_and_nine_blocks.seats is not None
    layout = seats_and_nine_blocks.seats.layout
    block_bytes = seats_and_nine_blocks.arenas[0].shape[1]
    room = 6 * layout.seat_bytes + (9 + seats_and_nine_blocks.state_blocks) * block_bytes
    engine = make_engine(kv_cache_memory_bytes=room)
    prompts = [prompt_of(20 + 3 * seed, seed) for seed in range(6)]
    for index, prompt in enumerate(prompts):
        engine.add(ask(str(index), prompt, 30))
    outputs = run(engine)
    assert engine.stats().num_preemptions > 0
    assert [tokens(outputs[str(i)]) for i in range(6)] == [greedy(reference, each, 30) for each in prompts]
    assert_empty(engine)


@needs_seam
def test_a_prompt_that_nobody_took_over_goes_on_here(
    make_engine: Callable[..., Engine], folder: Path
) -> None:
    reference = load(folder)
    engine = make_engine()
    prompts = {"short": prompt_of(9), "long": prompt_of(70, 1)}
    outputs: dict[str, list[TokenOutput]] = {name: [] for name in prompts}
    for name, prompt in prompts.items():
        engine.add(ask(name, prompt, 12), prefill_only=True)
    while engine.has_work():
        for output in engine.step().outputs:
            outputs[output.request_id].append(output)
    for index in range(6):  # take the seats that they have left
        engine.add(ask(f"other-{index}", prompt_of(40, 2 + index)), prefill_only=index == 0)
    run(engine)
    engine.abort("other-0")
    for name in prompts:
        engine.resume(name)
    for name, found in run(engine).items():
        outputs[name] += found
    for name, prompt in prompts.items():
        assert tokens(outputs[name]) == greedy(reference, prompt, 12)
    assert_empty(engine)


@needs_seam
def test_bfloat16_gives_the_same_bits_in_any_chunks_and_company(make_engine: Callable[..., Engine]) -> None:
    def served(budget: int, num_mates: int) -> list[TokenOutput]:
        engine = make_engine(dtype="bfloat16", max_num_batched_tokens=budget)
        engine.add(ask("a", prompt_of(75), 12, sampling={"logprobs": 3}))
        for mate in range(num_mates):
            engine.add(ask(f"mate-{mate}", prompt_of(11 * mate + 5, mate + 1), 20))
        return run(engine)["a"]

    def facts(outputs: list[TokenOutput]) -> list[Any]:
        return [(output.token_ids, output.logprobs) for output in outputs]

    alone = facts(served(128, 0))
    assert facts(served(7, 0)) == alone
    assert facts(served(33, 5)) == alone


@needs_seam
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"compile": "on"}, "--compile: on: not supported for a model with recurrent layers"),
        (
            {"speculative_config": SpeculativeConfig(method="self_speculative")},
            "--speculative-config: self_speculative: not supported",
        ),
        ({"kv_wire_dtype": "int8"}, "--kv-wire-dtype: not supported"),
        ({"block_size": 24}, "--block-size: 24: .* every 16 tokens"),
        ({"max_num_seqs": 4000}, r"--max-num-seqs: 4000 sequences' states.*; \d+ fit"),
    ],
)
def test_what_cannot_be_served_is_named(
    make_engine: Callable[..., Engine], options: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        make_engine(**options)


@needs_seam
def test_a_state_goes_to_equal_pools_alone(make_engine: Callable[..., Engine]) -> None:
    ours = make_engine().segments
    assert conversion_problem(ours, ours) is None
    for other in (make_engine(block_size=32), make_engine(dtype="bfloat16")):
        problem = conversion_problem(other.segments, ours)
        assert problem is not None and "blocks beside a state are not converted" in problem[1]
