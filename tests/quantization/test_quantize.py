"""`tandem quantize`: from the command line to a loadable checkpoint; resuming; bad input."""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, Qwen3MoeConfig
from typer.testing import CliRunner

from deploy.cli import app
from engine.load.loader import load_model
from protocol.config import ServeConfig
from quantization import command, methods
from quantization.preparation import PreparedRun, QuantizeOptions, prepare
from quantization.texts import HeldOut, predict
from tests.e2e.architectures import GEMMA4_EXPERTS, config_of
from tests.full_disk import full_disk
from tests.quantization.tiny import GROUP, LENGTH, tiny_config, tiny_model, windows, write_tiny
from tests.speculation.tiny_trained import write_text, write_tiny_tokenizer
from training.output import only_run

FILES = {"README.md", "config.json", "model.safetensors", "generation_config.json"}
CALIBRATED = ["--group-size", GROUP, "--samples", 8]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny(folder / "model")
    write_text(folder / "text", lines=200)
    return folder


def run(folder: Path, output: Path, method: str, *options: Any, **changes: Any) -> str:
    """Run the command and return its output on one line, with "error: " before a refusal."""
    given = {"--model": folder / "model", "--data": folder / "text", "--output": output} | changes
    given |= {"--method": method, "--sequence-length": LENGTH}
    words = [str(word) for pair in given.items() if pair[1] is not None for word in pair]
    result = CliRunner().invoke(app, ["quantize", *words, *map(str, options)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    text = re.sub(r"\s+", " ", result.output)
    return f"error: {text}" if result.exit_code else text


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def quantized_model(monkeypatch: pytest.MonkeyPatch) -> list[PreTrainedModel]:
    """Collect the models that runs have quantized in place."""
    seen: list[PreTrainedModel] = []

    def keep(model: PreTrainedModel, text: Any) -> Any:
        seen.append(model)
        return predict(model, text)

    monkeypatch.setattr(command, "predict", keep)
    return seen


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("awq", CALIBRATED),
        ("gptq", CALIBRATED),
        ("gptq", [*CALIBRATED, "--desc-act", "--bits", 8]),
        ("int8", []),
        ("fp8", []),
    ],
    ids=["awq", "gptq", "gptq in another order, 8 bits", "int8", "fp8"],
)
def test_a_written_checkpoint_loads_and_computes_the_same(
    folder: Path, tmp_path: Path, quantized_model: list[PreTrainedModel], method: str, options: list[Any]
) -> None:
    output = tmp_path / "out"
    said = run(folder, output, method, *options)
    assert "saved in" in said and "block 2 of 2 done, about 0 s left" in said
    files = contents(output)
    assert files.keys() >= FILES and "unfinished" not in files
    assert files["tokenizer.json"] == (folder / "model/tokenizer.json").read_bytes()
    expected = quantized_model[-1](input_ids=windows(), use_cache=False).logits
    loaded = load_model(ServeConfig(model=str(output), device="cpu", max_model_len=64)).model
    loaded.set_attn_implementation("eager")
    logits = loaded(input_ids=windows(), use_cache=False).logits
    assert torch.allclose(logits, expected, atol=1e-3)
    original = AutoModelForCausalLM.from_pretrained(folder / "model")
    assert not torch.allclose(original(input_ids=windows(), use_cache=False).logits, expected, atol=1e-2)


def test_the_card_reports_the_loss(folder: Path, tmp_path: Path) -> None:
    run(folder, tmp_path / "out", "int8")
    card = (tmp_path / "out/README.md").read_text()
    figures = re.search(r"bits per byte \| ([\d.]+) \| ([\d.]+) \| ([+-][\d.]+)%", card)
    assert figures is not None
    before, after, change = map(float, figures.groups())
    assert after / before - 1 == pytest.approx(change / 100, abs=2e-4)
    assert f"tandem quantize --model {folder / 'model'} --method int8 --bits 8" in card
    assert re.search(r"perplexity \| [\d.]+ \| [\d.]+ ", card) and "torch " in card


def test_perplexity_and_bits_per_byte(tmp_path: Path) -> None:
    write_tiny_tokenizer(tmp_path)
    tokens = windows()
    tokens[:, 1:] = tokens[:, 1:].clamp(1, 80)
    text = HeldOut.of(tokens, AutoTokenizer.from_pretrained(tmp_path))
    assert text.num_tokens == 6 * 31
    assert text.num_bytes == 6 * 31, "ASCII is a byte a token"
    model = tiny_model()
    found = predict(model, text)
    nats = model(input_ids=tokens, labels=tokens, use_cache=False).loss.item()
    assert found.perplexity == pytest.approx(math.exp(nats), rel=1e-5)
    assert found.bits_per_byte == pytest.approx(nats / math.log(2), rel=1e-5)


class Killed(Exception):  # noqa: N818
    """Raised in place of the process's end."""


def test_a_killed_run_resumes_and_writes_the_same(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """AWQ changes the modules before a block's layers, too."""
    run(folder, tmp_path / "whole", "awq", *CALIBRATED)
    calibrate, blocks = methods.calibrate_block, []

    def dying(recipe: Any, calibration: Any, log: Any) -> Any:
        blocks.append(calibration.position)
        if blocks == [0, 1]:
            raise Killed
        return calibrate(recipe, calibration, log)

    monkeypatch.setattr(methods, "calibrate_block", dying)
    with pytest.raises(AssertionError, match="Killed"):
        run(folder, tmp_path / "out", "awq", *CALIBRATED)
    assert not (tmp_path / "out/config.json").exists()
    changed = run(folder, tmp_path / "out", "awq", *CALIBRATED, "--seed", 1)
    assert "is of a run with seed 0, this has 1: give the same options" in changed
    assert "going on after 1 finished blocks" in run(folder, tmp_path / "out", "awq", *CALIBRATED)
    assert blocks == [0, 1, 1]
    whole, resumed = contents(tmp_path / "whole"), contents(tmp_path / "out")
    assert whole.keys() == resumed.keys()
    for name in whole.keys() - {"README.md"}:
        assert whole[name] == resumed[name], name


def test_a_full_disk_is_named_and_its_run_resumed(folder: Path, tmp_path: Path) -> None:
    with full_disk(2000):
        said = run(folder, tmp_path / "out", "int8")
    assert said.startswith("error: ") and "block-00000.safetensors cannot be written" in said
    assert "saved in" in run(folder, tmp_path / "out", "int8")


def test_one_run_at_a_time_writes_a_checkpoint(folder: Path, tmp_path: Path) -> None:
    with only_run(tmp_path / "out", "--output"):
        said = run(folder, tmp_path / "out", "int8")
    assert said.startswith("error: ") and "--output: another run writes to" in said
    assert not contents(tmp_path / "out")


def test_a_run_of_another_model_is_not_resumed(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(folder / "model", tmp_path / "model")
    monkeypatch.setattr(methods, "round_block", lambda *_: dict[str, object]()[""])
    with pytest.raises(AssertionError, match="KeyError"):
        run(tmp_path, tmp_path / "out", "int8", **{"--data": folder / "text"})
    path = tmp_path / "model/model.safetensors"
    tensors = load_file(path)
    tensors["model.norm.weight"] += 1
    save_file(tensors, path, metadata={"format": "pt"})
    said = run(tmp_path, tmp_path / "out", "int8", **{"--data": folder / "text"})
    assert "is of a run with weights " in said


def test_experts_are_not_quantized(folder: Path, tmp_path: Path) -> None:
    sizes = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 16}
    config = Qwen3MoeConfig(**{**tiny_config().to_dict(), **sizes, "model_type": "qwen3_moe"})
    tiny_model(config).save_pretrained(tmp_path / "model")
    for path in (folder / "model").glob("token*"):
        shutil.copy(path, tmp_path / "model")
    said = run(tmp_path, tmp_path / "out", "gptq", *CALIBRATED, **{"--data": folder / "text"})
    assert re.search(r"model.layers.0.mlp.\w+ and 3 more stay as they are: not linear layers", said)
    config = json.loads((tmp_path / "out/config.json").read_text())
    kept = config["quantization_config"]["modules_to_not_convert"]
    assert {"lm_head", "model.layers.0.mlp.gate", "model.layers.1.mlp.experts"} < set(kept)
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("model", "out"))
    experts = [name for name in before if "experts" in name]
    assert experts and all(torch.equal(before[name], after[name]) for name in experts)
    assert "model.layers.1.self_attn.o_proj.qweight" in after
    load_model(ServeConfig(model=str(tmp_path / "out"), device="cpu", max_model_len=64))


def test_routers_are_not_quantized(folder: Path, tmp_path: Path) -> None:
    """Gemma 4's is a linear layer."""
    config = config_of("gemma4_text", **GEMMA4_EXPERTS | {"vocab_size": tiny_config().vocab_size})
    tiny_model(config).save_pretrained(tmp_path / "model")
    for path in (folder / "model").glob("token*"):
        shutil.copy(path, tmp_path / "model")
    assert "saved in" in run(tmp_path, tmp_path / "out", "int8", **{"--data": folder / "text"})
    kept = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]["ignore"]
    assert {"model.layers.0.router.proj", "model.layers.0.experts"} < set(kept)
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("model", "out"))
    router = "model.layers.0.router.proj.weight"
    assert torch.equal(before[router], after[router])
    assert after["model.layers.0.mlp.up_proj.weight"].dtype is torch.int8
    load_model(ServeConfig(model=str(tmp_path / "out"), device="cpu", max_model_len=64))


def test_shards_are_kept(folder: Path, tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path / "model", max_shard_size="100KB")
    for path in (folder / "model").glob("token*"):
        shutil.copy(path, tmp_path / "model")
    assert "saved in" in run(tmp_path, tmp_path / "sharded", "int8", **{"--data": folder / "text"})
    assert "saved in" in run(folder, tmp_path / "single", "int8")
    index = json.loads((tmp_path / "sharded/model.safetensors.index.json").read_text())["weight_map"]
    single = load_file(tmp_path / "single/model.safetensors")
    assert index.keys() == single.keys() and len(set(index.values())) > 1
    for name, file in index.items():
        assert torch.equal(load_file(tmp_path / "sharded" / file)[name], single[name])


def test_defaults_are_chosen_and_named(folder: Path, tmp_path: Path) -> None:
    """The largest group that fits, and all of a short text."""
    (tmp_path / "short.txt").write_text("".join(chr(48 + number * number % 71) for number in range(300)))
    said = run(folder, tmp_path / "out", "gptq", **{"--data": tmp_path / "short.txt"})
    assert "--group-size 32: the largest that divides the layers' inputs (64 and 96)" in said
    assert "gptq, 4 bits, a scale for each 32 inputs" in said
    assert "--samples 8: all that --data has; 128 are the usual number" in said
    assert "--samples 8 " in (tmp_path / "out/README.md").read_text()
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["quantization_config"]["group_size"] == 32


def test_quality_is_not_measured_on_calibration_text(folder: Path, tmp_path: Path) -> None:
    text = "".join(chr(48 + number * number % 71) for number in range(300))
    (tmp_path / "data.txt").write_text(text)
    (tmp_path / "other.txt").write_text(
        text[: 2 * LENGTH] + "never seen, and longer than a window of tokens" * 2
    )
    options = {"--data": tmp_path / "data.txt", "--held-out": tmp_path / "data.txt"}
    said = run(folder, tmp_path / "out", "gptq", **options)
    assert "--held-out: each of its windows of 32 tokens shares 32 in a row with the text of --data" in said
    said = run(folder, tmp_path / "out", "gptq", **(options | {"--held-out": tmp_path / "other.txt"}))
    assert "2 windows of the text to measure on are left out, as they share 32 tokens in a row" in said
    shares = "none of which shares 32 tokens in a row with the calibration"
    assert shares in (tmp_path / "out/README.md").read_text()
    run(folder, tmp_path / "int8", "int8", **options)
    assert shares not in (tmp_path / "int8/README.md").read_text(), "nothing was calibrated"


# --- bad input --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "options", "said"),
    [
        ("gguf", [], "'gguf' is not one of 'awq', 'gptq', 'int8', 'fp8'"),
        ("awq", ["--bits", 3], "--bits: awq has 4 bits, not 3"),
        ("gptq", ["--group-size", 48], "--group-size: 48 is not 32 or 64 or 128"),
        ("int8", ["--group-size", 32], "--group-size: int8 has a scale for each output channel"),
        ("int8", ["--sequence-length", 200], "--sequence-length: 200 exceeds the model's 128 positions"),
        ("gptq", ["--model", "tandem-code-1m", "--samples", 9000], "9000 samples of 32 are 288,000"),
        ("awq", [*CALIBRATED, "--desc-act"], "--desc-act: is for --method gptq, not awq"),
    ],
)
def test_options_that_do_not_fit(
    folder: Path, tmp_path: Path, method: str, options: list[Any], said: str
) -> None:
    output = run(folder, tmp_path / "out", method, *options)
    assert output.startswith("error: ") and said in output
    assert not (tmp_path / "out").exists()


def test_all_faults_are_reported_at_once_before_loading(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "load_frozen", lambda *_: pytest.fail("loaded"))
    (tmp_path / "out").write_text("mine")
    faults = {"--bits": 3, "--group-size": 64, "--samples": 9000, "--held-out": tmp_path / "none"}
    said = run(folder, tmp_path / "out", "gptq", **faults)
    for fault in (
        f"--output: {tmp_path / 'out'} is a file",
        "--bits: gptq has 4 or 8 bits, not 3",
        "--group-size: 64 does not divide the 96 inputs of model.layers.0.mlp.down_proj; 32 divides those",
        f"--held-out: {tmp_path / 'none'} does not exist",
    ):
        assert fault in said
    said = run(folder, tmp_path / "out", "gptq", **(faults | {"--held-out": None}))
    assert "--group-size: 64" in said and "9000 samples of 32 are 288,000" in said


def test_data_that_is_missing_or_too_short(folder: Path, tmp_path: Path) -> None:
    assert "--data: missing; give text to calibrate with" in run(
        folder, tmp_path / "out", "awq", **{"--data": None}
    )
    (tmp_path / "short.txt").write_text("not much text")
    for method, change, said in (
        ("awq", "--data", "has 14 tokens, 0 of them to calibrate with, and 2 samples of 32 are 64"),
        ("int8", "--data", "--held-out: 14 tokens are less than a window of 32"),
        ("int8", "--held-out", "--held-out: 14 tokens are less than a window of 32"),
    ):
        options = ["--group-size", 32] if method == "awq" else []
        assert said in run(folder, tmp_path / "out", method, *options, **{change: tmp_path / "short.txt"})
    assert not (tmp_path / "out").exists()


def test_a_folder_with_something_else_is_no_output(folder: Path) -> None:
    said = run(folder, folder / "model", "int8")
    assert f"--output: {folder / 'model'} has other files already (config.json)" in said


def test_a_checkpoint_that_another_run_has_finished_meanwhile_stays(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def prepared_slowly(options: QuantizeOptions) -> PreparedRun:
        prepared = prepare(options)
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "config.json").touch()
        return prepared

    monkeypatch.setattr("quantization.command.prepare", prepared_slowly)
    assert "has other files already (config.json)" in run(folder, tmp_path / "out", "int8")
    assert list(contents(tmp_path / "out")) == ["config.json"]


def test_a_model_in_the_home_folder_is_found(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(folder))
    said = run(folder, tmp_path / "out", "int8", "--bits", 3, **{"--model": "~/model"})
    assert said == "error: tandem: --bits: int8 has 8 bits, not 3 "


def test_folders_without_a_model_are_refused(folder: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(folder / "model", model)
    (model / "model.safetensors").rename(model / "model.bin")
    options = {"--data": folder / "text"}
    said = run(tmp_path, tmp_path / "out", "int8", **options)
    assert f"--model: {model} has neither model.safetensors nor model.safetensors.index.json" in said
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "awq"}}))
    said = run(tmp_path, tmp_path / "out", "int8", **options)
    assert f"--model: {model} is quantized already (awq); give the original model" in said
    assert not (tmp_path / "out").exists()


def test_layers_whose_outputs_do_not_fill_a_word(folder: Path, tmp_path: Path) -> None:
    write_tiny(tmp_path / "model", num_attention_heads=8, num_key_value_heads=1, head_dim=4, hidden_size=32)
    said = run(tmp_path, tmp_path / "out", "gptq", *CALIBRATED, **{"--data": folder / "text"})
    assert (
        "--method: gptq packs 8 outputs in a word, which does not divide the 4 of "
        "model.layers.0.self_attn.k_proj" in said
    )
