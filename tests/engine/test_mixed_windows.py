"""Models of which some layers attend within a sliding window keep no blocks behind it in tables of these, and
give equal tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from engine.engine import Engine
from engine.kv_pool import KVPool
from engine.pool_layout import TARGET, Group, LayerShape, PoolLayout
from engine.rows import BlockTable
from protocol.speculation import SpeculativeConfig
from protocol.window import Window
from speculation.speculator import speculate
from tests.e2e.architectures import SLIDING_WINDOW, config_of, write_model
from tests.engine.test_engine import ask, assert_empty, prompt_of, run, tiny_engine, tokens
from tests.engine.windowed import ask_crowds, blocks_from_disk, cached, poisoned_run
from tests.speculation import scripted
from tests.worker.tiny_model import VOCAB_SIZE, assert_greedy, greedy, load
from training.heads.contract import HeadOptions, Target
from training.heads.eagle import build_eagle3

BUDGET = 40
BLOCK_BYTES = 2 * 16 * 2 * 16 * 4
"""Of 16 tokens in one layer: Gemma 2 of three layers has one that sees all, and three tables."""
WINDOW = Window(SLIDING_WINDOW, 16)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_model("gemma2", folder)
    return folder


@pytest.fixture(scope="module")
def reference(folder: Path) -> PreTrainedModel:
    return load(folder)


@pytest.fixture
def make_engine(folder: Path) -> Callable[..., Engine]:
    def make(num_blocks: int = 120, **options: Any) -> Engine:
        bounds = {"max_num_batched_tokens": BUDGET, "max_num_seqs": 6, "max_model_len": 400}
        return tiny_engine(folder, **bounds | {"kv_cache_memory_bytes": num_blocks * BLOCK_BYTES} | options)

    return make


def test_rows_that_are_all_padding_have_all_tables() -> None:
    """As where a forward is compiled or captured."""
    assert BlockTable(16, num_tables=3).of([]).shape == (3, 0, 1)


@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_layers_within_a_window_keep_its_blocks(
    make_engine: Callable[..., Engine], reference: PreTrainedModel, backend: str
) -> None:
    engine = make_engine(enable_prefix_caching=False, attention_backend=backend)
    assert [table.window for table in engine.blocks.tables] == [None, WINDOW, WINDOW]
    prompt = prompt_of(300)
    engine.add(ask("a", prompt, 100))
    outputs, most = poisoned_run(engine)
    assert_greedy(reference, prompt, tokens(outputs["a"]), 100)
    assert 25 <= most <= 25 + 2 * (WINDOW.span(BUDGET) // 16 + 1) < 2 * 25
    assert_empty(engine)


@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_drafts_never_need_a_block_that_is_gone(
    make_engine: Callable[..., Engine], reference: PreTrainedModel, shape: str
) -> None:
    prompts = {str(length): prompt_of(length) for length in (3, 150)}
    answers = {name: greedy(reference, prompt, 90) for name, prompt in prompts.items()}
    make_script = scripted.tree if shape == "tree" else scripted.sometimes_right
    drafter = scripted.ScriptedDrafter(make_script(answers, 0.7, VOCAB_SIZE))
    plain = make_engine(enable_prefix_caching=False)
    engine = scripted.engine_with(plain.config, drafter, 24 if shape == "tree" else 8)
    assert len(engine.blocks.tables) == 3
    for name, prompt in prompts.items():
        engine.add(ask(name, prompt, 90))
    outputs, _ = poisoned_run(engine)
    assert {name: tokens(parts) for name, parts in outputs.items()} == answers
    assert sum(part.accepted_tokens for parts in outputs.values() for part in parts) > 50
    assert_empty(engine)


def test_a_draft_of_the_models_own_layers_reads_their_tables(
    make_engine: Callable[..., Engine], folder: Path, tmp_path: Path
) -> None:
    """The layer that it skips changes nothing here, so all that it drafts is right."""
    model = load(folder)
    for linear in (model.model.layers[0].self_attn.o_proj, model.model.layers[0].mlp.down_proj):
        linear.weight.data.zero_()
    model.save_pretrained(tmp_path)
    asked = SpeculativeConfig(method="self_speculative", num_speculative_tokens=4, skip_layers=[0])
    config = msgspec.structs.replace(make_engine(model=str(tmp_path)).config, speculative_config=asked)
    engine = Engine(config, speculate=speculate)
    assert len(engine.blocks.tables) == 3
    prompt = prompt_of(120)
    engine.add(ask("a", prompt, 40))
    outputs, _ = poisoned_run(engine)
    assert_greedy(model, prompt, tokens(outputs["a"]), 40)
    drafted, accepted = (
        sum(getattr(part, name) for part in outputs["a"]) for name in ("drafted_tokens", "accepted_tokens")
    )
    assert drafted == accepted > 20


@pytest.mark.parametrize("method", ["draft_model", "eagle"])
def test_a_draft_lies_with_the_layers_that_see_all(
    make_engine: Callable[..., Engine], tmp_path: Path, method: str
) -> None:
    """Two tables of two layers each; the draft has one. It begins behind a prefix without its KV, too."""
    model = AutoModelForCausalLM.from_config(config_of("gemma2", num_hidden_layers=4), dtype=torch.float32)
    model.save_pretrained(tmp_path / "target")
    if method == "eagle":
        few = torch.zeros(model.config.vocab_size).index_fill(0, torch.arange(3, 40), 1)
        build_eagle3(Target("tiny", model, few), HeadOptions(draft_vocab_size=37)).save(tmp_path / "draft")
    else:
        small = config_of("llama", num_hidden_layers=1)
        AutoModelForCausalLM.from_config(small, dtype=torch.float32).save_pretrained(tmp_path / "draft")
    asked = SpeculativeConfig(method=method, model=str(tmp_path / "draft"), num_speculative_tokens=4)
    plain = make_engine(num_blocks=500, model=str(tmp_path / "target"))
    config = msgspec.structs.replace(plain.config, speculative_config=asked)
    engine = Engine(config, speculate=speculate)
    assert [table.window for table in engine.blocks.tables] == [None, WINDOW]
    assert "2 keep the last 24 and 2 keep all, in 2 tables of 2 layers" in engine.start_up["kv_pool"]
    engine.add(ask("before", prompt_of(200), 1))
    run(engine)
    prompt = prompt_of(200) + prompt_of(60, 1)
    engine.add(ask("a", prompt, 100))
    outputs, most = poisoned_run(engine)
    assert cached(outputs["a"]) == 192
    assert_greedy(load(tmp_path / "target"), prompt, tokens(outputs["a"]), 100)
    assert sum(part.drafted_tokens for part in outputs["a"]) > 50
    assert most <= 23 + WINDOW.span(BUDGET) // 16 + 1 < 2 * 23
    assert_empty(engine)


def test_a_prefix_counts_as_far_as_all_tables_have_it(
    make_engine: Callable[..., Engine], reference: PreTrainedModel
) -> None:
    """Blocks behind a window are the first to go."""
    engine = make_engine(num_blocks=60)
    prompt = prompt_of(350)
    engine.add(ask("first", prompt, 20))
    answer = tokens(run(engine)["first"])
    conversation = prompt + answer + prompt_of(7, 1)
    for text, found in ((conversation, 368), (prompt[:40], 0), (prompt[:350], 336)):
        engine.add(ask("again", text))
        outputs = run(engine)["again"]
        assert cached(outputs) == found and tokens(outputs) == greedy(reference, text, 8)
    assert_empty(engine)


@pytest.mark.parametrize("host_blocks", [0, 150])
def test_evicted_and_preempted_prompts_get_the_same_tokens(
    make_engine: Callable[..., Engine], reference: PreTrainedModel, host_blocks: int
) -> None:
    engine = make_engine(
        num_blocks=54, max_model_len=290, kv_offloading_size=host_blocks * BLOCK_BYTES / 2**30
    )
    ask_crowds(engine, reference, seed=2, turns=3, least=3, max_tokens=30)
    engine.close()


def test_a_prompt_comes_back_from_the_disk(
    make_engine: Callable[..., Engine], reference: PreTrainedModel, tmp_path: Path
) -> None:
    options = {
        "num_blocks": 54,
        "max_model_len": 290,
        "kv_offloading_size": 96 * BLOCK_BYTES / 2**30,
        "kv_disk_path": str(tmp_path),
        "kv_disk_size": 600 * BLOCK_BYTES / 2**30,
    }
    needed = 15 + 2 * (15 - WINDOW.first_place(240))
    assert blocks_from_disk(partial(make_engine, **options), reference) == needed


@pytest.mark.parametrize("num_found", [0, 150, 250])
def test_a_hand_off_brings_the_windows_of_their_layers(
    make_engine: Callable[..., Engine], reference: PreTrainedModel, num_found: int
) -> None:
    """What the decode worker has of the full layers counts, though it lacks a window."""
    prompt = prompt_of(250)
    prefill, decode = make_engine(num_blocks=60), make_engine(num_blocks=60)
    if num_found:
        decode.add(ask("before", prompt[:num_found]))
        run(decode)
    prefill.add(ask("a", prompt, 60), prefill_only=True)
    first = tokens(run(prefill)["a"])
    reservation = decode.reserve(ask("a", prompt, 60))
    assert reservation is not None
    covered = num_found // 16 * 16
    assert (reservation.covered, reservation.num_cached) == (covered, covered)
    left = max(WINDOW.first_place(250), covered // 16)
    firsts = prefill.firsts(250, covered)
    assert firsts == [covered // 16, left, left]
    assert reservation.first_tokens == [16 * place for place in firsts]
    decode.pool.segment("target")[decode.blocks.block_pools[0]._free] = torch.nan
    targets = reservation.sequence_blocks.extents(firsts)
    for source, target in zip(prefill.computed("a", firsts), targets, strict=True):
        assert len(source.blocks) == len(target.blocks)
        decode.pool.block_pools[0][target.blocks] = prefill.pool.block_pools[0][source.blocks]
    decode.activate(reservation, first[0], len(prompt))
    assert_greedy(reference, prompt, first + tokens(run(decode)["a"]), 60)
    prefill.abort("a")
    assert_empty(prefill)
    assert_empty(decode)


FULL, SLIDING = 0, 24
LIKE = LayerShape(2, 8, 8)


def divided(sights: list[int], layers: list[LayerShape | int] | None = None) -> Group:
    return Group.of_layers(TARGET, layers or [LIKE] * len(sights), torch.float32, sights)


def test_layers_of_the_rarer_sight_fill_a_table() -> None:
    group = divided([SLIDING, SLIDING, FULL, SLIDING, SLIDING, SLIDING, FULL]).in_tables(100)
    assert group.windows == (FULL, SLIDING, SLIDING, SLIDING)
    places = [(place.table, place.index) for place in group.layers]
    assert places == [(1, 0), (1, 1), (0, 0), (2, 0), (2, 1), (3, 0), (0, 1)]
    assert group.segments[0].num_layers == 2
    assert group.num_values == 8 * LIKE.num_values  # one place of a table stays empty
    assert group.describe(16) != divided([FULL] * 2).describe(16)


def test_layers_of_several_shapes_lie_in_rows() -> None:
    """As those of Gemma 4 31B: five of twice the size within a window for each that sees all."""
    layers = ([LayerShape(16, 256, 256)] * 5 + [LayerShape(4, 512, 512)]) * 10
    whole = Group.of_layers(TARGET, layers, torch.float32, ([1024] * 5 + [FULL]) * 10)
    group = whole.in_tables(4096)
    assert group.windows == (FULL, *[1024] * 10)
    assert group.num_values == whole.num_values
    for one in (whole.in_tables(4096, rows=False), whole.stored_as("int8_row_scales").in_tables(4096)):
        assert one.windows == (0,)
    many = divided([SLIDING] * 40 + [FULL] * 4, [LIKE] * 40 + [LayerShape(1, 8, 8)] * 4)
    assert many.in_tables(100).windows == (FULL, *[SLIDING] * 10)  # rows of half as many values would need 21


def test_parts_of_rows_do_not_overlap() -> None:
    layers = [LIKE, LayerShape(1, 8, 24), LIKE, LIKE, LIKE, LayerShape(1, 8, 24)]
    group = divided([SLIDING, FULL, SLIDING, SLIDING, SLIDING, FULL], layers).in_tables(100)
    assert group.windows == (FULL, SLIDING, SLIDING)
    pool = KVPool(PoolLayout((group,), 4), 3, torch.device("cpu"), None)
    for number, (place, kv) in enumerate(zip(group.layers, pool.layers(TARGET), strict=True)):
        kv.keys[place.table], kv.values[place.table] = number, -number
    for number, (place, kv) in enumerate(zip(group.layers, pool.layers(TARGET), strict=True)):
        shape = layers[number]
        assert kv.keys.shape[1:] == (4, shape.num_kv_heads, shape.key_dim)
        assert kv.values.shape[1:] == (4, shape.num_kv_heads, shape.value_dim)
        assert (kv.keys[place.table] == number).all() and (kv.values[place.table] == -number).all()


@pytest.mark.parametrize("backend", ["cpu", "torch"])
@pytest.mark.parametrize("model_type", ["gemma4_text", "mimo_v2_flash"])
def test_models_with_layers_of_several_shapes_keep_their_windows(
    make_engine: Callable[..., Engine], tmp_path: Path, model_type: str, backend: str
) -> None:
    write_model(model_type, tmp_path)
    engine = make_engine(num_blocks=200, model=str(tmp_path), attention_backend=backend)
    windows = [table.window for table in engine.blocks.tables]
    assert None in windows and WINDOW in windows
    whole = make_engine(model=str(tmp_path), kv_wire_dtype="int8")
    assert len(whole.blocks.tables) == 1 and "kept or sent in codes" in whole.start_up["kv_pool"]
    prompt = prompt_of(250)
    answers = {"a": greedy(load(tmp_path), prompt, 60)}
    drafter = scripted.ScriptedDrafter(scripted.tree(answers, 0.7, 320))
    drafting = scripted.engine_with(engine.config, drafter, 8)
    for each in (engine, drafting):
        each.add(ask("a", prompt, 60))
        outputs, most = poisoned_run(each)
        assert tokens(outputs["a"]) == answers["a"]
        assert most < 20 * len(windows)
        assert_empty(each)


@pytest.mark.parametrize(
    ("sights", "layers", "why"),
    [
        ([SLIDING, FULL], [LIKE, LayerShape(1, 8, 4)], "layers have KV of several shapes that do not divide"),
        ([SLIDING, FULL], [LIKE, 0], "layers that share their KV see unlike parts of it"),
        ([SLIDING] * 6 + [FULL] * 5, None, "11 layers of which 5 are unlike the others"),
        ([SLIDING] * 16 + [FULL], None, "17 layers of which 1 are unlike the others"),
    ],
)
def test_what_does_not_divide_keeps_all(sights: list[int], layers: Any, why: str) -> None:
    group = divided(sights, layers)
    assert group.fault(100).startswith(why)
    assert group.in_tables(100) == group
    assert not group.fault(SLIDING) and group.in_tables(SLIDING).windows == (0,)


def test_the_start_tells_what_is_kept(make_engine: Callable[..., Engine], folder: Path) -> None:
    plain = make_engine()
    assert "2 keep the last 24 and 1 keep all, in 3 tables of 1 layers" in plain.start_up["kv_pool"]
    asked = SpeculativeConfig(method="draft_model", model=str(folder), num_speculative_tokens=2)
    config = msgspec.structs.replace(plain.config, speculative_config=asked, max_model_len=200)
    engine = Engine(config, speculate=speculate)
    assert "some do not see it: a draft's KV would leave 50% of 3 tables empty" in engine.start_up["kv_pool"]
    assert [table.window for table in engine.blocks.tables] == [None]
