"""Medusa's static trees, kept paths and rounded heads. See `test_drafters.py`, too."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from engine.engine import Engine
from engine.linear.packed import kernel_fault
from engine.sampler import gumbel_noise, stream_keys
from engine.step.draft import Draft
from engine.step.sequence import SequenceState
from protocol.config import field_docs
from protocol.errors import ConfigError
from protocol.speculation import Quantization, SpeculativeConfig
from speculation import drawing
from speculation.medusa import MedusaDrafter, StaticTree, assumed_acceptance, choose_tree
from speculation.speculator import BatchSpeculator
from tests.speculation import small_engine
from tests.speculation.medusa_files import (
    PlainHeads,
    own_names,
    random_heads,
    vllm_names,
    write_v1,
    write_vllm,
)
from tests.speculation.small_engine import joined, native_config, prompt_of, run, tokens
from tests.worker.tiny_model import VOCAB_SIZE, load

NEEDS_KERNEL = pytest.mark.skipif(
    kernel_fault(torch.device("cpu"), torch.bfloat16) is not None, reason="this machine has no such kernel"
)
HIDDEN_SIZE = 64
NUM_HEADS = 4
SAMPLED = {"temperature": 0.8, "seed": 11}


def ask(request_id: str, prompt: list[int], max_tokens: int = 24, **sampling: Any) -> Any:
    return small_engine.ask(request_id, prompt, max_tokens, ignore_eos=True, **sampling)


def make_engine(
    target: Path, heads: Path | None = None, heads_in: Quantization | None = None, **options: Any
) -> Engine:
    """Make an engine with these heads, if any. Options are the speculation's or the server's."""
    server = {name: options.pop(name) for name in [*options] if name in field_docs()}
    if heads is not None:
        asked = SpeculativeConfig(method="medusa", model=str(heads), quantization=heads_in, **options)
        server["speculative_config"] = asked
    return Engine(native_config(target, 96, **server), speculate=BatchSpeculator)


def drafter_of(engine: Engine) -> MedusaDrafter:
    drafter = engine._speculator._drafters["medusa"]  # type: ignore[union-attr]
    assert isinstance(drafter, MedusaDrafter)
    return drafter


@dataclass
class Drafted:
    """Random heads in a file and as a plain reference, and what engines draft with them."""

    target: Path
    folder: Path
    model: PreTrainedModel
    heads: PlainHeads

    def drafts(self, *requests: Any, **options: Any) -> list[tuple[list[int], Draft, Tensor]]:
        """Run requests. Return each draft with the committed tokens before it and the heads' logits there."""
        engine = make_engine(self.target, self.folder, **options)
        drafts = watched(engine)
        run(engine, requests)
        assert not drafter_of(engine)._features
        return [(committed, draft, self.logits(committed[:-1])) for committed, draft in drafts]

    @torch.no_grad()
    def logits(self, token_ids: list[int]) -> Tensor:
        """Return the heads' logits after the last of these tokens, from the state that the LM head reads."""
        output = self.model(input_ids=torch.tensor([token_ids]), output_hidden_states=True)
        return self.heads.logits(output.hidden_states[-1][:, -1])[0]


def watched(engine: Engine) -> list[tuple[list[int], Draft]]:
    """Return a list that gets all later drafts, with the committed tokens before each."""
    found: list[tuple[list[int], Draft]] = []
    drafter = drafter_of(engine)
    propose = drafter.propose

    def watching(sequences: Sequence[SequenceState], counts: Sequence[int]) -> list[Draft | None]:
        drafts = propose(sequences, counts)
        pairs = zip(sequences, drafts, strict=True)
        found.extend((list(sequence.token_ids), draft) for sequence, draft in pairs if draft is not None)
        return drafts

    drafter.propose = watching  # type: ignore[method-assign]
    return found


@pytest.fixture(scope="module")
def drafted(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Drafted:
    heads, folder = random_heads(NUM_HEADS, 1, HIDDEN_SIZE, VOCAB_SIZE), tmp_path_factory.mktemp("heads")
    write_v1(folder, own_names(heads))
    return Drafted(target, folder, load(target).eval(), heads)


@pytest.mark.parametrize(
    ("dtype", "shared"), [("float32", False), pytest.param("bfloat16", True, marks=NEEDS_KERNEL)]
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
    options = {"num_speculative_tokens": NUM_HEADS, "dtype": dtype, "enable_prefix_caching": False}
    rounded = make_engine(target, tmp_path, heads_in="int8", **options)
    plain = make_engine(target, tmp_path, **options)
    requests = [ask("greedy", prompt_of(40, 1)), ask("sampled", prompt_of(7, 2), logprobs=2, **SAMPLED)]
    without, *answers = [
        tokens(run(each, requests)) for each in (make_engine(target, dtype=dtype), rounded, plain)
    ]
    assert answers == [without, without]
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


def noisy(logits: Tensor, first: int, temperature: float, seed: int) -> Tensor:
    """Add the noise of the place that a head drafts for, which ranks its tokens."""
    positions = torch.arange(first, first + len(logits))
    keys = stream_keys(torch.full_like(positions, seed), positions)
    noise = gumbel_noise(keys.unsqueeze(1), torch.arange(logits.shape[1]))
    return logits.log_softmax(dim=-1) / temperature + noise


@pytest.mark.parametrize("sampling", [{}, SAMPLED])
def test_a_draft_tree_follows_the_static_tree(
    drafted: Drafted, sampling: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drawing, "_NUM_CANDIDATES", VOCAB_SIZE)
    request = ask("r", prompt_of(20), 20, **sampling)
    found = drafted.drafts(request, num_speculative_tokens=20, tree=True, tree_nodes=12)
    tree = choose_tree(assumed_acceptance(NUM_HEADS), 12)
    assert any(len(draft.token_ids) == 12 for _, draft, _ in found)
    for committed, draft, logits in found:
        if sampling:
            logits = noisy(logits, len(committed), sampling["temperature"], sampling["seed"])
        ranked = logits.topk(10).indices
        size = len(draft.token_ids)
        assert draft.parents == tree.parents[:size]
        nodes = zip(tree.depths[:size], tree.ranks[:size], strict=True)
        assert draft.token_ids == [int(ranked[depth, rank]) for depth, rank in nodes]


def test_under_rejection_sampling_trees_are_greedy(drafted: Drafted) -> None:
    options: dict[str, Any] = {"num_speculative_tokens": 12, "tree": True, "tree_nodes": 12}
    tree = choose_tree(assumed_acceptance(NUM_HEADS), 12)
    request = ask("r", prompt_of(20), 30, **SAMPLED)
    for _, draft, logits in drafted.drafts(request, verification="standard", **options):
        expected = tree.draft(logits.topk(10).indices.tolist(), len(draft.token_ids))
        assert (draft.token_ids, draft.distributions) == (expected.token_ids, None)


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
        logits = torch.zeros(len(features), count, VOCAB_SIZE)
        for row, sequence in enumerate(self.sequences):
            known = self._answers[sequence.request_id][sequence.position :]
            for head, right in enumerate(known[:count]):
                others = [token for token in range(40) if token != right]
                best_first = [*others[: self._rank], right, *others[self._rank :]]
                logits[row, head, best_first] = self._gap * torch.arange(len(best_first), 0, -1)
        return logits


@pytest.mark.parametrize(("tree", "rank"), [(False, 0), (True, 0), (True, 1)])
def test_right_drafts_are_accepted_and_their_path_is_kept(
    drafted: Drafted, tree: bool, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each head's right token has a certain rank, so each step yields the tree's tokens of this rank."""
    requests = [
        ask(f"r{i}", prompt_of(10 + i, i), 60, **(SAMPLED if i and rank == 0 else {})) for i in range(2)
    ]
    expected = tokens(run(make_engine(drafted.target), requests))
    options = {"num_speculative_tokens": 24, "tree": tree, "tree_nodes": 24}
    engine = make_engine(drafted.target, drafted.folder, max_num_batched_tokens=128, **options)
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
    outputs: dict[str, list[Any]] = {request.request_id: [] for request in requests}
    while engine.has_work():
        for output in engine.step().outputs:
            outputs[output.request_id].append(output)
    per_step = 1 + (deepest(choose_tree(assumed_acceptance(NUM_HEADS), 24), rank) if tree else NUM_HEADS)
    assert per_step > 1
    for name, found in outputs.items():
        assert joined(found).token_ids == expected[name]
        assert [len(output.token_ids) for output in found[:4]] == [1, per_step, per_step, per_step]


def deepest(tree: StaticTree, rank: int) -> int:
    """Return the depth of a path on which all nodes have this rank."""
    depth, last = 0, -1
    for node, place in enumerate(zip(tree.parents, tree.ranks, strict=True)):
        if place == (last, rank):
            depth, last = depth + 1, node
    return depth


TABLE = [[0.6, 0.15, 0.1, 0.02], [0.4, 0.2, 0.05], [0.3, 0.1]]


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
        size = rng.randint(1, 40)
        assert probabilities(choose_tree(table, size), table) == pytest.approx(all_paths(table)[:size])


def test_parents_come_first_and_siblings_differ() -> None:
    tree = choose_tree(TABLE, 30)
    places = list(zip(tree.parents, tree.ranks, strict=True))
    assert len(set(places)) == 30
    for node, (parent, depth) in enumerate(zip(tree.parents, tree.depths, strict=True)):
        assert parent < node
        assert depth == (0 if parent < 0 else tree.depths[parent] + 1)
    tokens = [100 * depth + rank for depth, rank in zip(tree.depths, tree.ranks, strict=True)]
    masks = Draft(tokens, tree.parents).masks()
    assert masks is not None and all(mask >> (row) & 1 for row, mask in enumerate(masks))


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
