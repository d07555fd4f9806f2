"""Whole steps of an engine on a CUDA device: the waits of the host and its copies to the device.

Uses `absent_gpu`, on which all tokens are 0, so drafts of zeros are accepted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
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
from engine.step.draft import Draft
from engine.step.sequence import SequenceState
from protocol.config import ServeConfig
from protocol.requests import Adapter, EngineRequest
from protocol.sampling import SamplingParams
from protocol.speculation import Method, RequestSpeculation, SpeculativeConfig, Verification
from speculation import draft_model
from speculation.drafter import Drafter
from speculation.speculator import BatchSpeculator
from tests.engine.absent_gpu import DEVICE_MS, GPU, AbsentGpu, absent_gpu
from tests.engine.step.test_host_waits import CountedGraphs, qwen3
from tests.speculation import eagle_files, medusa_files

LAYERS = 8
GREEDY, TOP_P = {"temperature": 0.0}, {"temperature": 0.8, "top_p": 0.9}
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


def absent_model(
    num_layers: int, layer_windows: tuple[int, ...] = (), with_adapters: bool = False
) -> LoadedModel:
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
        with_adapters: bool = False,
    ) -> None:
        self.gpu = gpu
        patch.setattr(cuda_attention, "triton_fault", lambda device: None)
        patch.setattr(cuda_runner, "graphs_for", lambda *_: CountedGraphs(gpu))
        patch.setattr(engine_module, "load_served", lambda *_, **__: absent_model(LAYERS, (), with_adapters))
        patch.setattr(draft_model, "load_model", lambda _: absent_model(2, layer_windows=(0, 0)))
        config = ServeConfig(
            model="absent", max_num_seqs=4, kv_cache_memory_bytes=16 << 20, speculative_config=speculative
        )
        self.engine = Engine(config, speculate=BatchSpeculator)

    def ask(self, names: str, fields: dict[str, Any] | None = None, **sampling: Any) -> Steps:
        """Add requests with one-letter names."""
        params = SamplingParams(max_tokens=200, ignore_eos=True, **sampling)
        for name in names:
            prompt = [1, 2, 3] * 15
            self.engine.add(
                EngineRequest(request_id=name, prompt_token_ids=prompt, sampling=params, **(fields or {}))
            )
        return self

    def steady(self) -> int:
        """Return the tokens of a step after some others, which make what is made once."""
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

        def make(with_adapters: bool = False, **options: Any) -> Steps:
            speculative = SpeculativeConfig(**options) if options else None
            return Steps(gpu, monkeypatch, speculative, with_adapters)

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
