"""LoRA adapters in the engine: merged or separate, alone or in a batch, and separate KV."""

from __future__ import annotations

import itertools
import json
import math
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.batch.runner import Step
from engine.batch.step_inputs import SequenceRows
from engine.engine import Engine
from engine.lora.config import AdapterError, parse_config
from engine.lora.files import LowRankProduct
from engine.lora.layers import AdaptedRows, attach, begin_step
from engine.lora.table import Adapters, Weights, pack
from protocol.errors import ConfigError, InvalidRequestError
from protocol.requests import Adapter
from tests.e2e.architectures import write_model
from tests.engine.adapter_files import merge, read, write, write_adapter
from tests.engine.kernels import needs_kernel
from tests.engine.test_engine import ask, assert_empty, prompt_of, run, tiny_engine, tokens
from tests.worker.tiny_model import greedy, load

MODELS = ("llama", "gpt2")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Write each model with two adapters: one of all layers, one of some layers with several ranks."""
    folders = {name: tmp_path_factory.mktemp(name) for name in MODELS}
    some = {"llama": ("q_proj", "v_proj", "down_proj"), "gpt2": ("c_attn",)}
    for name, folder in folders.items():
        write_model(name, folder)
        write_adapter(folder, folder / "one", 1)
        pattern = {"v_proj": 6, "c_attn": 6}
        write_adapter(
            folder,
            folder / "other",
            2,
            targets=some[name],
            ranks=lambda path: 6 if path.endswith(("v_proj", "c_attn")) else 4,
            rank_pattern=pattern,
            alpha_pattern={"layers.1.self_attn.q_proj": 3.0},
            use_rslora=True,
        )
    return folders


SCALES: dict[str, Callable[[str], float]] = {
    "one": lambda path: 2.0,
    "other": lambda path: (
        (3.0 if path.endswith("layers.1.self_attn.q_proj") else 8.0)
        / math.sqrt(6 if path.endswith(("v_proj", "c_attn")) else 4)
    ),
}


def make_engine(folder: Path, **options: Any) -> Engine:
    bounds = {"max_model_len": 256, "max_num_seqs": 8, "max_num_batched_tokens": 512}
    adapters = {name: str(folder / name) for name in SCALES}
    return tiny_engine(
        folder, **{**bounds, "kv_cache_memory_bytes": 2**22, "lora_modules": adapters, **options}
    )


def adapters_of(engine: Engine) -> Adapters:
    assert engine.adapters is not None
    return engine.adapters


def named(engine: Engine, name: str) -> Adapter | None:
    folder = Path(engine.config.model)
    return adapters_of(engine).load(name, str(folder / name)) if name else None


@pytest.mark.parametrize("name", MODELS)
def test_merged_and_separate_weights_give_equal_tokens(name: str, folders: dict[str, Path]) -> None:
    folder = folders[name]
    engine = make_engine(folder)
    expected = {"": load(folder)} | {
        adapter: merge(load(folder), folder / adapter, scale) for adapter, scale in SCALES.items()
    }
    prompt = prompt_of(40)
    for number, adapter in enumerate(["", "one", "other", "one", ""]):
        engine.add(ask(f"{number} {adapter}", prompt[: 40 - number], 12, adapter=named(engine, adapter)))
    texts = set()
    for request_id, outputs in run(engine).items():
        number, adapter = request_id.split(" ")
        found = tokens(outputs)
        assert found == greedy(expected[adapter], prompt[: 40 - int(number)], 12), request_id
        texts.add(tuple(found))
    assert len(texts) > 3  # the adapters change the text
    assert_empty(engine)


@pytest.mark.timeout(600)
def test_a_compiled_forward_adds_adapters(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One layer takes a third of the time. Some of its products are fused."""
    write_model("llama", tmp_path, num_hidden_layers=1)
    write_adapter(tmp_path, tmp_path / "one", 1)
    write_adapter(tmp_path, tmp_path / "other", 2, targets=("q_proj", "v_proj", "down_proj"))
    caplog.set_level("INFO", "tandem.engine")
    engine = make_engine(tmp_path, compile="on")
    assert engine.start_up["forward"].startswith("torch.compile")
    assert "compiling the model, which takes about 13 s of CPU time for its 1 layers" in caplog.text
    prompts = {"": prompt_of(150), "one": prompt_of(1), "other": prompt_of(33)}
    for adapter, prompt in prompts.items():
        engine.add(ask(adapter, prompt, adapter=named(engine, adapter)))
    outputs = run(engine)
    assert tokens(outputs[""]) == greedy(load(tmp_path), prompts[""], 8)
    for adapter in SCALES:
        merged = merge(load(tmp_path), tmp_path / adapter, SCALES["one"])
        assert tokens(outputs[adapter]) == greedy(merged, prompts[adapter], 8)


def logits_of(engine: Engine, batch: list[SequenceRows]) -> list[Tensor]:
    """Return the logits of each sequence's last row."""
    ends, end = [], 0
    for rows in batch:
        end += len(rows.token_ids)
        ends.append(end - 1)
    return list(engine._runner.run(Step(batch, ends)).logits.clone())


@needs_kernel
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("name", "compile"), [("llama", "auto"), ("llama", "off"), ("gpt2", "off")])
def test_a_row_has_the_same_bits_alone_and_in_a_batch(
    name: str, compile: str, threads: int, folders: dict[str, Path], threads_restored: None
) -> None:
    torch.set_num_threads(threads)
    engine = make_engine(folders[name], dtype="bfloat16", compile=compile)
    assert (engine.start_up["forward"] == "native decoder") == (compile == "auto")
    one, other = (adapters_of(engine).acquire(named(engine, adapter)) for adapter in SCALES)
    slots = [0, one, other, one, one, 0, one, one, other]
    lengths = [1, 1, 7, 1, 33, 5, 1, 1, 2]
    batch = [
        SequenceRows(prompt_of(length, index), 0, [[4 * index, 4 * index + 1, 4 * index + 2]], adapter=slot)
        for index, (slot, length) in enumerate(zip(slots, lengths, strict=True))
    ]
    crowd = logits_of(engine, batch)
    for rows, found in zip(batch, crowd, strict=True):
        (alone,) = logits_of(engine, [rows])
        assert torch.equal(alone, found)
    for rows, found in zip(batch, crowd, strict=True):
        if rows.adapter:
            (plain,) = logits_of(engine, [SequenceRows(rows.token_ids, 0, rows.tables)])
            assert not torch.equal(plain, found)


def test_a_second_runner_of_a_model_adds_adapters_once(folders: dict[str, Path]) -> None:
    """On a GPU a trial's runner is made before the engine's."""
    engine = make_engine(folders["llama"])
    attach(engine._runner._forward._model, adapters_of(engine))  # type: ignore[attr-defined]
    prompt = prompt_of(20)
    engine.add(ask("one", prompt, adapter=named(engine, "one")))
    merged = merge(load(folders["llama"]), folders["llama"] / "one", SCALES["one"])
    assert tokens(run(engine)["one"]) == greedy(merged, prompt, 8)


@pytest.mark.parametrize("format", ["int8", "int4"])
def test_adapters_work_with_quantized_weights(format: str, folders: dict[str, Path]) -> None:
    """In float32, where torch multiplies with the dequantized weights."""
    engine = make_engine(folders["llama"], quantization=format)
    rounded = load(folders["llama"])
    own = engine._runner._forward._model  # type: ignore[attr-defined]
    rounded.load_state_dict(own.state_dict(), strict=False)
    prompt = prompt_of(20)
    engine.add(ask("one", prompt, adapter=named(engine, "one")))
    merged = merge(rounded, folders["llama"] / "one", SCALES["one"])
    assert tokens(run(engine)["one"]) == greedy(merged, prompt, 8)


@pytest.mark.parametrize("strides", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=needs_kernel)])
def test_layers_of_any_width_get_their_products(dtype: torch.dtype, strides: bool) -> None:
    """Even if rows of outputs are strided and the width is no multiple of a vector."""
    generator = torch.Generator().manual_seed(5)
    for inputs, outputs, rank in ((7, 5, 4), (64, 96, 8), (50, 150, 12), (4096, 4096, 16)):
        x = torch.randn(1, 6, inputs, generator=generator).to(dtype)
        down, up = (torch.randn(rank, width, generator=generator).to(dtype) for width in (inputs, outputs))
        whole = torch.randn(1, 6, outputs + 16, generator=generator).to(dtype)
        out = whole[..., :outputs] if strides else whole[..., :outputs].contiguous()
        before, rows = out.clone(), torch.tensor([0, 2, 3, 4, 5])
        products = {"path": LowRankProduct(down, up.T)}
        of_kernel = pack(products) if dtype is torch.bfloat16 else products
        begin_step([AdaptedRows(Weights(of_kernel, "", ""), rows)])
        try:
            torch.ops.tandem.add_adapters(out, x, "path")
        finally:
            begin_step(())
        expected = before.float()
        expected[0, rows] += x[0, rows].float() @ down.float().T @ up.float()
        assert torch.equal(out[0, 1], before[0, 1])
        torch.testing.assert_close(out.float(), expected, rtol=1e-2, atol=0.1 if inputs < 1000 else 4.0)


@needs_kernel
def test_an_adapters_memory_has_the_order_of_its_use(folders: dict[str, Path]) -> None:
    engine = make_engine(folders["llama"], dtype="bfloat16")
    table = adapters_of(engine)
    products = table.weights(table.acquire(named(engine, "one"))).products
    assert [*products] == [*table.linears]
    tensors = [tensor for product in products.values() for tensor in (product.down, product.up)]
    for tensor, after in itertools.pairwise(tensors):
        assert after.data_ptr() == tensor.data_ptr() + tensor.nbytes


def test_adapters_share_no_kv_with_each_other_or_the_base(folders: dict[str, Path]) -> None:
    engine = make_engine(folders["llama"])
    prompt = prompt_of(64)
    answers = {}
    for adapter in ("", "one", "other"):
        engine.add(ask(f"first {adapter}", prompt, adapter=named(engine, adapter)))
        (first, *rest) = run(engine)[f"first {adapter}"]
        assert first.cached_tokens == 0
        answers[adapter] = tokens([first, *rest])
    for adapter in ("", "one", "other"):
        engine.add(ask(f"again {adapter}", prompt, adapter=named(engine, adapter)))
        (first, *rest) = run(engine)[f"again {adapter}"]
        assert first.cached_tokens == 63
        assert tokens([first, *rest]) == answers[adapter]
    reserved = engine.reserve(ask("reserved", prompt, adapter=named(engine, "other")))
    assert reserved is not None and reserved.covered == 64


def test_a_waiting_request_shares_no_prefix_of_another_adapter(folders: dict[str, Path]) -> None:
    """It does follow a request with its own adapter, and shares that prefix once it is computed."""
    engine = make_engine(folders["llama"], max_num_batched_tokens=64, itl_budget=0.0)
    prompt = prompt_of(100)
    engine.add(ask("base", prompt))
    engine.step()
    for number in range(2):
        engine.add(ask(f"one {number}", prompt, adapter=named(engine, "one")))
    engine.step()
    assert [sequence.request_id for sequence in engine.scheduler.running] == ["base", "one 0"]
    cached = {request_id: outputs[0].cached_tokens for request_id, outputs in run(engine).items()}
    assert cached["one 0"] == 0 and cached["one 1"] == 96


def test_equal_files_are_loaded_once_under_any_name(folders: dict[str, Path]) -> None:
    table = adapters_of(make_engine(folders["llama"]))
    path = str(folders["llama"] / "one")
    one, alias = table.load("one", path), table.load("alias", path)
    assert one.digest == alias.digest
    slot = table.acquire(one)
    assert table.acquire(alias) == slot
    table.release(slot)
    table.release(slot)


def test_an_unloaded_adapter_still_serves_running_requests(folders: dict[str, Path]) -> None:
    engine = make_engine(folders["llama"])
    table, prompt = adapters_of(engine), prompt_of(20)
    one = named(engine, "one")
    engine.add(ask("before", prompt, adapter=one))
    expected = tokens(run(engine)["before"])
    engine.add(ask("during", prompt, adapter=one))
    engine.step()
    slot = next(iter(engine.sequences.values())).adapter
    table.unload("one")
    table.weights(slot)
    assert len(tokens(run(engine)["during"])) == 7  # the first adapter was used
    with pytest.raises(KeyError):
        table.weights(slot)
    engine.add(ask("after", prompt, adapter=one))  # as a request resumed from another worker names it
    assert tokens(run(engine)["after"]) == expected


def test_a_changed_adapter_is_not_mistaken_for_the_old_one(tmp_path: Path) -> None:
    write_model("llama", tmp_path)
    write_adapter(tmp_path, tmp_path / "one", 1)
    engine = make_engine(tmp_path, lora_modules={"one": str(tmp_path / "one")})
    one = named(engine, "one")
    adapters_of(engine).unload("one")
    write_adapter(tmp_path, tmp_path / "one", 2)
    with pytest.raises(InvalidRequestError, match=r"model: one: .* differ from those loaded"):
        engine.add(ask("late", prompt_of(5), adapter=one))
    assert_empty(engine)


def test_without_the_option_requests_name_no_adapter(folders: dict[str, Path]) -> None:
    engine = make_engine(folders["llama"], lora_modules=None)
    adapter = Adapter(name="one", path=str(folders["llama"] / "one"), digest="0" * 32)
    with pytest.raises(InvalidRequestError, match="model: one: adapters need --enable-lora"):
        engine.add(ask("a", prompt_of(5), adapter=adapter))


@pytest.fixture(scope="module")
def table(folders: dict[str, Path]) -> Adapters:
    return adapters_of(make_engine(folders["llama"]))


LAYER = "base_model.model.model.layers.0.self_attn.q_proj"
A, B = (f"{LAYER}.lora_{side}.weight" for side in "AB")
CONFIGS = {
    "peft_type": ("IA3", "adapter_config.json: peft_type: must be LORA, got 'IA3'"),
    "use_dora": (True, "adapter_config.json: use_dora: not supported"),
    "bias": ("all", "adapter_config.json: bias: must be none, got 'all'"),
    "modules_to_save": (["lm_head"], "adapter_config.json: modules_to_save: not supported"),
    "lora_bias": (True, "adapter_config.json: lora_bias: not supported"),
    "r": (65, "adapter_config.json: r: must be from 1 to --max-lora-rank 64, got 65"),
    "lora_alpha": ("much", "adapter_config.json: lora_alpha: must be"),
    "alpha_pattern": (
        {"q_proj": 1e300},
        "q_proj.lora_B.weight: not all of its values, scaled by lora_alpha, are finite",
    ),
    "rank_pattern": ({"(": 4}, r"adapter_config.json: pattern '\('"),
}


OTHERS = "base_model.model"
HEAD, NINTH = (f"{OTHERS}.{layer}.lora_A.weight" for layer in ("lm_head", "model.layers.9.self_attn.q_proj"))
TENSORS: dict[str, tuple[dict[str, Tensor | None] | None, str]] = {
    "a rank of 8": ({A: torch.zeros(8, 64)}, rf"{A}: must have the shape \[4, 64\], got \[8, 64\]"),
    "another width": ({B: torch.zeros(128, 4)}, rf"{B}: must have the shape \[64, 4\], got \[128, 4\]"),
    "integers": ({A: torch.zeros(4, 64).char()}, f"{A}: the dtype must be one of .*float16, got int8"),
    "infinite": ({A: torch.full((4, 64), torch.inf)}, f"{A}: not all of its values, .* are finite"),
    "one side": ({B: None}, f"{B}: is missing"),
    "of the head": ({HEAD: torch.zeros(4, 64)}, f"{HEAD}: the model has no such linear layer"),
    "of a layer too many": ({NINTH: torch.zeros(4, 64)}, f"{NINTH}: the model has no such linear layer"),
    "a bias": ({f"{LAYER}.lora_B.bias": torch.zeros(64)}, f"{LAYER}.lora_B.bias: not supported"),
    "no tensor": (None, "adapter_model.safetensors: has no tensor"),
}
"""Changes of an adapter's tensors; None leaves one out, or all."""


@pytest.mark.parametrize("change", [*CONFIGS, *TENSORS])
def test_an_unsupported_field_or_tensor_is_named(
    change: str, table: Adapters, folders: dict[str, Path], tmp_path: Path
) -> None:
    config, tensors = read(folders["llama"] / "one")
    if change in CONFIGS:
        config[change], message = CONFIGS[change]
    else:
        changes, message = TENSORS[change]
        changed = {} if changes is None else tensors | changes
        tensors = {name: tensor for name, tensor in changed.items() if tensor is not None}
    assert_refused(table, write(tmp_path, config, tensors), message)


Q_PATH = "model.layers.1.self_attn.q_proj"
LAYERS = "|".join(map(str, range(80)))
PATTERNS = {
    r"(\w|\w)*x": "no repeated group",
    r"(?x:(.+) +x)": "no repeated group",
    r"(.+)(?#)+x": "no repeated group",
    ".*.*.*.*.*x": "at most 1048576 ways to match",
    ".?" * 80 + "x": "at most 1048576 ways to match, .* got far more",
    r"([a-z]|\w)" * 40 + "x": "at most 1048576 ways to match",
    "q" * 1025: "at most 1024 characters, got 1025",
    "q{99999999999}": "the repetition number is too large",
    "(" * 500 + ")" * 500: "maximum recursion depth",
}


@pytest.fixture
def usual_recursion_limit() -> Iterator[None]:
    """Undo what imports of PyTorch's compiler raised."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(1000)
    yield
    sys.setrecursionlimit(before)


@pytest.mark.usefixtures("usual_recursion_limit")
@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_pattern_that_could_be_searched_for_ever_is_refused(pattern: str) -> None:
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8}
    with pytest.raises(AdapterError, match=f"adapter_config.json: pattern .*: {PATTERNS[pattern]}"):
        parse_config(json.dumps(config | {"rank_pattern": {pattern: 4}}).encode(), 64).rank(Q_PATH)


@pytest.mark.parametrize(
    "pattern",
    [
        r".*layers\.(0|1)\..*",
        rf"model\.layers\.({LAYERS})\.(self_attn|mlp)\.[a-z]_proj",
        r"model\.layers\.[0-9]+\.(?:self_attn|mlp)\.(q|k|v)_[^.]*",
        r"^(?!.*mlp).*q_proj",
    ],
)
def test_a_pattern_of_layers_and_modules_is_searched(pattern: str) -> None:
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "alpha_pattern": {pattern: 2}}
    parsed = parse_config(json.dumps(config).encode(), 64)
    assert [parsed.scale(path, 4) for path in (Q_PATH, "lm_head")] == [0.5, 2.0]


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("adapter_config.json", None, "adapter_config.json: cannot be read"),
        ("adapter_config.json", b"[" * 100_000, "adapter_config.json: is not JSON"),
        ("adapter_config.json", b"[]", "adapter_config.json: is not an object"),
        ("adapter_config.json", b'{"peft_type": "LORA"}', "adapter_config.json: r: is required"),
        ("adapter_model.safetensors", None, "adapter_model.safetensors: cannot be read"),
        ("adapter_model.safetensors", b"\xff" * 64, "adapter_model.safetensors: is not a safetensors file"),
        ("adapter_model.safetensors", bytes(2**23), "adapter_model.safetensors: has more than the"),
    ],
)
def test_invalid_files_are_named(
    file: str, content: bytes | None, message: str, table: Adapters, folders: dict[str, Path], tmp_path: Path
) -> None:
    folder = write(tmp_path, *read(folders["llama"] / "one"))
    (folder / file).unlink()
    if content is not None:
        (folder / file).write_bytes(content)
    assert_refused(table, folder, message)


@pytest.mark.parametrize("file", ["adapter_config.json", "adapter_model.safetensors"])
@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
def test_special_files_are_refused_unread(
    file: str, kind: str, table: Adapters, folders: dict[str, Path], tmp_path: Path
) -> None:
    """A read of a pipe would wait, and one of a device might never end."""
    folder = write(tmp_path, *read(folders["llama"] / "one"))
    (folder / file).unlink()
    match kind:
        case "pipe":
            os.mkfifo(folder / file)
        case "device":
            (folder / file).symlink_to("/dev/zero")
        case "folder":
            (folder / file).mkdir()
    assert_refused(table, folder, f"{file}: (is not a regular file|cannot be read: .*Is a directory)")


def assert_refused(table: Adapters, adapter: Path, message: str) -> None:
    with pytest.raises(AdapterError, match=message):
        table.load("bad", str(adapter))


def test_an_unusable_adapter_is_named_at_the_start(folders: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match=r"--lora-modules: sql: adapter_config.json: cannot be read"):
        make_engine(folders["llama"], lora_modules={"sql": str(folders["llama"] / "sql")})
