"""From a CUDA step's rows to its verdicts the host waits once, for the tokens (see `absent_gpu`)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is for Linux")

from engine.batch.runner import Step
from engine.batch.step_inputs import SequenceRows
from engine.devices.cuda.attention.backend import TritonBackend
from engine.devices.cuda.decoder import CudaDecoder
from engine.kv.layout import TARGET
from engine.model.describe import describe
from engine.sampler import Sampler
from engine.sampler import sampler as choosing
from engine.step.draft import Draft
from engine.step.sequence import SequenceState
from protocol.requests import EngineRequest
from protocol.sampling import SamplingParams
from protocol.speculation import Verification
from speculation.verification.verify import prepare, verify
from tests.engine.absent_gpu import GPU, AbsentGpu, absent_gpu
from tests.engine.step.test_host_waits import pool_of, qwen3, runner_of

CHAIN = Draft([5, 6, 7])
TREE = Draft([5, 6, 7, 8], [-1, -1, 1, 1])
SAMPLED = ["scan", "sift"]
GREEDY = ["scan"]
EDITS = {
    "repetition_penalty": 1.2,
    "frequency_penalty": 0.5,
    "logit_bias": {3: 1.0},
    "allowed_token_ids": [*range(99)],
    "banned_token_sequences": [[4], [1, 2]],
    "min_tokens": 5,
}


@pytest.fixture(autouse=True)
def triton_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choosing, "backend_fault", lambda name, device: None)


def sequence_with(number: int, draft: Draft | None, **params: Any) -> SequenceState:
    sampling = SamplingParams(max_tokens=50, seed=number, **params)
    request = EngineRequest(request_id=str(number), prompt_token_ids=[1, 2, 3], sampling=sampling)
    sequence = SequenceState(request, number)
    sequence.append(4)
    sequence.draft = draft
    return sequence


def rows_of(sequence: SequenceState, block: int) -> SequenceRows:
    draft = sequence.draft
    tokens = [*sequence.token_ids[-1:], *(draft.token_ids if draft else [])]
    masks = draft.masks() if draft else None
    return SequenceRows(tokens, len(sequence.token_ids) - 1, [[block]], masks)


def sampling_of(gpu: AbsentGpu, sequences: list[SequenceState]) -> list[str]:
    """Return the kernels after the second step, after checking that the host waited only for tokens."""
    backend = TritonBackend(pool_of().layers(TARGET))
    runner = runner_of(CudaDecoder(describe(qwen3()), backend, 64), backend)
    sampler = Sampler(512, GPU, [2])
    rows = [rows_of(sequence, 1 + number) for number, sequence in enumerate(sequences)]
    count = sum(len(each.token_ids) for each in rows)
    for _ in range(2):
        gpu.clear()
        logits = runner.run(Step(rows, range(count))).logits
        assert not gpu.waits, "\n".join(gpu.waits)
        gpu.launches.clear()
        verdicts = verify("coupled", sequences, logits, sampler)
        assert len(verdicts) == len(sequences)
        ((line, times),) = gpu.waits.items()
        assert times == 1 and line.startswith("/engine/copies.py") and line.endswith("an event")
    return [name for name, times in gpu.launches.items() for _ in range(times)]


@pytest.mark.parametrize("draft", [None, CHAIN, TREE], ids=["next token", "chain", "tree"])
@pytest.mark.parametrize(
    ("params", "kernels"),
    [
        ({"temperature": 0.0}, GREEDY),
        ({"temperature": 0.8}, SAMPLED),
        ({"temperature": 0.8, "top_p": 0.9}, SAMPLED),
        ({"top_k": 20, "top_p": 0.95, "min_p": 0.01}, SAMPLED),
        (EDITS, SAMPLED),
    ],
    ids=["greedy", "temperature", "top-p", "all filters", "edits"],
)
def test_a_step_waits_once(draft: Draft | None, params: dict[str, Any], kernels: list[str]) -> None:
    with absent_gpu() as gpu:
        assert sampling_of(gpu, [sequence_with(number, draft, **params) for number in range(2)]) == kernels


def test_a_mixed_step_waits_once() -> None:
    with absent_gpu() as gpu:
        sequences = [
            sequence_with(0, None, temperature=0.0),
            sequence_with(1, CHAIN, top_p=0.9),
            sequence_with(2, TREE, **EDITS),
        ]
        assert sampling_of(gpu, sequences) == SAMPLED


def test_log_probabilities_come_in_a_second_copy() -> None:
    with absent_gpu() as gpu:
        sampler = Sampler(512, GPU, [2])
        sequences = [sequence_with(0, TREE, logprobs=3), sequence_with(1, CHAIN)]
        for _ in range(2):
            gpu.clear()
            verify("coupled", sequences, torch.empty(9, 512, dtype=torch.bfloat16, device=GPU), sampler)
        ((line, times),) = gpu.waits.items()
    assert times == 2 and line.startswith("/engine/copies.py")


@pytest.mark.parametrize("rule", ["standard", "block"])
def test_rejection_sampling_waits_once(rule: Verification) -> None:
    with absent_gpu() as gpu:
        sampler = Sampler(512, GPU, [2])
        drawn = Draft(CHAIN.token_ids, distributions=torch.empty(3, 512, device=GPU))
        drafts = (CHAIN, TREE, drawn, None, Draft([5, 6], probes=[0b101]))
        sequences = [sequence_with(number, draft, temperature=0.8) for number, draft in enumerate(drafts)]
        sequences.append(sequence_with(5, CHAIN, temperature=0.0))
        logits = torch.empty(4 + 5 + 4 + 1 + 3 + 4, 512, dtype=torch.bfloat16, device=GPU)
        for _ in range(2):
            gpu.clear()
            assert len(verify(rule, sequences, logits, sampler)) == len(sequences)
    ((line, times),) = gpu.waits.items()
    assert times == 1 and line.startswith("/engine/copies.py") and line.endswith("an event")
    launched = [name for name in gpu.launches if name != "cat"]  # the tokens after probes
    assert launched == [*SAMPLED, "recover"] and set(gpu.launches.values()) == {1}


def test_verification_is_compiled_at_the_start() -> None:
    with absent_gpu() as gpu:
        sampler = Sampler(512, GPU, [2])
        prepare("block", sampler, torch.bfloat16)
        assert [gpu.launches[name] for name in (*SAMPLED, "recover")] == [2, 2, 2], "plain, edited"
        gpu.clear()
        prepare("coupled", sampler, torch.bfloat16)
    assert not gpu.launches


def test_every_kernel_is_compiled_at_the_start() -> None:
    with absent_gpu() as gpu:
        Sampler(512, GPU, [2]).warm_up(torch.bfloat16)
    assert [gpu.launches[name] for name in SAMPLED] == [5, 4]
