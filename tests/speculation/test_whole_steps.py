"""Whole steps of an engine on a CUDA device: the waits of the host and its copies to the device.

Uses `absent_gpu`, on which all tokens are 0, so drafts of zeros are accepted.
"""

from __future__ import annotations

from collections.abc import Sequence
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
RULES = pytest.mark.parametrize(
    ("verification", "sampling"), [("coupled", GREEDY), ("standard", TOP_P), ("block", TOP_P)]
)


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


def absent_model(num_layers: int, sights: tuple[int, ...] = (), with_adapters: bool = False) -> LoadedModel:
    group = replace(Group.uniform(TARGET, Segment(num_layers, 2, 16, torch.bfloat16)), sights=sights)
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
    """The steps of an engine as workers make it, with the default configuration except for `speculative`."""

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
        patch.setattr(draft_model, "load_model", lambda _: absent_model(2, sights=(0, 0)))
        config = ServeConfig(
            model="absent", max_num_seqs=4, kv_cache_memory_bytes=16 << 20, speculative_config=speculative
        )
        self.engine = Engine(config, speculate=BatchSpeculator)

    def ask(
        self,
        name: str,
        speculation: RequestSpeculation | None = None,
        adapter: Adapter | None = None,
        **sampling: Any,
    ) -> None:
        params = SamplingParams(max_tokens=200, ignore_eos=True, **sampling)
        prompt = [1, 2, 3] * 15
        self.engine.add(
            EngineRequest(
                request_id=name,
                prompt_token_ids=prompt,
                sampling=params,
                speculation=speculation,
                adapter=adapter,
            )
        )

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


@SAMPLING
@pytest.mark.parametrize("drafted", [None, 0], ids=["by default", "with drafts for none"])
def test_a_step_without_drafts(
    sampling: dict[str, Any], drafted: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host waits only for its tokens, while the device already has the next step."""
    options = None if drafted is None else SpeculativeConfig(method="ngram", num_speculative_tokens=drafted)
    with absent_gpu() as gpu:
        steps = Steps(gpu, monkeypatch, options)
        for name in "ab":
            steps.ask(name, **sampling)
        for _ in range(3):
            assert steps.steady() == 2
            assert steps.engine._launcher.is_ahead
            assert gpu.num_done < gpu.num_queued
            assert steps.waits == 1
            assert gpu.launches["graph"] == 1
            assert gpu.uploads == 2  # the rows, and the sampler's inputs


@SAMPLING
@pytest.mark.parametrize("drafted", [None, 3], ids=["decode rows", "drafts to verify"])
def test_a_step_of_requests_with_adapters(
    sampling: dict[str, Any], drafted: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two adapters beside a request without: waits, launches and uploads equal those of a step without
    adapters.
    """
    options = None if drafted is None else SpeculativeConfig(method="ngram", num_speculative_tokens=drafted)
    with absent_gpu() as gpu:
        steps = Steps(gpu, monkeypatch, options, with_adapters=True)
        for name, adapter in zip("abc", [*ADAPTERS, None], strict=True):
            steps.ask(name, adapter=adapter, **sampling)
        for _ in range(3):
            assert steps.steady() == 3 * (1 + (drafted or 0))
            assert {each.adapter for each in steps.engine.sequences.values()} == {0, 1, 2}
            assert steps.engine._launcher.is_ahead == (drafted is None)
            assert steps.waits == 1
            assert gpu.launches["graph"] == 1 and not gpu.launches["shrink"]
            assert gpu.uploads == 2


@SAMPLING
def test_a_step_that_verifies_chains(sampling: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Chains of prompt lookup, beside a request that drafts nothing."""
    options = SpeculativeConfig(method="ngram", num_speculative_tokens=3)
    with absent_gpu() as gpu:
        steps = Steps(gpu, monkeypatch, options)
        steps.ask("a", **sampling)
        steps.ask("b", RequestSpeculation(enabled=False), **sampling)
        assert steps.steady() == 4 + 1
        assert not steps.engine._launcher.is_ahead
        assert steps.waits == 1
        assert gpu.launches["graph"] == 1 and gpu.uploads == 2


@SAMPLING
def test_a_step_that_verifies_trees(sampling: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The accepted path's KV is moved."""
    drafter = f"{__name__}:{Trees.__name__}"
    options = SpeculativeConfig(method="custom", drafter=drafter, num_speculative_tokens=3, tree=True)
    with absent_gpu() as gpu:
        steps = Steps(gpu, monkeypatch, options)
        for name in "ab":
            steps.ask(name, **sampling)
        assert steps.steady() == 2 * 3
        assert steps.waits == 1
        assert gpu.launches["index_put_"] == 2
        assert gpu.uploads == 2 + 2


@RULES
def test_a_step_that_drafts_chains(
    sampling: dict[str, Any], verification: Verification, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A head's chains by each rule. The drafted tokens arrive with the model's own."""
    head = eagle_files.eagle3().write(tmp_path / "head")
    options = SpeculativeConfig(
        method="eagle", model=str(head), num_speculative_tokens=3, verification=verification
    )
    by_chance = verification != "coupled" and sampling["temperature"] > 0
    with absent_gpu() as gpu:
        steps = Steps(gpu, monkeypatch, options)
        for name in "ab":
            steps.ask(name, **sampling)
        assert steps.steady() == 2 * (1 if by_chance else 4)  # interpreted as bits, zeros accept nothing
        assert steps.waits == 1
        assert gpu.launches["graph"] == 1 + 3
        assert gpu.uploads == 2 * (1 + 3) + by_chance  # of the nodes
        before = steps.draft_seconds
        steps.engine.step()
        assert steps.draft_seconds - before == pytest.approx(DEVICE_MS / 1e3)


@RULES
def test_a_step_that_drafts_at_once(
    sampling: dict[str, Any], verification: Verification, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Medusa's heads draft a chain's tokens together."""
    options = SpeculativeConfig(
        method="medusa",
        model=heads_of("medusa", tmp_path),
        num_speculative_tokens=3,
        verification=verification,
    )
    by_chance = verification != "coupled" and sampling["temperature"] > 0
    with absent_gpu() as gpu:
        steps = Steps(gpu, monkeypatch, options)
        for name in "ab":
            steps.ask(name, **sampling)
        assert steps.steady() == 2 * (1 if by_chance else 4)
        assert steps.waits == 1


@SAMPLING
@pytest.mark.parametrize("method", ["draft_model", "self_speculative"])
def test_a_step_that_a_model_drafts_for(
    sampling: dict[str, Any], method: Method, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The batch also has a later request without a draft, and one that looks at its drafted tokens."""
    if method == "draft_model":
        options = SpeculativeConfig(method=method, model="absent", num_speculative_tokens=3)
    else:
        options = SpeculativeConfig(method=method, skip_layers=[0], num_speculative_tokens=3)
    with absent_gpu() as gpu:
        steps = Steps(gpu, monkeypatch, options)
        steps.ask("a", **sampling)
        steps.ask("b", RequestSpeculation(enabled=False), **sampling)
        assert steps.steady() == 4 + 1
        assert steps.waits == 1
        assert gpu.launches["graph"] == 1 + 3
        steps.ask("c", repetition_penalty=1.2)
        assert steps.steady() == 4 + 1 + 4
        assert gpu.waits.total() == 3 + 1


def heads_of(method: Method, folder: Path) -> str:
    if method == "medusa":
        heads = medusa_files.random_heads(3, 1, eagle_files.WIDTH, eagle_files.VOCAB)
        medusa_files.write_v1(folder, medusa_files.own_names(heads))
        return str(folder)
    return str(eagle_files.eagle3().write(folder))


@pytest.mark.parametrize(
    ("method", "verification", "sampling"),
    [
        ("eagle", "standard", TOP_P),
        ("draft_model", "coupled", TOP_P),
        ("draft_model", "standard", GREEDY),
        ("medusa", "coupled", GREEDY),
        ("medusa", "standard", TOP_P),
    ],
)
def test_a_step_that_drafts_trees(
    method: Method,
    verification: Verification,
    sampling: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Tokens and shapes arrive with the tokens of the step that verifies them."""
    options = SpeculativeConfig(
        method=method,
        model=heads_of(method, tmp_path),
        tree=True,
        num_speculative_tokens=20,
        max_speculative_tokens=3,
        verification=verification,
    )
    by_chance = verification == "standard" and sampling["temperature"] > 0
    num_accepted = 3 if method == "medusa" else 1  # all nodes are children of node 0: a star
    with absent_gpu() as gpu:
        steps = Steps(gpu, monkeypatch, options)
        for name in "ab":
            steps.ask(name, **sampling)
        assert steps.steady() == 2 * (1 if by_chance else 1 + num_accepted)
        assert steps.waits == 1


@pytest.mark.parametrize("method", ["eagle", "draft_model"])
def test_tree_kernels_are_compiled_first(
    method: Method, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = SpeculativeConfig(
        method=method, model=heads_of(method, tmp_path), tree=True, num_speculative_tokens=20
    )
    with absent_gpu() as gpu:
        Steps(gpu, monkeypatch, options)
        assert gpu.launches["grow"] == gpu.launches["lay_out"] == gpu.launches["end"] == 1
        assert gpu.launches["follow"] == (method == "eagle")


def test_trees_beside_a_request_that_looks_at_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host reads them before verification, and waits once for that."""
    options = SpeculativeConfig(
        method="eagle",
        model=heads_of("eagle", tmp_path),
        tree=True,
        num_speculative_tokens=20,
        max_speculative_tokens=3,
    )
    with absent_gpu() as gpu:
        steps = Steps(gpu, monkeypatch, options)
        steps.ask("a", temperature=0.0)
        steps.ask("b", temperature=0.0, repetition_penalty=1.2)
        steps.steady()
        assert steps.waits == 1 + 1
