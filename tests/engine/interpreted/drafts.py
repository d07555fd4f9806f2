"""Chains drafted on the device by replayed steps equal chains that the host draws by launched steps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from engine.batch.runner import ForwardOutput, Runner, Step
from engine.batch.step_inputs import SequenceRows
from engine.copies import Downloader
from engine.devices.cuda.attention.backend import TritonBackend
from engine.devices.cuda.buckets import Buckets
from engine.devices.cuda.decoder import CudaDecoder
from engine.devices.cuda.runner import CudaRunner
from engine.devices.torch.program import ProgramForward, TorchProgram
from engine.devices.torch.runner import Modules, TorchRunner
from engine.kv.layout import TARGET, Group, PoolLayout, Segment
from engine.kv.pool import KVPool
from engine.model.describe import describe
from engine.sampler import Sampler
from engine.step.draft import Draft, LateTokens
from engine.step.sequence import SequenceState
from protocol.requests import EngineRequest
from protocol.sampling import SamplingParams
from protocol.speculation import SpeculativeConfig
from speculation import tree_drafting
from speculation.chains import ChainDrafting, DraftRows
from speculation.eagle import Head, HeadShape, head_program
from speculation.self_speculative import with_layers
from speculation.tree_drafting import TreeDrafting
from tests.engine.interpreted.graphs import BLOCK, CPU, KINDS, NUM_BLOCKS, chain, made_model, made_pool, sides
from tests.engine.interpreted.recorder import RecordedGraphs

COUNTS = [3, 2]
PARAMS: list[dict[str, Any]] = [{"temperature": 0.8, "logit_bias": {5: 2.0}}, {"temperature": 0.0}]


def sequences_with(params: list[dict[str, Any]]) -> list[SequenceState]:
    sequences = []
    for number, options in enumerate(params):
        sampling = SamplingParams(max_tokens=50, seed=number, **options)
        prompt = [7 * number + place for place in range(5 + 9 * number)]
        request = EngineRequest(request_id=str(number), prompt_token_ids=prompt, sampling=sampling)
        sequence = SequenceState(request, number)
        sequence.sequence_blocks = SimpleNamespace(blocks=[list(range(6 * number, 6 * number + 2))])
        sequences.append(sequence)
    return sequences


def test_a_chain_of_a_model() -> None:
    sequences = sequences_with(PARAMS)
    rows = [
        SequenceRows(each.token_ids[-unread:], len(each.token_ids) - unread, each.held.blocks)
        for each, unread in zip(sequences, (1, 2), strict=True)
    ]
    eager, replayed, graphs = sides(Buckets([2], [1, 2], [2], trees=False))
    drafts: list[list[Draft]] = []
    options = SpeculativeConfig(method="draft_model", model="", verification="standard")
    for side in (eager, replayed):
        drafting = ChainDrafting(side.runner, options, draft_rows, Sampler(60, CPU, []))
        drafting._stays_on_device = side is replayed
        drafts.append(drafting.draft(sequences, rows, COUNTS))
        assert all((draft.late is None) == (side is eager) for draft in drafts[-1])
    for expected, found, count in zip(*drafts, COUNTS, strict=True):
        assert found.token_ids == expected.token_ids and len(found.token_ids) == count
        assert found.distributions is None or torch.equal(found.distributions, expected.distributions)
    assert [each.distributions is None for each in drafts[1]] == [False, True]
    assert sum(graph.num_replays for graph in graphs.graphs) == 3
    assert torch.equal(replayed.pool.memory, eager.pool.memory)


@pytest.mark.parametrize("counts", [[12, 5], [3, 1]])
def test_trees_of_a_model(counts: list[int]) -> None:
    """Trees grown on the device equal the host's, and so does the KV of the nodes that ran."""
    sequences = sequences_with(PARAMS)
    rows = [SequenceRows(each.token_ids, 0, each.held.blocks) for each in sequences]
    options = SpeculativeConfig(method="draft_model", model="", tree=True, max_speculative_tokens=4)
    drafts = []
    by_host, by_device, _ = sides(Buckets([2], [1], [2], trees=False))
    for side in (by_host, by_device):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tree_drafting, "stays_on_device", lambda *_, on=side is by_device: on)
            drafting = TreeDrafting(
                side.runner, options, draft_rows, Sampler(60, CPU, []), block_size=BLOCK, recurs=False
            )
        drafts.append(drafting.draft(sequences, rows, counts))
    for expected, found, count in zip(*drafts, counts, strict=True):
        assert expected is not None and found is not None
        assert found.late is not None and len(found.ids) == count
        assert found.token_ids[: found.num_nodes] == expected.token_ids
        assert found.parents == expected.parents
    assert max(draft.depth for draft in drafts[1] if draft is not None) > 2
    kv = (side.pool.memory.view(torch.float32) for side in (by_host, by_device))
    torch.testing.assert_close(*kv, atol=1e-5, rtol=1e-5)


def draft_rows(sequence: SequenceState, rows: DraftRows) -> SequenceRows:
    root = sequence.position - 1
    return SequenceRows(rows.token_ids, root + rows.first, sequence.held.blocks, rows.masks, root)


def test_some_of_a_models_layers() -> None:
    """They use their places in the model's pool, and no weight is stored twice."""
    model, pools = made_model(num_hidden_layers=4, layer_types=KINDS * 2), [made_pool(4) for _ in range(2)]
    backends = [TritonBackend(pool.layers(TARGET)) for pool in pools]
    part = with_layers(model, [0, 3])
    modules = TorchRunner(Modules(part, backends[0]), backends[0], CPU, "off", products="")
    expected = modules.run(Step(UNREAD, [0, 2])).logits
    CudaDecoder(describe(model), backends[1], 128)
    part = with_layers(model, [0, 3])
    decoder = CudaDecoder(describe(part), backends[1], 128)
    found = CudaRunner(decoder, backends[1], CPU, "", Buckets([2], [2], [2], trees=False)).run(
        Step(UNREAD, [0, 2])
    )
    torch.testing.assert_close(found.logits, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(*(pool.memory.view(torch.float32) for pool in pools), atol=1e-5, rtol=1e-5)
    for own, whole in (
        (part.model.layers[1], model.model.layers[3]),
        (part.model.layers[0], model.model.layers[0]),
    ):
        assert own.mlp.up_proj.weight.data_ptr() == whole.mlp.up_proj.weight.data_ptr()
        assert own.self_attn.k_proj.weight.data_ptr() == whole.self_attn.k_proj.weight.data_ptr()


UNREAD = [chain(0, 10, 3), chain(1, 28, 5, 6)]


def test_drafts_that_depend_on_earlier_tokens_are_drawn_by_the_host() -> None:
    sequences = sequences_with([*PARAMS, {"presence_penalty": 0.5}])
    rows = [SequenceRows(each.token_ids[-1:], each.position - 1, each.held.blocks) for each in sequences]
    options = SpeculativeConfig(method="draft_model", model="")
    runner = sides(Buckets([4], [1], [2], trees=False))[0].runner
    drafting = ChainDrafting(runner, options, draft_rows, Sampler(60, CPU, []))
    drafting._stays_on_device = True
    assert all(draft.late is None for draft in drafting.draft(sequences, rows, [2, 2, 1]))
    assert all(draft.late is not None for draft in drafting.draft(sequences[:2], rows[:2], COUNTS))


SHAPE = HeadShape(
    is_eagle3=True,
    captured=(0, 1),
    feature_size=48,
    hidden_size=24,
    intermediate_size=32,
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    max_positions=128,
    rope={"rope_type": "default", "rope_theta": 5000.0},
)


def test_steps_of_a_head() -> None:
    """Launched and replayed with any number of rows, some from the step before."""
    torch.manual_seed(1)
    described = head_program(Head(SHAPE).eval(), nn.Embedding(60, 24), nn.Linear(24, 60, bias=False))
    head = TorchProgram(described, SHAPE.max_positions)
    graphs: Any = RecordedGraphs()
    group = Group.uniform(TARGET, Segment(1, 1, 16, torch.float32))
    pools = [KVPool(PoolLayout((group,), BLOCK), NUM_BLOCKS, CPU, None) for _ in range(2)]
    for pool in pools:
        pool.memory.view(torch.float32).fill_(0.5)
    backends = [TritonBackend(pool.layers(TARGET)) for pool in pools]
    plain = TorchRunner(ProgramForward(head, backends[0]), backends[0], CPU, "off", products="")
    buckets = Buckets([2], [1, 3], [2], trees=False, first_keys=True)
    replayed = CudaRunner(ProgramForward(head, backends[1]), backends[1], CPU, "", buckets, graphs)
    replayed.warm_up()
    blocks = [[[3, 1]], [[2, 5]]]
    steps: list[tuple[list[SequenceRows], list[int]]] = [
        ([SequenceRows([4, 5, 6], 1, blocks[0], first_key=1), SequenceRows([9], 20, blocks[1])], [2, 3]),
        (
            [SequenceRows([7], 4, blocks[0], first_key=1), SequenceRows([8], 21, blocks[1], first_key=19)],
            [0, 1],
        ),
        ([SequenceRows([3], 5, blocks[0], first_key=1)], [0]),
        ([SequenceRows(list(range(8)), 6, blocks[0], first_key=2)], [7]),
    ]
    runners: list[Runner] = [plain, replayed]
    for batch, rows in steps:
        before = torch.randn(sum(len(each.token_ids) for each in batch), 24)
        same(*(runner.run(Step(batch, rows, hidden=before)) for runner in runners))
    assert sum(graph.num_replays for graph in graphs.graphs) == 3
    last = [runner.run(Step(*steps[1], hidden=torch.ones(2, 24))) for runner in (plain, replayed)]
    named = [SequenceRows([~(1 - number)], 22, blocks[number], first_key=1) for number in range(2)]
    chosen = LateTokens(torch.tensor([11, 12]), Downloader(CPU))
    ahead = [
        runner.run(Step(named, [0, 1], hidden=output.hidden), chosen.fill)
        for runner, output in zip((plain, replayed), last, strict=True)
    ]
    same(*ahead)
    known = [SequenceRows([12 - number], 22, blocks[number], first_key=1) for number in range(2)]
    same(plain.run(Step(known, [0, 1], hidden=last[0].hidden)), ahead[1])
    named = [SequenceRows([~number], 23, blocks[number], first_key=1) for number in range(2)]
    late = LateTokens(torch.tensor([13, 14]), Downloader(CPU))
    step = Step(named, [0, 1], hidden=torch.ones(2, 24))
    runs = [runner.run(step, late.fill) for runner in (plain, replayed)]
    same(*runs)
    known = [SequenceRows([13 + number], 23, blocks[number], first_key=1) for number in range(2)]
    same(plain.run(Step(known, [0, 1], hidden=torch.ones(2, 24))), runs[1])


def same(expected: ForwardOutput, found: ForwardOutput) -> None:
    for theirs, ours in zip(expected, found, strict=True):
        assert isinstance(theirs, Tensor) and isinstance(ours, Tensor)
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
