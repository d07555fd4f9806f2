"""Whole steps of an engine on a CUDA device: the host's waits, its work, and its copies to the device.

Uses `absent_gpu`, on which all tokens are 0, so drafts of zeros are accepted. The host's work is counted in
calls, because times differ between machines.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

pytest.importorskip("triton", reason="Triton is for Linux")

from engine import engine as engine_module
from engine.devices.cuda import runner as cuda_runner
from engine.devices.cuda.attention import backend as cuda_attention
from engine.devices.loaded_model import LoadedModel
from engine.engine import Engine
from engine.kv.layout import TARGET, Group, Segment
from engine.lora.files import AdapterFiles, RawAdapter
from engine.lora.table import Adapters, adaptable
from engine.sampler import Sampler
from engine.step.draft import Draft
from engine.step.sequence import SequenceState
from protocol.config import ServeConfig
from protocol.requests import Adapter, EngineRequest
from protocol.sampling import SamplingParams
from protocol.speculation import Method, RequestSpeculation, SpeculativeConfig, Verification
from speculation import draft_model
from speculation.drafter import Drafter
from speculation.speculator import BatchSpeculator
from speculation.verification.verify import prepare, verify
from tests.engine.absent_gpu import DEVICE_MS, GPU, ROOT, AbsentGpu, absent_gpu
from tests.engine.step.test_host_waits import CountedGraphs, hybrid, qwen3
from tests.speculation import eagle_files, medusa_files

LAYERS = 8
GREEDY: dict[str, Any] = {"temperature": 0.0}
TOP_P: dict[str, Any] = {"temperature": 0.8, "top_p": 0.9}
SAMPLING = pytest.mark.parametrize("sampling", [GREEDY, TOP_P], ids=["greedy", "top-p"])
PLAIN = {"speculation": RequestSpeculation(enabled=False)}
TREE = {"tree": True, "num_speculative_tokens": 20}


class Trees(Drafter):
    """A drafter of trees whose second branch is accepted."""

    def __init__(self, *_: object) -> None:
        """Ignore all options."""

    def begin(self, sequence: SequenceState, num_drafted: int, feature: Tensor | None) -> None:
        """Do nothing at a sequence's start."""

    def propose(self, sequences: Sequence[SequenceState], counts: Sequence[int]) -> list[Draft | None]:
        return [Draft([1, 0, 0], [-1, -1, 1]) for _ in sequences]

    def forget(self, request_id: str) -> None:
        """Do nothing at a sequence's end."""


ADAPTERS = [Adapter(name=name, path=f"/{name}", digest=digest * 32) for name, digest in ("xa", "yb")]


def absent_model(num_layers: int, layer_windows: tuple[int, ...], with_adapters: bool = False) -> LoadedModel:
    group = replace(
        Group.uniform(TARGET, Segment(num_layers, 2, 16, torch.bfloat16)), layer_windows=layer_windows
    )
    model = qwen3(num_layers, hidden_size=eagle_files.WIDTH, vocab_size=eagle_files.VOCAB)
    adapters = absent_adapters(model) if with_adapters else None
    return LoadedModel(model, GPU, torch.bfloat16, group, eagle_files.VOCAB, 512, [], "", adapters=adapters)


def absent_adapters(model: PreTrainedModel) -> Adapters:
    """Return a model with `ADAPTERS`."""
    adapters = Adapters(adaptable(model), GPU, torch.bfloat16, 64)
    for each in ADAPTERS:
        adapters._put(next(adapters._numbers), each.path, AdapterFiles(RawAdapter(b"", b""), each.digest, {}))
        adapters.load(each.name, each.path, each.digest)
    return adapters


class Steps:
    """The steps of an engine as workers make it, with the default configuration except for speculation."""

    def __init__(
        self,
        gpu: AbsentGpu,
        patch: pytest.MonkeyPatch,
        speculative: SpeculativeConfig | None,
        loaded: LoadedModel,
        max_num_seqs: int,
    ) -> None:
        self.gpu = gpu
        self.num_asked = 0
        patch.setattr(cuda_attention, "triton_fault", lambda device: None)
        patch.setattr(cuda_runner, "graphs_for", lambda *_: CountedGraphs(gpu))
        patch.setattr(engine_module, "load_served", lambda *_, **__: loaded)
        patch.setattr(draft_model, "load_model", lambda _: absent_model(2, layer_windows=(0, 0)))
        room: dict[str, Any] = {"max_num_seqs": max_num_seqs, "kv_cache_memory_bytes": 16 << 20}
        config = ServeConfig(model="absent", speculative_config=speculative, **room)
        self.engine = Engine(config, speculate=BatchSpeculator)

    def ask(
        self, names: str, fields: dict[str, Any] | None = None, length: int = 45, **sampling: Any
    ) -> Steps:
        """Add requests with one-letter names and prompts of this length."""
        params = SamplingParams(**{"max_tokens": 100, "ignore_eos": True} | sampling)
        self.num_asked += len(names)
        for name in names:
            prompt = [1 + place % 3 for place in range(length)]
            self.engine.add(
                EngineRequest(request_id=name, prompt_token_ids=prompt, sampling=params, **(fields or {}))
            )
        return self

    def steady(self) -> int:
        """Return the tokens of a step after some others of all requests, which make what is made once."""
        begun: set[str] = set()
        while len(begun) < self.num_asked:
            begun |= {output.request_id for output in self.engine.step().outputs}
        for _ in range(6):
            self.engine.step()
        self.gpu.clear()
        return sum(len(output.token_ids) for output in self.engine.step().outputs)

    @property
    def draft_seconds(self) -> float:
        return self.engine.counters()['spec_decode_draft_seconds_total{method="eagle"}']

    @property
    def waits(self) -> int:
        """Return the waits, after checking that each was for tokens in one copy."""
        assert all(each.startswith("/engine/copies.py") for each in self.gpu.waits), self.gpu.waits
        return self.gpu.waits.total()


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Steps]]:
    """Return a function that makes an engine with these options of the `SpeculativeConfig`, if any."""
    with absent_gpu() as gpu:

        def make(
            with_adapters: bool = False,
            loaded: LoadedModel | None = None,
            max_num_seqs: int = 4,
            **options: Any,
        ) -> Steps:
            speculative = SpeculativeConfig(**options) if options else None
            loaded = loaded or absent_model(LAYERS, (), with_adapters)
            return Steps(gpu, monkeypatch, speculative, loaded, max_num_seqs)

        yield make


MakeSteps = Callable[..., Steps]


def ngram(drafted: int | None) -> dict[str, Any]:
    return {} if drafted is None else {"method": "ngram", "num_speculative_tokens": drafted}


@pytest.mark.parametrize(("sampling", "drafted"), [(GREEDY, None), (TOP_P, 0)], ids=["greedy", "top-p"])
def test_a_step_without_drafts(steps: MakeSteps, sampling: dict[str, Any], drafted: int | None) -> None:
    """The host waits only for its tokens, while the device already has the next step."""
    made = steps(**ngram(drafted)).ask("ab", **sampling)
    for _ in range(3):
        assert made.steady() == 2
        assert made.engine._launcher.is_ahead
        assert made.gpu.num_done < made.gpu.num_queued
        assert made.waits == 1
        assert made.gpu.launches["graph"] == 1
        assert made.gpu.uploads == 2  # the rows, and the sampler's inputs


def test_a_step_of_a_model_with_recurrent_layers(steps: MakeSteps) -> None:
    """Across a grid point, with copies of kept states."""
    made = steps(loaded=hybrid(), max_num_seqs=2).ask("ab", length=20, max_tokens=29, temperature=0.0)
    made.steady()
    for _ in range(8):
        made.gpu.clear()
        assert len(made.engine.step().outputs) == 2
        assert made.engine._launcher.is_ahead and made.gpu.num_done < made.gpu.num_queued
        assert (made.waits, made.gpu.launches["graph"]) == (1, 1)
    states = made.engine.blocks.states
    assert states is not None and states.entries


def test_a_step_launches_and_copies_as_much_for_any_number_of_rows(steps: MakeSteps) -> None:
    found = []
    for names in ("ab", "abcdefghijklmnop"):
        made = steps(max_num_seqs=16).ask(names, **TOP_P)
        assert made.steady() == len(names)
        found.append((dict(made.gpu.launches), made.gpu.uploads))
    assert found[0] == found[1]


MOST_CALLS = 60
"""Limit on calls of our Python functions for each row."""


@contextmanager
def counted_calls() -> Iterator[list[str]]:
    """Yield the list of names of our Python functions called so far."""
    calls: list[str] = []

    def note(frame: FrameType, event: str, argument: object) -> None:
        path = frame.f_code.co_filename.removeprefix(ROOT)  # a virtual environment may lie in the root
        if event == "call" and path.startswith(("/engine/", "/speculation/")):
            calls.append(frame.f_code.co_name)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        yield calls
    finally:
        sys.setprofile(before)


def test_a_row_takes_as_many_calls_after_any_context(steps: MakeSteps) -> None:
    counts = {}
    for names, length in (("abcd", 20), ("abcd", 400), ("abcdefghijklmnop", 20)):
        made = steps(max_num_seqs=16).ask(names, length=length, **GREEDY)
        made.steady()
        with counted_calls() as calls:
            made.engine.step()
        counts[len(names), length] = len(calls)
    assert abs(counts[4, 400] - counts[4, 20]) < 4, "not one more for each row"
    assert counts[16, 20] - counts[4, 20] <= 12 * MOST_CALLS


@pytest.mark.parametrize(("sampling", "drafted"), [(TOP_P, None), (GREEDY, 3)], ids=["rows", "drafts"])
def test_a_step_of_requests_with_adapters(
    steps: MakeSteps, sampling: dict[str, Any], drafted: int | None
) -> None:
    """Two adapters beside a request without: the same waits, launches and uploads as without adapters."""
    made = steps(with_adapters=True, **ngram(drafted))
    for name, adapter in zip("abc", [*ADAPTERS, None], strict=True):
        made.ask(name, {"adapter": adapter}, **sampling)
    for _ in range(3):
        assert made.steady() == 3 * (1 + (drafted or 0))
        assert {each.adapter for each in made.engine.sequences.values()} == {0, 1, 2}
        assert made.engine._launcher.is_ahead == (drafted is None)
        assert made.waits == 1
        assert made.gpu.launches["graph"] == 1 and not made.gpu.launches["shrink"]
        assert made.gpu.uploads == 2


@SAMPLING
def test_a_step_that_verifies_chains(steps: MakeSteps, sampling: dict[str, Any]) -> None:
    """Chains of prompt lookup, beside a request that drafts nothing."""
    made = steps(**ngram(3)).ask("a", **sampling).ask("b", PLAIN, **sampling)
    assert made.steady() == 4 + 1
    assert not made.engine._launcher.is_ahead
    assert made.waits == 1
    assert made.gpu.launches["graph"] == 1 and made.gpu.uploads == 2


@SAMPLING
def test_a_step_that_verifies_trees(steps: MakeSteps, sampling: dict[str, Any]) -> None:
    """The accepted path's KV is moved."""
    drafter = f"{__name__}:{Trees.__name__}"
    made = steps(method="custom", drafter=drafter, num_speculative_tokens=3, tree=True).ask("ab", **sampling)
    assert made.steady() == 2 * 3
    assert made.waits == 1
    assert made.gpu.launches["index_put_"] == 2
    assert made.gpu.uploads == 2 + 2


def heads_of(method: Method, folder: Path) -> str:
    if method == "medusa":
        heads = medusa_files.random_heads(3, 1, eagle_files.WIDTH, eagle_files.VOCAB)
        medusa_files.write_v1(folder, medusa_files.own_names(heads))
        return str(folder)
    return str(eagle_files.eagle3().write(folder))


@pytest.mark.parametrize(
    ("method", "verification", "sampling"),
    [
        ("eagle", "coupled", GREEDY),
        ("eagle", "standard", TOP_P),
        ("eagle", "block", TOP_P),
        ("medusa", "coupled", GREEDY),
        ("medusa", "standard", TOP_P),
    ],
)
def test_a_step_that_drafts_chains(
    steps: MakeSteps, method: Method, verification: Verification, sampling: dict[str, Any], tmp_path: Path
) -> None:
    """The drafted tokens arrive with the model's own. Medusa's heads draft them together."""
    options = {"method": method, "model": heads_of(method, tmp_path), "verification": verification}
    made = steps(**options, num_speculative_tokens=3).ask("ab", **sampling)
    by_chance = verification != "coupled"
    assert made.steady() == 2 * (1 if by_chance else 4)  # interpreted as bits, zeros accept nothing
    assert made.waits == 1
    if method == "eagle":
        assert made.gpu.launches["graph"] == 1 + 3
        assert made.gpu.uploads == 2 * (1 + 3) + by_chance  # of the nodes
        before = made.draft_seconds
        made.engine.step()
        assert made.draft_seconds - before == pytest.approx(DEVICE_MS / 1e3)


@pytest.mark.parametrize(
    ("options", "sampling"),
    [
        ({"method": "draft_model", "model": "absent"}, TOP_P),
        ({"method": "self_speculative", "skip_layers": [0]}, GREEDY),
    ],
    ids=["draft_model", "self_speculative"],
)
def test_a_step_that_a_model_drafts_for(
    steps: MakeSteps, options: dict[str, Any], sampling: dict[str, Any]
) -> None:
    """The batch also has a later request without a draft, and one that looks at its drafted tokens."""
    made = steps(**options, num_speculative_tokens=3).ask("a", **sampling).ask("b", PLAIN, **sampling)
    assert made.steady() == 4 + 1
    assert made.waits == 1
    assert made.gpu.launches["graph"] == 1 + 3
    if options["method"] == "self_speculative":
        speculator: Any = made.engine._speculator
        ours, own = speculator._loaded.model, speculator._drafters["self_speculative"]._loaded.model
        joined, shared = (each.model.layers[-1].mlp.up_proj.weight for each in (ours, own))
        assert joined.untyped_storage()._cdata == shared.untyped_storage()._cdata, "weights are there twice"
    made.ask("c", repetition_penalty=1.2)
    assert made.steady() == 4 + 1 + 4
    assert made.gpu.waits.total() == 3 + 1


@pytest.mark.parametrize(
    ("method", "verification", "sampling"),
    [("eagle", "standard", TOP_P), ("draft_model", "coupled", GREEDY), ("medusa", "standard", TOP_P)],
)
def test_a_step_that_drafts_trees(
    steps: MakeSteps, method: Method, verification: Verification, sampling: dict[str, Any], tmp_path: Path
) -> None:
    """Tokens and shapes arrive with the tokens of the step that verifies them."""
    options = {"method": method, "model": heads_of(method, tmp_path), "verification": verification}
    made = steps(**options, **TREE, max_speculative_tokens=3)
    assert method == "medusa" or made.gpu.launches["grow"] == made.gpu.launches["end"] == 1, "compiled first"
    assert method == "medusa" or made.gpu.launches["lay_out"] == 1
    assert made.gpu.launches["follow"] == (method == "eagle")
    num_accepted = 3 if method == "medusa" else 1  # all nodes are children of node 0: a star
    expected = 1 if verification == "standard" else 1 + num_accepted
    assert made.ask("ab", **sampling).steady() == 2 * expected
    assert made.waits == 1


def test_trees_beside_a_request_that_looks_at_them(steps: MakeSteps, tmp_path: Path) -> None:
    """The host reads them before verification, and waits once for that."""
    made = steps(method="eagle", model=heads_of("eagle", tmp_path), **TREE, max_speculative_tokens=3)
    made.ask("a", **GREEDY).ask("b", **GREEDY, repetition_penalty=1.2).steady()
    assert made.waits == 1 + 1


# --- choices and verdicts alone -----------------------------------------------------------------------

CHAIN, TREE_DRAFT = Draft([5, 6, 7]), Draft([5, 6, 7, 8], [-1, -1, 1, 1])
SAMPLED = ["scan", "sift"]
EDITS = {
    "repetition_penalty": 1.2,
    "frequency_penalty": 0.5,
    "logit_bias": {3: 1.0},
    "allowed_token_ids": [*range(99)],
    "banned_token_sequences": [[4], [1, 2]],
    "min_tokens": 5,
}


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[AbsentGpu]:
    monkeypatch.setattr(cuda_attention, "triton_fault", lambda device: None)
    with absent_gpu() as gpu:
        yield gpu


def sequence_with(draft: Draft | None, **sampling: Any) -> SequenceState:
    params = SamplingParams(max_tokens=50, **sampling)
    request = EngineRequest(request_id=str(id(draft)), prompt_token_ids=[1, 2, 3], sampling=params)
    sequence = SequenceState(request, 0)
    sequence.append(4)
    sequence.draft = draft
    return sequence


def kernels_of(gpu: AbsentGpu, sequences: list[SequenceState], rule: Verification = "coupled") -> list[str]:
    """Return the kernels of a second verification, for whose results the host waits in one copy."""
    rows = sum(1 + (len(each.draft.token_ids) if each.draft else 0) for each in sequences)
    logits, sampler = torch.empty(rows, 512, dtype=torch.bfloat16, device=GPU), Sampler(512, GPU, [2])
    for _ in range(2):
        gpu.clear()
        assert len(verify(rule, sequences, logits, sampler)) == len(sequences)
    ((line, times),) = gpu.waits.items()
    assert times == 1 and line.startswith("/engine/copies.py") and line.endswith("an event")
    assert set(gpu.launches.values()) == {1}
    return [name for name in gpu.launches if name != "cat"]  # the tokens after probes


@pytest.mark.parametrize(
    ("sampling", "kernels"),
    [
        (GREEDY, ["scan"]),
        ({"temperature": 0.8}, SAMPLED),
        ({"top_k": 20, "top_p": 0.95, "min_p": 0.01}, SAMPLED),
        (EDITS, SAMPLED),
    ],
    ids=["greedy", "temperature", "all filters", "edits"],
)
def test_the_kernels_of_a_choice(gpu: AbsentGpu, sampling: dict[str, Any], kernels: list[str]) -> None:
    drafts = (None, CHAIN, TREE_DRAFT)
    assert kernels_of(gpu, [sequence_with(draft, **sampling) for draft in drafts]) == kernels


def test_log_probabilities_come_in_a_second_copy(gpu: AbsentGpu) -> None:
    sampler, logits = Sampler(512, GPU, [2]), torch.empty(9, 512, dtype=torch.bfloat16, device=GPU)
    for _ in range(2):
        gpu.clear()
        verify("coupled", [sequence_with(TREE_DRAFT, logprobs=3), sequence_with(CHAIN)], logits, sampler)
    ((line, times),) = gpu.waits.items()
    assert times == 2 and line.startswith("/engine/copies.py")


@pytest.mark.parametrize("rule", ["standard", "block"])
def test_rejection_sampling_waits_once(gpu: AbsentGpu, rule: Verification) -> None:
    drawn = Draft(CHAIN.token_ids, distributions=torch.empty(3, 512, device=GPU))
    drafts = (CHAIN, TREE_DRAFT, drawn, None, Draft([5, 6], probes=[0b101]))
    sequences = [sequence_with(draft, temperature=0.8) for draft in drafts]
    assert kernels_of(gpu, [*sequences, sequence_with(Draft([5, 6, 7]), **GREEDY)], rule) == [
        *SAMPLED,
        "recover",
    ]


def test_every_kernel_is_compiled_at_the_start(gpu: AbsentGpu) -> None:
    sampler = Sampler(512, GPU, [2])
    sampler.warm_up(torch.bfloat16)
    assert [gpu.launches[name] for name in SAMPLED] == [5, 4]
    gpu.clear()
    prepare("block", sampler, torch.bfloat16)
    assert [gpu.launches[name] for name in (*SAMPLED, "recover")] == [2, 2, 2], "plain, edited"
    gpu.clear()
    prepare("coupled", sampler, torch.bfloat16)
    assert not gpu.launches
