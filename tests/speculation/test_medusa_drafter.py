"""Medusa's static trees, kept paths and rounded heads. See `test_drafters.py`, too."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from engine.engine import Engine
from engine.sampler import gumbel_noise, stream_keys
from engine.step.draft import Draft
from protocol.errors import ConfigError
from protocol.speculation import Verification
from speculation import drawing
from speculation.medusa import StaticTree, assumed_acceptance, choose_tree
from tests.engine.kernels import needs_kernel
from tests.speculation.eagle_engine import Watched
from tests.speculation.eagle_files import VOCAB, WIDTH
from tests.speculation.medusa_files import own_names, random_heads, vllm_names, write_v1, write_vllm
from tests.speculation.small_engine import ask, drafting, native_config, run, small_config, tokens
from tests.speculation.small_engine import prompt_of as any_prompt
from tests.worker.tiny_model import VOCAB_SIZE

HIDDEN_SIZE = 64
NUM_HEADS = 4
SAMPLED: dict[str, Any] = {"temperature": 0.8, "seed": 11}
prompt_of = partial(any_prompt, vocab_size=VOCAB)


@pytest.fixture
def watch(deep_target: Path, tmp_path: Path) -> Callable[..., Watched]:
    """Return a function that makes an engine with random heads."""
    write_v1(tmp_path, own_names(random_heads(NUM_HEADS, 1, WIDTH, VOCAB)))
    return partial(Watched, deep_target, tmp_path, method="medusa")


@pytest.mark.parametrize(
    ("dtype", "shared"), [("float32", False), pytest.param("bfloat16", True, marks=needs_kernel)]
)
def test_quantized_heads_draft_nearly_the_same_and_change_no_token(
    target: Path, tmp_path: Path, shared: bool, dtype: str
) -> None:
    """With an LM head and two layers for each head, or one LM head for all."""
    heads = random_heads(NUM_HEADS, 2, HIDDEN_SIZE, VOCAB_SIZE)
    if shared:
        heads.lm_heads = [heads.lm_heads[0]] * NUM_HEADS
    tensors = {name: each for name, each in vllm_names(heads).items() if not shared or "lm_heads" not in name}
    write_vllm(tmp_path, tensors | ({"lm_head.weight": heads.lm_heads[0]} if shared else {}))
    config = native_config(target, dtype=dtype, enable_prefix_caching=False)
    asked: dict[str, Any] = {"method": "medusa", "model": str(tmp_path), "num_speculative_tokens": NUM_HEADS}
    rounded, plain = (drafting(config, quantization=format, **asked) for format in ("int8", None))
    requests = [
        ask("greedy", any_prompt(40, 1), ignore_eos=True),
        ask("sampled", any_prompt(7, 2), ignore_eos=True, logprobs=2, **SAMPLED),
    ]
    without, *answers = [tokens(run(each, requests)) for each in (Engine(config), rounded, plain)]
    assert answers == [without, without]
    random = torch.Generator().manual_seed(0)
    features = torch.randn(40, HIDDEN_SIZE, generator=random).to(getattr(torch, dtype))
    speculators: list[Any] = [rounded._speculator, plain._speculator]
    with torch.inference_mode():
        ours, theirs = (each._drafters["medusa"]._heads.logits(features, 3).float() for each in speculators)
    error = (ours - theirs).square().mean().sqrt() / theirs.square().mean().sqrt()
    assert 1e-3 < error < 0.03, "rounded, but to int8"


def test_heads_that_the_format_does_not_fit_are_refused(tmp_path: Path) -> None:
    shape = {"hidden_size": 40, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 2}
    narrow = AutoConfig.for_model("llama", vocab_size=VOCAB_SIZE, **shape)
    AutoModelForCausalLM.from_config(narrow).save_pretrained(tmp_path / "target")
    write_v1(tmp_path / "heads", own_names(random_heads(2, 1, 40, VOCAB_SIZE)))
    asked = {"method": "medusa", "model": str(tmp_path / "heads"), "quantization": "int4"}
    with pytest.raises(
        ConfigError, match="--speculative-config: quantization: int4 fits none of the model's 3"
    ):
        drafting(small_config(tmp_path / "target"), **asked)


def noisy(logits: Tensor, first: int) -> Tensor:
    """Add the noise of the place that a head drafts for, which ranks its tokens."""
    positions = torch.arange(first, first + len(logits))
    keys = stream_keys(torch.full_like(positions, SAMPLED["seed"]), positions)
    noise = gumbel_noise(keys.unsqueeze(1), torch.arange(logits.shape[1]))
    return logits.log_softmax(dim=-1) / SAMPLED["temperature"] + noise


@pytest.mark.parametrize(
    ("sampling", "verification"), [({}, "coupled"), (SAMPLED, "coupled"), (SAMPLED, "standard")]
)
def test_a_draft_tree_follows_the_static_tree(
    watch: Callable[..., Watched],
    deep_model: PreTrainedModel,
    sampling: dict[str, Any],
    verification: Verification,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Under rejection sampling trees are greedy."""
    monkeypatch.setattr(drawing, "_NUM_CANDIDATES", VOCAB)
    watched = watch(num_tokens=NUM_HEADS, tree_nodes=12, verification=verification)
    watched.ask("r", prompt_of(20), 20, sampling=sampling)
    watched.run()
    heads, tree = random_heads(NUM_HEADS, 1, WIDTH, VOCAB), choose_tree(assumed_acceptance(NUM_HEADS), 12)
    assert any(len(drafted) == 12 for _, _, drafted in watched.drafts)
    for (_, committed, drafted), draft in zip(watched.drafts, watched.trees, strict=True):
        with torch.no_grad():
            output = deep_model(torch.tensor([committed[:-1]]), output_hidden_states=True)
            logits = heads.logits(output.hidden_states[-1][:, -1])[0]
        if sampling and verification == "coupled":
            logits = noisy(logits, len(committed))
        expected = tree.draft(logits.topk(10).indices.tolist(), len(drafted))
        assert (drafted, draft.parents) == (expected.token_ids, expected.parents)
        assert draft.distributions is None


class Oracle:
    """Heads whose `rank`-th token is right at each place, for the known `sequences`."""

    num_heads = NUM_HEADS

    def __init__(self, answers: dict[str, list[int]], rank: int) -> None:
        self.sequences: list[Any] = []
        self._answers = answers
        self._rank = rank
        self._gap = 100.0 if rank == 0 else 5.0  # more than any noise

    def logits(self, features: Tensor, count: int) -> Tensor:
        assert len(features) == len(self.sequences)
        logits = torch.zeros(len(features), count, VOCAB)
        for row, sequence in enumerate(self.sequences):
            known = self._answers[sequence.request_id][sequence.position :]
            for head, right in enumerate(known[:count]):
                others = [token for token in range(40) if token != right]
                best_first = [*others[: self._rank], right, *others[self._rank :]]
                logits[row, head, best_first] = self._gap * torch.arange(len(best_first), 0, -1)
        return logits


@pytest.mark.parametrize(("tree", "rank"), [(False, 0), (True, 0), (True, 1)])
def test_right_drafts_are_accepted_and_their_path_is_kept(
    watch: Callable[..., Watched], tree: bool, rank: int
) -> None:
    """Each head's right token has a certain rank, so each step yields the tree's tokens of this rank."""
    plain, watched = watch(num_tokens=0), watch(tree_nodes=24 * tree, max_num_batched_tokens=128)
    prompts = {"r0": prompt_of(10, 0), "r1": prompt_of(11, 1)}
    for each, (name, prompt) in itertools.product((plain, watched), prompts.items()):
        each.ask(name, prompt, 60, sampling=SAMPLED if name == "r1" and rank == 0 else {})
    expected = plain.run()
    oracle = Oracle({name: prompt + expected[name] for name, prompt in prompts.items()}, rank)
    watched.drafter._heads, propose = oracle, watched._propose

    def proposing(sequences: Any, counts: Any) -> list[Draft | None]:
        oracle.sequences = list(sequences)
        return propose(sequences, counts)

    watched._propose = proposing
    outputs: dict[str, list[list[int]]] = {name: [] for name in prompts}
    while watched.engine.has_work():
        for output in watched.engine.step().outputs:
            outputs[output.request_id].append(output.token_ids)
    per_step = 1 + (deepest(choose_tree(assumed_acceptance(NUM_HEADS), 24), rank) if tree else NUM_HEADS)
    assert per_step > 1
    for name, found in outputs.items():
        assert [*itertools.chain(*found)] == expected[name]
        assert [*map(len, found[:4])] == [1, per_step, per_step, per_step]


def deepest(tree: StaticTree, rank: int) -> int:
    """Return the depth of a path on which all nodes have this rank."""
    depth, last = 0, -1
    for node, place in enumerate(zip(tree.parents, tree.ranks, strict=True)):
        if place == (last, rank):
            depth, last = depth + 1, node
    return depth


def probabilities(tree: StaticTree, table: list[list[float]]) -> list[float]:
    """Return for each node the probability that it and all its ancestors are right."""
    found: list[float] = []
    for parent, depth, rank in zip(tree.parents, tree.depths, tree.ranks, strict=True):
        found.append((found[parent] if parent >= 0 else 1.0) * table[depth][rank])
    return found


def all_paths(table: list[list[float]]) -> list[float]:
    ways = []
    for depth in range(1, len(table) + 1):
        for ranks in itertools.product(*(range(len(row)) for row in table[:depth])):
            ways.append(math.prod(table[head][rank] for head, rank in enumerate(ranks)))
    return sorted(ways, reverse=True)


def test_random_tables_give_optimal_trees() -> None:
    rng = random.Random(3)
    for _ in range(20):
        table = [
            sorted((rng.random() / 5 for _ in range(rng.randint(1, 5))), reverse=True)
            for _ in range(rng.randint(1, 4))
        ]
        tree = choose_tree(table, rng.randint(1, 40))
        assert probabilities(tree, table) == pytest.approx(all_paths(table)[: len(tree.ranks)])
        assert len({*zip(tree.parents, tree.ranks, strict=True)}) == len(tree.ranks), "siblings differ"


def test_ranks_that_were_never_right_come_last() -> None:
    tree = choose_tree([[0.5, 0.0, 0.3], [0.0]], 10)
    assert tree.ranks[0] == 0
    assert len(tree.ranks) == 6
    assert choose_tree([[0.0], [0.0]], 10).parents == [-1, 0]


def test_the_assumed_table_gives_a_tree_like_the_published_one() -> None:
    """mc_sim_7b_63 of Medusa's authors begins with [0], [0, 0], [1], [0, 1], [2], [0, 0, 0], [1, 0]."""
    tree = choose_tree(assumed_acceptance(4), 63)
    paths: list[list[int]] = []
    for parent, rank in zip(tree.parents, tree.ranks, strict=True):
        paths.append([*(paths[parent] if parent >= 0 else []), rank])
    assert len(paths) == 63
    for path in ([0], [0, 0], [1], [0, 1], [2], [0, 0, 0], [1, 0]):
        assert path in paths[:9]
    assert [0, 0, 0, 0] in paths
