"""Drafting with Medusa heads: the right tokens for the right places, and never another output."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from engine.linear.packed import kernel_fault
from engine.sampler import gumbel_noise, stream_keys
from protocol.errors import ConfigError
from protocol.handoff import REBUILD
from speculation import ranking
from speculation.medusa.tree import StaticTree, assumed_acceptance, choose_tree
from tests.speculation.medusa_engine import Watch, ask, drafter_of, final_hidden, make_engine, run, tokens
from tests.speculation.medusa_files import (
    PlainHeads,
    own_names,
    random_heads,
    vllm_names,
    write_v1,
    write_vllm,
)
from tests.worker.tiny_model import VOCAB_SIZE, load, write_tiny_llama

NEEDS_KERNEL = pytest.mark.skipif(
    kernel_fault(torch.device("cpu"), torch.bfloat16) is not None, reason="this machine has no such kernel"
)
HIDDEN_SIZE = 64
NUM_HEADS = 4
SAMPLED = {"temperature": 0.8, "seed": 11}
FILTERED = {"temperature": 1.1, "seed": 5, "top_k": 40, "top_p": 0.9, "repetition_penalty": 1.2}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    write_tiny_llama(folder)
    return folder


@pytest.fixture(scope="module")
def model(target: Path) -> PreTrainedModel:
    return load(target).eval()


@pytest.fixture(scope="module")
def plain_heads() -> PlainHeads:
    return random_heads(NUM_HEADS, 1, HIDDEN_SIZE, VOCAB_SIZE)


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory, plain_heads: PlainHeads) -> Path:
    folder = tmp_path_factory.mktemp("heads")
    write_v1(folder, own_names(plain_heads))
    return folder


def prompt_of(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1, VOCAB_SIZE) for _ in range(length)]


REQUESTS = [
    ask("greedy", prompt_of(40, 1)),
    ask("sampled", prompt_of(7, 2), **SAMPLED),
    ask("filtered", prompt_of(21, 3), **FILTERED),
    ask("short", prompt_of(2, 4), max_tokens=3),
    ask("logprobs", prompt_of(12, 5), logprobs=2, **SAMPLED),
]


@pytest.fixture(scope="module")
def without(target: Path) -> dict[str, list[int]]:
    engine = make_engine(target)
    for request in REQUESTS:
        engine.add(request)
    return tokens(run(engine))


@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 3, 5, 8])
def test_output_is_what_it_is_without_speculation(
    target: Path, heads: Path, without: dict[str, list[int]], num_tokens: int, tree: bool
) -> None:
    engine = make_engine(target, heads, num_speculative_tokens=num_tokens, tree=tree)
    for request in REQUESTS:
        engine.add(request)
    outputs = run(engine)
    assert tokens(outputs) == without
    assert sum(output.drafted_tokens for found in outputs.values() for output in found) > 30
    assert engine.blocks.available == engine.blocks.num_blocks
    assert not drafter_of(engine)._features


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=NEEDS_KERNEL)])
@pytest.mark.parametrize("shared", [False, True])
def test_rounded_heads_draft_nearly_the_same_and_change_no_token(
    target: Path, tmp_path: Path, shared: bool, dtype: str
) -> None:
    """With an LM head and two layers each, or one LM head for all."""
    heads = random_heads(NUM_HEADS, 2, HIDDEN_SIZE, VOCAB_SIZE)
    if shared:
        heads.lm_heads = [heads.lm_heads[0]] * NUM_HEADS
    tensors = {name: each for name, each in vllm_names(heads).items() if not shared or "lm_heads" not in name}
    write_vllm(tmp_path, tensors | ({"lm_head.weight": heads.lm_heads[0]} if shared else {}))
    options = {"num_speculative_tokens": NUM_HEADS, "dtype": dtype, "enable_prefix_caching": False}
    rounded = make_engine(target, tmp_path, heads_in="int8", **options)
    plain = make_engine(target, tmp_path, **options)
    answers = []
    for engine in (rounded, plain, make_engine(target, dtype=dtype)):
        for request in REQUESTS:
            engine.add(request)
        answers.append(tokens(run(engine)))
    assert answers[0] == answers[1] == answers[2]
    random = torch.Generator().manual_seed(0)
    features = torch.randn(40, HIDDEN_SIZE, generator=random).to(getattr(torch, dtype))
    with torch.inference_mode():
        ours, theirs = (drafter_of(each)._heads.logits(features, 3).float() for each in (rounded, plain))
    error = (ours - theirs).square().mean().sqrt() / theirs.square().mean().sqrt()
    assert 1e-3 < error < 0.03, "rounded, but to int8"


def test_heads_that_the_format_does_not_fit_are_refused(tmp_path: Path) -> None:
    shape = {"hidden_size": 40, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 2}
    narrow = AutoConfig.for_model("llama", vocab_size=VOCAB_SIZE, **shape)
    AutoModelForCausalLM.from_config(narrow).save_pretrained(tmp_path / "target")
    write_v1(tmp_path / "heads", own_names(random_heads(2, 1, 40, VOCAB_SIZE)))
    with pytest.raises(
        ConfigError, match="--speculative-config: quantization: int4 fits none of the model's 3"
    ):
        make_engine(tmp_path / "target", tmp_path / "heads", heads_in="int4")


@pytest.mark.parametrize("tree", [False, True])
def test_output_with_preemption_and_prefix_hits(target: Path, heads: Path, tree: bool) -> None:
    requests = [ask(f"r{i}", prompt_of(40, 9) + prompt_of(8, i), 40, **SAMPLED) for i in range(5)]
    engine, plain = (make_engine(target, h, 17, num_speculative_tokens=4, tree=tree) for h in (heads, None))
    for each in (engine, plain):
        for request in requests:
            each.add(request)
    assert tokens(run(engine)) == tokens(run(plain))
    assert engine.stats().num_preemptions > 0
    assert engine.stats().prefix_hit_tokens > 0


def test_each_head_drafts_for_its_place(
    target: Path, heads: Path, model: PreTrainedModel, plain_heads: PlainHeads
) -> None:
    """The i-th drafted token is head i's best, from the hidden state of the last token but one."""
    engine = make_engine(target, heads, num_speculative_tokens=8)
    watch = Watch(engine)
    for seed in range(3):
        engine.add(ask(f"r{seed}", prompt_of(50 - 20 * seed, seed), 10))
    run(engine)
    assert len(watch.drafts) > 20
    for _, committed, draft in watch.drafts:
        logits = plain_heads.logits(final_hidden(model, committed[:-1]))[0]
        assert draft.token_ids == logits.argmax(dim=-1).tolist()[: len(draft.token_ids)]
    assert max(len(draft.token_ids) for _, _, draft in watch.drafts) == NUM_HEADS


def noisy(logits: torch.Tensor, first: int, temperature: float, seed: int) -> torch.Tensor:
    """What ranks each head's tokens: its noise is that of the place it drafts for."""
    positions = torch.arange(first, first + len(logits))
    keys = stream_keys(torch.full_like(positions, seed), positions)
    noise = gumbel_noise(keys.unsqueeze(1), torch.arange(logits.shape[1]))
    return logits.log_softmax(dim=-1) / temperature + noise


def test_sampled_drafts_use_the_noise_of_their_places(
    target: Path,
    heads: Path,
    model: PreTrainedModel,
    plain_heads: PlainHeads,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ranking, "_NUM_CANDIDATES", VOCAB_SIZE)
    engine = make_engine(target, heads, num_speculative_tokens=4)
    watch = Watch(engine)
    engine.add(ask("r", prompt_of(20), 12, **SAMPLED))
    run(engine)
    assert len(watch.drafts) > 5
    for _, committed, draft in watch.drafts:
        logits = plain_heads.logits(final_hidden(model, committed[:-1]))[0]
        scores = noisy(logits, len(committed), SAMPLED["temperature"], int(SAMPLED["seed"]))
        assert draft.token_ids == scores.argmax(dim=-1).tolist()[: len(draft.token_ids)]


@pytest.mark.parametrize("sampling", [{}, SAMPLED])
def test_a_tree_has_the_ranks_of_the_static_one(
    target: Path,
    heads: Path,
    model: PreTrainedModel,
    plain_heads: PlainHeads,
    sampling: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ranking, "_NUM_CANDIDATES", VOCAB_SIZE)
    engine = make_engine(target, heads, num_speculative_tokens=20, tree=True, tree_nodes=12)
    watch = Watch(engine)
    engine.add(ask("r", prompt_of(20), 20, **sampling))
    run(engine)
    tree = choose_tree(assumed_acceptance(NUM_HEADS), 12)
    assert any(len(draft.token_ids) == 12 for _, _, draft in watch.drafts)
    for _, committed, draft in watch.drafts:
        logits = plain_heads.logits(final_hidden(model, committed[:-1]))[0]
        if sampling:
            logits = noisy(logits, len(committed), sampling["temperature"], sampling["seed"])
        ranked = logits.topk(10).indices
        size = len(draft.token_ids)
        assert draft.parents == tree.parents[:size]
        nodes = zip(tree.depths[:size], tree.ranks[:size], strict=True)
        assert draft.token_ids == [int(ranked[depth, rank]) for depth, rank in nodes]


def test_under_rejection_sampling_drafts_say_what_they_were_drawn_from(
    target: Path, heads: Path, model: PreTrainedModel, plain_heads: PlainHeads
) -> None:
    engine = make_engine(target, heads, num_speculative_tokens=3, verification="standard")
    watch = Watch(engine)
    for seed, name in enumerate("rs"):
        engine.add(ask(name, prompt_of(20, seed), 30, **SAMPLED))
    run(engine)
    assert len(watch.drafts) > 10
    for _, committed, draft in watch.drafts:
        logits = plain_heads.logits(final_hidden(model, committed[:-1]))[0, : len(draft.token_ids)]
        assert draft.distributions is not None
        expected = (logits / SAMPLED["temperature"]).softmax(dim=-1)
        torch.testing.assert_close(draft.distributions, expected, atol=1e-5, rtol=1e-3)


def test_under_rejection_sampling_a_tree_is_no_matter_of_chance(
    target: Path, heads: Path, model: PreTrainedModel, plain_heads: PlainHeads
) -> None:
    engine = make_engine(
        target, heads, num_speculative_tokens=12, tree=True, tree_nodes=12, verification="standard"
    )
    watch = Watch(engine)
    engine.add(ask("r", prompt_of(20), 30, **SAMPLED))
    run(engine)
    tree = choose_tree(assumed_acceptance(NUM_HEADS), 12)
    for _, committed, draft in watch.drafts:
        logits = plain_heads.logits(final_hidden(model, committed[:-1]))[0]
        expected = tree.draft(logits.topk(10).indices.tolist(), len(draft.token_ids))
        assert (draft.token_ids, draft.distributions) == (expected.token_ids, None)


class Oracle:
    """Heads that have the right token of each place at `rank`, for the `sequences` that are drafted for."""

    num_heads = NUM_HEADS

    def __init__(self, answers: dict[str, list[int]], rank: int) -> None:
        self.sequences: list[Any] = []
        self._answers = answers
        self._rank = rank
        self._gap = 100.0 if rank == 0 else 5.0  # more than noise bridges, where there is noise

    def logits(self, features: torch.Tensor, count: int) -> torch.Tensor:
        assert len(features) == len(self.sequences)
        logits = torch.zeros(len(features), count, VOCAB_SIZE)
        for row, sequence in enumerate(self.sequences):
            known = self._answers[sequence.request_id][sequence.position :]
            for head, right in enumerate(known[:count]):
                others = [token for token in range(40) if token != right]
                best_first = [*others[: self._rank], right, *others[self._rank :]]
                logits[row, head, best_first] = self._gap * torch.arange(len(best_first), 0, -1)
        return logits


@pytest.mark.parametrize(("tree", "rank"), [(False, 0), (True, 0), (True, 1)])
def test_right_drafts_are_accepted_and_the_path_is_kept(
    target: Path, heads: Path, tree: bool, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the right token of each head at a certain rank, each step brings what the tree has of them."""
    plain = make_engine(target)
    requests = [
        ask(f"r{i}", prompt_of(10 + i, i), 60, **(SAMPLED if i and rank == 0 else {})) for i in range(2)
    ]
    for request in requests:
        plain.add(request)
    expected = tokens(run(plain))
    options = {"num_speculative_tokens": 24, "tree": tree, "tree_nodes": 24}
    engine = make_engine(target, heads, max_num_batched_tokens=128, **options)
    answers = {r.request_id: r.prompt_token_ids + expected[r.request_id] for r in requests}
    drafter = drafter_of(engine)
    oracle, propose = Oracle(answers, rank), drafter.propose

    def watched(sequences: Any, counts: Any) -> Any:
        oracle.sequences = list(sequences)
        return propose(sequences, counts)

    monkeypatch.setattr(drafter, "_heads", oracle)
    monkeypatch.setattr(drafter, "propose", watched)
    for request in requests:
        engine.add(request)
    outputs = run(engine)
    assert tokens(outputs) == expected
    per_step = 1 + (deepest(choose_tree(assumed_acceptance(NUM_HEADS), 24), rank) if tree else NUM_HEADS)
    assert per_step > 1
    for found in outputs.values():
        sizes = [len(output.token_ids) for output in found]
        assert sizes[:4] == [1, per_step, per_step, per_step]


def deepest(tree: StaticTree, rank: int) -> int:
    """Of a way of this rank alone."""
    depth, last = 0, -1
    for node, place in enumerate(zip(tree.parents, tree.ranks, strict=True)):
        if place == (last, rank):
            depth, last = depth + 1, node
    return depth


def test_the_hidden_state_goes_along_with_a_hand_off(target: Path, heads: Path) -> None:
    request = ask("r", prompt_of(35), 20)
    prefill, decode = (make_engine(target, heads, num_speculative_tokens=3) for _ in range(2))
    prefill.add(request, prefill_only=True)
    first = tokens(run_until_idle(prefill))["r"][0]
    state = prefill.draft_state("r")
    drafts = []
    for given in (state, REBUILD):
        reservation = decode.reserve(request)
        assert reservation is not None
        for ours, theirs in zip(
            reservation.sequence_blocks.blocks[0], prefill.computed("r")[0].blocks, strict=True
        ):
            decode.pool.memory[ours].copy_(prefill.pool.memory[theirs])
        decode.activate(reservation, first, len(request.prompt_token_ids), draft=given)
        watch = Watch(decode)
        outputs = run(decode)
        plain = make_engine(target)
        plain.add(request)
        assert [first, *tokens(outputs)["r"]] == tokens(run(plain))["r"]
        drafts.append(watch.drafts)
    assert len(drafts[0][0][1]) == 36  # after the prompt and the first token
    assert len(drafts[1][0][1]) == 37  # without the state one step later
    assert drafts[0][1][2].token_ids == drafts[1][0][2].token_ids


def run_until_idle(engine: Any) -> dict[str, Any]:
    outputs: dict[str, Any] = {}
    for _ in range(20):
        for output in engine.step().outputs:
            outputs.setdefault(output.request_id, []).append(output)
    return outputs
