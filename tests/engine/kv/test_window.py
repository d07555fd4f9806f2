"""Tables of layers with sliding windows free the blocks before the window, and no token changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from engine.batch.step_inputs import BlockTable
from engine.engine import Engine
from engine.kv.layout import TARGET, Group, LayerShape, PoolLayout
from engine.kv.pool import KVPool
from protocol.errors import ConfigError
from protocol.kv_events import TILE, Window
from protocol.outputs import TokenOutput
from protocol.speculation import SpeculativeConfig
from speculation.speculator import BatchSpeculator
from tests.e2e.architectures import SLIDING_WINDOW, config_of, write_model
from tests.engine.test_engine import Make, ask, assert_empty, prompt_of, run, tiny_engine, tokens
from tests.speculation import scripted
from tests.worker.tiny_model import VOCAB_SIZE, assert_greedy, load
from training.heads.contract import HeadOptions, Target
from training.heads.eagle import build_eagle3

BUDGET = 40
WINDOW = Window(SLIDING_WINDOW, 16)
BLOCK_BYTES = {"mistral": 3 * 2 * 16 * 2 * 16 * 4, "gemma3_text": 2 * 16 * 2 * 16 * 4}
"""Bytes of a block. Mistral's three layers share one table. Gemma 3's three, of which one is full, have one
each.
"""
WINDOWS: dict[str, list[Window | None]] = {"mistral": [WINDOW], "gemma3_text": [None, WINDOW, WINDOW]}
BOUNDS: dict[str, dict[str, int]] = {
    "mistral": {"num_blocks": 64},
    "gemma3_text": {"num_blocks": 120, "max_model_len": 400},
}


@pytest.fixture(scope="module", params=BLOCK_BYTES)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


def only(kind: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("kind", [kind], indirect=True)


@pytest.fixture(scope="module")
def folder(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(kind)
    write_model(kind, folder)
    return folder


@pytest.fixture
def make_engine(kind: str, folder: Path) -> Make:
    def make(**options: Any) -> Engine:
        natively = kind == "gemma3_text" and "model" not in options
        compile = "auto" if natively and options.get("attention_backend") != "torch" else "off"
        bounds: dict[str, Any] = {"max_num_batched_tokens": BUDGET, "max_num_seqs": 6, "compile": compile}
        bounds |= BOUNDS[kind] | options
        room = bounds.pop("num_blocks") * BLOCK_BYTES[kind]
        return tiny_engine(folder, kv_cache_memory_bytes=room, **bounds)

    return make


def drafting(engine: Engine, model: Path | None = None, **options: Any) -> Engine:
    """Make an engine like `engine` that drafts."""
    asked = SpeculativeConfig(model=None if model is None else str(model), **options)
    changed = replace(engine.config, speculative_config=asked)
    return Engine(changed, speculate=BatchSpeculator)


def poisoned_run(engine: Engine, *others: str) -> tuple[list[TokenOutput], int]:
    """Fill free blocks with NaN in each step, in the segments `others` too. Return all outputs, and the most
    blocks used.
    """
    outputs: list[TokenOutput] = []
    most = 0
    while engine.has_work():
        for name in (TARGET, *others):
            engine.pool.segment(name)[engine.blocks._free] = torch.nan
        outputs += engine.step().outputs
        most = max(most, engine.blocks.num_blocks - engine.blocks.available)
    return outputs, most


def cached(output: list[TokenOutput]) -> int | None:
    return output[0].cached_tokens


def count(outputs: list[TokenOutput], what: str) -> int:
    """Return how many tokens were `drafted` or `accepted`."""
    return sum(getattr(output, f"{what}_tokens") for output in outputs)


def test_rows_that_are_all_padding_use_all_tables() -> None:
    """Such rows are used when a forward is compiled or captured."""
    assert BlockTable(16, num_tables=3).of([]).shape == (3, 0, 1)


@pytest.mark.parametrize(
    ("kind", "block_size", "backend"),
    [
        ("mistral", 8, "torch"),
        ("mistral", 128, "cpu"),
        ("gemma3_text", 16, "cpu"),
        ("gemma3_text", 16, "torch"),
    ],
    indirect=["kind"],
)
def test_a_sequence_has_only_its_windows_blocks(
    make_engine: Make, reference: PreTrainedModel, kind: str, block_size: int, backend: str
) -> None:
    engine = make_engine(enable_prefix_caching=False, block_size=block_size, attention_backend=backend)
    num_whole = WINDOWS[kind].count(None)
    num_tables = len(engine.blocks.tables)
    assert num_tables == len(WINDOWS[kind])
    prompt = prompt_of(300)
    engine.add(ask("a", prompt, 100))
    outputs, most = poisoned_run(engine)
    assert_greedy(reference, prompt, tokens(outputs), 100)
    whole, part = -(-400 // block_size), Window(SLIDING_WINDOW, block_size).span(BUDGET) // block_size + 1
    assert num_whole * whole <= most <= num_whole * whole + (num_tables - num_whole) * part
    assert most < 0.7 * num_tables * whole
    assert_empty(engine)


def test_drafts_never_need_a_freed_block(make_engine: Make, reference: PreTrainedModel, kind: str) -> None:
    plain = make_engine(enable_prefix_caching=False)
    prompts = {str(length): prompt_of(length) for length in (3, 70, 200)}
    answers: dict[str, list[int]] = {}
    for width, make_script in ((0, None), (8, scripted.sometimes_right), (24, scripted.tree)):
        engine = plain
        if make_script is not None:
            drafter = scripted.ScriptedDrafter(make_script(answers, 0.7, VOCAB_SIZE))
            engine = scripted.engine_with(plain.config, drafter, width)
        assert [table.window for table in engine.blocks.tables] == WINDOWS[kind]
        for name, prompt in prompts.items():
            engine.add(ask(name, prompt, 100))
        outputs, _ = poisoned_run(engine)
        for name, prompt in prompts.items():
            found = tokens([output for output in outputs if output.request_id == name])
            if make_script is None:
                assert_greedy(reference, prompt, found, 100)
            assert found == answers.setdefault(name, found)
        assert count(outputs, "accepted") > 50 or make_script is None
        assert_empty(engine)


@only("mistral")
def test_a_pool_need_not_hold_a_whole_sequence(make_engine: Make, reference: PreTrainedModel) -> None:
    span = (WINDOW.span() + WINDOW.span(BUDGET)) // 16
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


@pytest.mark.parametrize("num_found", [0, 150, 250])
def test_a_hand_off_moves_only_the_windows(
    make_engine: Make, reference: PreTrainedModel, kind: str, num_found: int
) -> None:
    """Blocks of full layers at the decode worker count, even if it lacks a window."""
    prompt = prompt_of(250)
    prefill, decode = make_engine(), make_engine(num_blocks=60)
    if num_found:
        decode.add(ask("before", prompt[:num_found]))
        run(decode)
    hits = decode.stats().prefix_hit_tokens
    prefill.add(ask("a", prompt, 40), prefill_only=True)
    first = tokens(run(prefill)["a"])
    reservation = decode.reserve(ask("a", prompt, 40))
    assert reservation is not None
    found = num_found // 16 * 16 if kind == "gemma3_text" or num_found == 250 else 0
    place = WINDOW.first_place(250)
    assert reservation.covered == (max(found, 16 * place) if kind == "mistral" else found)
    assert (reservation.num_cached, decode.stats().prefix_hit_tokens - hits) == (found, found)
    firsts = prefill.handoff.firsts(250, reservation.covered)
    left = max(place, found // 16)
    assert firsts == ([left] if kind == "mistral" else [found // 16, left, left])
    assert reservation.first_tokens == [16 * place for place in firsts]
    decode.pool.segment(TARGET)[decode.blocks._free] = torch.nan
    targets = reservation.sequence_blocks.extents(firsts=firsts)
    for source, target in zip(prefill.computed("a", firsts), targets, strict=True):
        assert len(source.blocks) == len(target.blocks)
        decode.pool.memory[target.blocks] = prefill.pool.memory[source.blocks]
    decode.activate(reservation, first[0], len(prompt))
    assert_greedy(reference, prompt, first + tokens(run(decode)["a"]), 40)
    prefill.abort("a")
    assert_empty(prefill)
    assert_empty(decode)


@only("mistral")
def test_a_prompt_to_be_handed_over_keeps_its_blocks(make_engine: Make) -> None:
    """It is never preempted, so all blocks that it needs are reserved at the start, though others arrive."""
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
def test_the_first_place_is_the_first_tile_that_is_read(position: int, block_size: int) -> None:
    window = Window(SLIDING_WINDOW, block_size)
    first = max(position - SLIDING_WINDOW + 1, 0) // TILE * TILE
    place = window.first_place(position)
    assert place * block_size <= first < (place + 1) * block_size
    assert position - place * block_size < window.span()


@only("mistral")
@pytest.mark.parametrize("tree", [False, True])
def test_a_draft_with_the_same_window_frees_the_same_blocks(
    make_engine: Make, reference: PreTrainedModel, folder: Path, tree: bool
) -> None:
    """It has the target's weights, and its drafts are right once the window has left the prompt behind."""
    plain = make_engine(num_blocks=120, enable_prefix_caching=False)
    engine = drafting(plain, folder, method="draft_model", num_speculative_tokens=6 if tree else 4, tree=tree)
    assert [table.window for table in engine.blocks.tables] == [WINDOW]
    prompt = prompt_of(250)
    engine.add(ask("a", prompt, 150))
    parts, most = poisoned_run(engine, "draft")
    assert_greedy(reference, prompt, tokens(parts), 150)
    assert most <= WINDOW.span(BUDGET) // 16 + 1
    late = parts[len(parts) // 2 :]
    assert count(late, "accepted") > (0.3 if tree else 0.95) * count(late, "drafted") > 10
    assert_empty(engine)


@only("gemma3_text")
def test_a_draft_of_the_models_own_layers_uses_their_tables(
    make_engine: Make, folder: Path, tmp_path: Path
) -> None:
    """The skipped layer changes nothing here, so all drafts are right."""
    model = load(folder)
    for linear in (model.model.layers[0].self_attn.o_proj, model.model.layers[0].mlp.down_proj):
        linear.weight.data.zero_()
    model.save_pretrained(tmp_path)
    plain = make_engine(model=str(tmp_path))
    engine = drafting(plain, method="self_speculative", num_speculative_tokens=4, skip_layers=[0])
    assert len(engine.blocks.tables) == 3
    prompt = prompt_of(120)
    engine.add(ask("a", prompt, 40))
    outputs, _ = poisoned_run(engine)
    assert_greedy(model, prompt, tokens(outputs), 40)
    assert count(outputs, "drafted") == count(outputs, "accepted") > 20


@only("gemma3_text")
@pytest.mark.parametrize("method", ["draft_model", "eagle"])
def test_a_draft_uses_the_full_layers_table(make_engine: Make, tmp_path: Path, method: str) -> None:
    """There are two tables of two layers each, and the draft has one. The prefix has no draft KV."""
    model = AutoModelForCausalLM.from_config(
        config_of("gemma3_text", num_hidden_layers=4), dtype=torch.float32
    )
    model.save_pretrained(tmp_path / "target")
    if method == "eagle":
        few = torch.zeros(model.config.vocab_size).index_fill(0, torch.arange(3, 40), 1)
        build_eagle3(Target("tiny", model, few), HeadOptions(draft_vocab_size=37)).save(tmp_path / "draft")
    else:
        small = config_of("llama", num_hidden_layers=1)
        AutoModelForCausalLM.from_config(small, dtype=torch.float32).save_pretrained(tmp_path / "draft")
    plain = make_engine(num_blocks=500, model=str(tmp_path / "target"))
    engine = drafting(plain, tmp_path / "draft", method=method, num_speculative_tokens=4)
    assert [table.window for table in engine.blocks.tables] == [None, WINDOW]
    assert "2 keep the last 24 and 2 keep all, in 2 tables of 2 layers" in engine.start_up["kv_pool"]
    engine.add(ask("before", prompt_of(200), 1))
    run(engine)
    prompt = prompt_of(200) + prompt_of(60, 1)
    engine.add(ask("a", prompt, 100))
    outputs, most = poisoned_run(engine)
    assert cached(outputs) == 192
    assert_greedy(load(tmp_path / "target"), prompt, tokens(outputs), 100)
    assert count(outputs, "drafted") > 50
    assert most <= 23 + WINDOW.span(BUDGET) // 16 + 1 < 2 * 23
    assert_empty(engine)


@only("mistral")
def test_a_draft_with_a_larger_window_keeps_all_blocks(make_engine: Make, tmp_path: Path) -> None:
    write_model("llama", tmp_path)
    engine = drafting(make_engine(max_model_len=200), tmp_path, method="draft_model")
    assert not engine.blocks.has_windows
    assert "though some do not see it: a draft sees more of a sequence" in engine.start_up["kv_pool"]


@only("mistral")
def test_engines_that_keep_all(make_engine: Make) -> None:
    """Sequences no longer than the window, or whole reservations."""
    assert not make_engine(max_model_len=SLIDING_WINDOW, num_blocks=64).blocks.has_windows
    [table] = make_engine(max_model_len=SLIDING_WINDOW + 1).blocks.tables
    assert table.window == WINDOW
    assert not make_engine(max_model_len=128, paged_kv=False).blocks.has_windows


FULL, SLIDING = 0, 24
LIKE = LayerShape(2, 8, 8)


def divided(layer_windows: list[int], layers: Sequence[LayerShape | int] | None = None) -> Group:
    return Group.of_layers(TARGET, layers or [LIKE] * len(layer_windows), torch.float32, layer_windows)


def test_layers_of_the_rarer_kind_fill_a_table() -> None:
    group = divided([SLIDING, SLIDING, FULL, SLIDING, SLIDING, SLIDING, FULL]).in_tables(100)
    assert group.windows == (FULL, SLIDING, SLIDING, SLIDING)
    places = [(place.table, place.index) for place in group.layers]
    assert places == [(1, 0), (1, 1), (0, 0), (2, 0), (2, 1), (3, 0), (0, 1)]
    assert group.segments[0].num_layers == 2
    assert group.num_values == 8 * LIKE.num_values  # one place of a table stays empty
    assert group.describe(16) != divided([FULL] * 2).describe(16)


def test_layers_of_several_shapes_form_rows() -> None:
    """As in Gemma 4 31B: five windowed layers of twice the size for each full one."""
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


@only("gemma3_text")
@pytest.mark.parametrize(("model_type", "backend"), [("gemma4_text", "cpu"), ("mimo_v2_flash", "torch")])
def test_models_with_layers_of_several_shapes_keep_their_windows(
    make_engine: Make, tmp_path: Path, model_type: str, backend: str
) -> None:
    write_model(model_type, tmp_path)
    engine = make_engine(num_blocks=200, model=str(tmp_path), attention_backend=backend)
    windows = [table.window for table in engine.blocks.tables]
    assert None in windows and WINDOW in windows
    whole = make_engine(model=str(tmp_path), kv_wire_dtype="int8")
    assert len(whole.blocks.tables) == 1 and "kept or sent in codes" in whole.start_up["kv_pool"]
    prompt, answers = prompt_of(250), {}
    drafter = scripted.ScriptedDrafter(scripted.tree(answers, 0.7, 320))
    for each in (engine, scripted.engine_with(engine.config, drafter, 8)):
        each.add(ask("a", prompt, 40))
        outputs, most = poisoned_run(each)
        assert_greedy(load(tmp_path), prompt, tokens(outputs), 40)
        assert most < 18 * len(windows)
        assert_empty(each)
        answers["a"] = tokens(outputs)


@pytest.mark.parametrize(
    ("layer_windows", "layers", "why"),
    [
        ([SLIDING, FULL], [LIKE, LayerShape(1, 8, 4)], "layers have KV of several shapes that do not divide"),
        ([SLIDING, FULL], [LIKE, 0], "layers that share their KV see unlike parts of it"),
        ([SLIDING] * 6 + [FULL] * 5, None, "11 layers of which 5 are unlike the others"),
        ([SLIDING] * 16 + [FULL], None, "17 layers of which 1 are unlike the others"),
    ],
)
def test_layers_that_do_not_divide_keep_all_blocks(layer_windows: list[int], layers: Any, why: str) -> None:
    group = divided(layer_windows, layers)
    assert group.fault(100).startswith(why)
    assert group.in_tables(100) == group
    assert not group.fault(SLIDING) and group.in_tables(SLIDING).windows == (0,)


@only("gemma3_text")
def test_the_start_logs_the_kept_blocks(make_engine: Make, folder: Path) -> None:
    plain = make_engine(max_model_len=200)
    assert "2 keep the last 24 and 1 keep all, in 3 tables of 1 layers" in plain.start_up["kv_pool"]
    engine = drafting(plain, folder, method="draft_model")
    assert "some do not see it: a draft's KV would leave 50% of 3 tables empty" in engine.start_up["kv_pool"]
    assert [table.window for table in engine.blocks.tables] == [None]
