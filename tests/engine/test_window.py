"""Models whose layers all attend within a sliding window keep no blocks behind it, and give equal tokens."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from transformers import PreTrainedModel

from engine.block_manager import BlockManager
from engine.engine import Engine
from engine.sequence_blocks import SequenceBlocks
from protocol.errors import ConfigError
from protocol.outputs import TokenOutput
from protocol.speculation import SpeculativeConfig
from protocol.window import TILE, Window
from speculation.speculator import speculate
from tests.e2e.architectures import SLIDING_WINDOW, write_model
from tests.engine.fake_pool import FakePool
from tests.engine.test_engine import ask, assert_empty, prompt_of, run, tiny_engine, tokens
from tests.engine.windowed import ask_crowds, blocks_from_disk, cached, num_used, poisoned_run
from tests.speculation import scripted
from tests.worker.tiny_model import VOCAB_SIZE, assert_greedy, greedy, load

BUDGET = 40
BLOCK_BYTES = 3 * 2 * 16 * 2 * 16 * 4
"""Of 16 tokens."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_model("mistral", folder)
    return folder


@pytest.fixture(scope="module")
def reference(folder: Path) -> PreTrainedModel:
    return load(folder)


@pytest.fixture
def make_engine(folder: Path) -> Callable[..., Engine]:
    def make(num_blocks: int = 64, **options: Any) -> Engine:
        bounds = {"max_num_batched_tokens": BUDGET, "max_num_seqs": 6}
        return tiny_engine(folder, **bounds | {"kv_cache_memory_bytes": num_blocks * BLOCK_BYTES} | options)

    return make


@pytest.mark.parametrize("backend", ["cpu", "torch"])
@pytest.mark.parametrize("block_size", [8, 16, 32, 128])
def test_a_sequence_has_the_blocks_of_its_window(
    make_engine: Callable[..., Engine], reference: PreTrainedModel, block_size: int, backend: str
) -> None:
    engine = make_engine(enable_prefix_caching=False, block_size=block_size, attention_backend=backend)
    prompt = prompt_of(300)
    engine.add(ask("a", prompt, 100))
    outputs, most = poisoned_run(engine)
    assert_greedy(reference, prompt, tokens(outputs["a"]), 100)
    assert most * block_size <= Window(SLIDING_WINDOW, block_size).span(BUDGET) + block_size
    assert most * block_size < 300
    assert_empty(engine)


@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_drafts_never_need_a_block_that_is_gone(
    make_engine: Callable[..., Engine], reference: PreTrainedModel, shape: str
) -> None:
    prompts = {str(length): prompt_of(length) for length in (3, 70, 200)}
    answers = {name: greedy(reference, prompt, 100) for name, prompt in prompts.items()}
    make_script = scripted.tree if shape == "tree" else scripted.sometimes_right
    drafter = scripted.ScriptedDrafter(make_script(answers, 0.7, VOCAB_SIZE))
    plain = make_engine(enable_prefix_caching=False)
    engine = scripted.engine_with(plain.config, drafter, 24 if shape == "tree" else 8)
    assert engine.blocks.has_windows
    for name, prompt in prompts.items():
        engine.add(ask(name, prompt, 100))
    outputs, _ = poisoned_run(engine)
    assert {name: tokens(parts) for name, parts in outputs.items()} == answers
    assert sum(part.accepted_tokens for parts in outputs.values() for part in parts) > 50
    assert_empty(engine)


def test_a_pool_need_not_hold_a_whole_sequence(
    make_engine: Callable[..., Engine], reference: PreTrainedModel
) -> None:
    window = Window(SLIDING_WINDOW, 16)
    span = (window.span() + window.span(BUDGET)) // 16
    with pytest.raises(ConfigError, match=r"holds 256 tokens, fewer than the window and step of a sequence"):
        make_engine(num_blocks=span)
    engine = make_engine(num_blocks=span + 1)
    prompt = prompt_of(400)
    assert len(prompt) > engine.blocks.num_blocks * 16
    for name in ("a", "b"):
        engine.add(ask(name, prompt, 50))
    outputs = run(engine)
    assert tokens(outputs["a"]) == tokens(outputs["b"])
    assert_greedy(reference, prompt, tokens(outputs["a"]), 50)
    assert_empty(engine)


def test_a_prefix_is_found_by_the_blocks_of_its_window(
    make_engine: Callable[..., Engine], reference: PreTrainedModel
) -> None:
    engine = make_engine(num_blocks=17)
    prompt = prompt_of(350)
    engine.add(ask("first", prompt, 20))
    answer = tokens(run(engine)["first"])
    conversation = prompt + answer + prompt_of(7, 1)
    assert len(conversation) > engine.blocks.num_blocks * 16, "so the first blocks are gone"
    engine.add(ask("second", conversation))
    outputs = run(engine)["second"]
    assert cached(outputs) == 368 and tokens(outputs) == greedy(reference, conversation, 8)
    shorter = prompt[:100]
    engine.add(ask("shorter", shorter))
    outputs = run(engine)["shorter"]
    assert cached(outputs) == 0 and tokens(outputs) == greedy(reference, shorter, 8)
    whole = prompt_of(64, 2)
    for found in (0, 63):
        engine.add(ask("whole", whole))
        outputs = run(engine)["whole"]
        assert cached(outputs) == found and tokens(outputs) == greedy(reference, whole, 8)
    assert_empty(engine)


@pytest.mark.parametrize("host_blocks", [0, 40])
def test_evicted_and_preempted_prompts_get_the_same_tokens(
    make_engine: Callable[..., Engine], reference: PreTrainedModel, host_blocks: int
) -> None:
    engine = make_engine(num_blocks=19, kv_offloading_size=host_blocks * BLOCK_BYTES / 2**30)
    ask_crowds(engine, reference, seed=1, turns=8, least=1, max_tokens=60)
    engine.close()


def test_a_prompt_comes_back_from_the_disk(
    make_engine: Callable[..., Engine], reference: PreTrainedModel, tmp_path: Path
) -> None:
    options = {
        "num_blocks": 17,
        "kv_offloading_size": 32 * BLOCK_BYTES / 2**30,
        "kv_disk_path": str(tmp_path),
        "kv_disk_size": 200 * BLOCK_BYTES / 2**30,
    }
    needed = 15 - Window(SLIDING_WINDOW, 16).first_place(240)
    assert blocks_from_disk(partial(make_engine, **options), reference) == needed


@pytest.mark.parametrize("num_found", [0, 150, 250])
def test_a_hand_off_is_of_the_window(
    make_engine: Callable[..., Engine], reference: PreTrainedModel, num_found: int
) -> None:
    prompt = prompt_of(250)
    prefill, decode = make_engine(num_blocks=17), make_engine(num_blocks=24)
    if num_found:
        decode.add(ask("before", prompt[:num_found]))
        run(decode)
    hits = decode.stats().prefix_hit_tokens
    prefill.add(ask("a", prompt, 60), prefill_only=True)
    first = tokens(run(prefill)["a"])
    reservation = decode.reserve(ask("a", prompt, 60))
    assert reservation is not None
    needed = Window(SLIDING_WINDOW, 16).first_place(250) * 16
    assert reservation.covered == (240 if num_found == 250 else needed)
    num_hit = 240 if num_found == 250 else 0
    assert (reservation.num_cached, decode.stats().prefix_hit_tokens - hits) == (num_hit, num_hit)
    missing = slice(reservation.covered // 16, None)
    source, target = prefill.computed("a")[0].blocks, reservation.sequence_blocks.extents()[0].blocks
    assert len(source) == len(target) == 16
    decode.pool.segment("target")[decode.blocks.block_pools[0]._free] = torch.nan
    decode.pool.block_pools[0][target[missing]] = prefill.pool.block_pools[0][source[missing]]
    decode.activate(reservation, first[0], len(prompt))
    assert_greedy(reference, prompt, first + tokens(run(decode)["a"]), 60)
    prefill.abort("a")
    assert_empty(prefill)
    assert_empty(decode)


def test_a_prompt_to_be_handed_over_never_lacks_its_blocks(make_engine: Callable[..., Engine]) -> None:
    """It is never preempted, so what it needs to its end is its own from the start, though others come."""
    engine = make_engine(num_blocks=21, max_num_batched_tokens=BUDGET)
    prompts = {str(seed): prompt_of(300, seed) for seed in range(4)}
    for name, prompt in prompts.items():
        engine.add(ask(name, prompt), prefill_only=True)
    done: set[str] = set()
    for _ in range(200):
        for output in engine.step().outputs:
            done.add(output.request_id)
            engine.abort(output.request_id)
    assert done == set(prompts)
    assert engine.stats().num_preemptions == 0
    assert_empty(engine)


@pytest.mark.parametrize("position", [0, 22, 23, 86, 87, 88, 250])
@pytest.mark.parametrize("block_size", [1, 16, 64, 100, 128])
def test_the_first_place_is_that_of_the_first_tile_that_is_read(position: int, block_size: int) -> None:
    window = Window(SLIDING_WINDOW, block_size)
    first = max(position - SLIDING_WINDOW + 1, 0) // TILE * TILE
    place = window.first_place(position)
    assert place * block_size <= first < (place + 1) * block_size
    assert position - place * block_size < window.span()


@pytest.mark.parametrize("tree", [False, True])
def test_a_draft_that_sees_no_more_lets_go_of_the_same_blocks(
    make_engine: Callable[..., Engine], reference: PreTrainedModel, folder: Path, tree: bool
) -> None:
    """It has the target's weights, and reads a prompt only once it drafts: it begins at the window. All that
    it drafts from a window later on is right.
    """
    asked = SpeculativeConfig(
        method="draft_model", model=str(folder), num_speculative_tokens=6 if tree else 4, tree=tree
    )
    plain = make_engine(num_blocks=120, enable_prefix_caching=False)
    engine = Engine(msgspec.structs.replace(plain.config, speculative_config=asked), speculate=speculate)
    [table] = engine.blocks.tables
    assert table.window == Window(SLIDING_WINDOW, 16)
    prompt = prompt_of(250)
    engine.add(ask("a", prompt, 150))
    parts: list[TokenOutput] = []
    most = 0
    while engine.has_work():
        for name in ("target", "draft"):
            engine.pool.segment(name)[engine.blocks.block_pools[0]._free] = torch.nan
        parts += engine.step().outputs
        most = max(most, num_used(engine))
    assert_greedy(reference, prompt, tokens(parts), 150)
    assert most <= Window(SLIDING_WINDOW, 16).span(BUDGET) // 16 + 1
    late = parts[len(parts) // 2 :]
    accepted, drafted = (sum(getattr(p, f"{name}_tokens") for p in late) for name in ("accepted", "drafted"))
    assert accepted > (0.3 if tree else 0.95) * drafted > 10
    assert_empty(engine)


def test_what_is_behind_the_window_counts_as_drafted() -> None:
    blocks = BlockManager(FakePool(16, 40), windows=[Window(24, 16)], most_rows=64)  # type: ignore[arg-type]
    held = SequenceBlocks(blocks, b"r" * 16)
    held.grow(0, 300, 64)
    for end in range(60, 301, 60):
        held.commit(end, [], [*range(300)])
    assert held.num_drafted == held.first_kept == 256
    held.mark_drafted(300)
    assert held.num_drafted == 288
    assert sum(blocks.block_pools[0].drafted) == 2


def test_a_draft_that_sees_more_keeps_all(make_engine: Callable[..., Engine], tmp_path: Path) -> None:
    write_model("llama", tmp_path)
    asked = SpeculativeConfig(method="draft_model", model=str(tmp_path), num_speculative_tokens=2)
    config = msgspec.structs.replace(make_engine(max_model_len=200).config, speculative_config=asked)
    engine = Engine(config, speculate=speculate)
    assert not engine.blocks.has_windows
    assert "though some do not see it: a draft sees more of a sequence" in engine.start_up["kv_pool"]


def test_who_keeps_all(make_engine: Callable[..., Engine], tmp_path: Path) -> None:
    """Models that our decoders run and that have a layer that sees all, sequences that are no longer than the
    window, whole reservations.
    """
    write_model("qwen2", tmp_path)
    assert not make_engine(model=str(tmp_path), max_model_len=256).blocks.has_windows
    assert not make_engine(max_model_len=SLIDING_WINDOW, num_blocks=64).blocks.has_windows
    [table] = make_engine(max_model_len=SLIDING_WINDOW + 1).blocks.tables
    assert table.window == Window(SLIDING_WINDOW, 16)
    assert not make_engine(max_model_len=128, paged_kv=False).blocks.has_windows
