"""`tandem quantize`: from a model and texts to a quantized checkpoint with a card that says what it lost."""

from __future__ import annotations

import dataclasses
import hashlib
import shlex
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from engine.fingerprint import model_fingerprint
from engine.loader import choose_device, choose_dtype
from protocol.errors import ConfigError
from quantization import card, checkpoint, methods
from quantization.calibration import Calibration, find_blocks, linears
from quantization.evaluation import HeldOut, TextQuality, predict
from quantization.recipe import Method, Recipe
from quantization.source import Source
from quantization.unfinished import Block, Unfinished, check_output
from training.data import encode_texts, read_texts

HELD_OUT_SHARE = 0.05
HELD_OUT_WINDOWS = 64
DEFAULT_LENGTH = 512
_BEFORE = "before.json"


@dataclass(frozen=True)
class QuantizeOptions:
    """The command's options by their names; None is the method's or the model's default."""

    method: Method
    model: str
    output: Path
    data: Path | None
    held_out: Path | None = None
    bits: int | None = None
    group_size: int | None = None
    desc_act: bool = False
    samples: int = 128
    sequence_length: int | None = None
    seed: int = 0
    device: str = "auto"


def quantize(options: QuantizeOptions, console: Console) -> card.Result:
    """Calibrate, quantize, measure, save. A run that was stopped goes on after its last finished block.

    Raises `ConfigError` that names the option, before anything is written.
    """
    recipe = Recipe.choose(options.method, options.bits, options.group_size, options.desc_act)
    if options.data is None:
        raise ConfigError(
            "--data: missing; give text to calibrate with and to measure on: a file, a folder of files, or "
            'JSONL with a "text" in each line'
        )
    check_output(options.output)
    source = Source.open(options.model)
    tokenizer = _load(AutoTokenizer, source)
    model = _model(source, options.device)
    length = _length(options.sequence_length, model)
    samples = options.samples if recipe.calibrates else 0
    windows, text = _texts(options, options.data, samples, length, tokenizer)
    job = _Job(model, recipe, source)
    unfinished = Unfinished(options.output, _settings(options, recipe, model, windows, text))
    before = _before(unfinished, model, text)
    console.print(
        f"{options.model}: {card.describe(recipe)}; {len(job.blocks)} blocks, {windows.numel():,} tokens of "
        f"calibration; before: perplexity {before.perplexity:.4f}, {before.bits_per_byte:.4f} bits per byte"
    )
    job.run(unfinished, windows, console)
    after = predict(model, text)
    size = job.write(options.output, unfinished)
    result = card.Result(before, after, source.size, size)
    card.write(options.output, options.model, _command(options, recipe, length), recipe, text, result)
    unfinished.remove()
    console.print(
        f"after: perplexity {after.perplexity:.4f}, {after.bits_per_byte:.4f} bits per byte "
        f"({result.change:+.2%}); saved in {options.output}"
    )
    return result


class _Job:
    """Quantizes `model` in place. Raises `ConfigError` for layers that do not fit."""

    def __init__(self, model: PreTrainedModel, recipe: Recipe, source: Source) -> None:
        self._model, self._recipe, self._source = model, recipe, source
        self._name, self.blocks = find_blocks(model)
        layers = linears(self.blocks)
        recipe.check({f"{self._name}.{name}": layer for name, layer in layers.items()})
        for name in layers:
            tensor = f"{self._name}.{name}.weight"
            if not source.has(tensor):
                raise ConfigError(f"--model: {source.folder} has no tensor {tensor}")

    def run(self, unfinished: Unfinished, windows: Tensor, console: Console) -> None:
        calibration = Calibration.begin(self._model, windows) if self._recipe.calibrates else None
        finished = sum(unfinished.has(index) for index in range(len(self.blocks)))
        if finished:
            console.print(f"going on after {finished} finished blocks")
        others = _other_weights(self.blocks)
        if others:
            console.print(
                f"{self._name}.{others[0]} and {len(others) - 1} more stay as they are: not linear layers "
                "(nn.Linear), such as experts that are one tensor"
            )
        logged: set[str] = set()

        def log(message: str) -> None:
            if message not in logged:
                logged.add(message)
                console.print(message)

        with _Bar(len(self.blocks), console) as bar:
            for index, block in enumerate(self.blocks):
                is_new = not unfinished.has(index)
                if is_new:
                    unfinished.save(index, self._quantize(block, calibration, log))
                else:
                    _put(block, unfinished.load(index))
                if calibration is not None and index + 1 < len(self.blocks):
                    calibration.advance()
                bar.advance(index, is_new)

    @torch.inference_mode()
    def _quantize(
        self, block: nn.Module, calibration: Calibration | None, log: Callable[[str], None]
    ) -> Block:
        before = {name: tensor.clone() for name, tensor in _others(block).items()}
        if calibration is None:
            quantized = methods.round_block(self._recipe, block)
        else:
            quantized = methods.calibrate_block(self._recipe, calibration, log)
        others = _others(block)
        return Block(quantized, {n: t for n, t in others.items() if not torch.equal(t, before[n])})

    def write(self, output: Path, unfinished: Unfinished) -> int:
        """The checkpoint; returns the bytes of its weights."""
        prefixes = {f"{self._name}.{index}.": index for index in range(len(self.blocks))}
        unquantized = [name for name in linears(self._model) if not name.startswith(f"{self._name}.")]
        unquantized += [f"{self._name}.{name}" for name in _other_weights(self.blocks)]
        layout = self._recipe.layout()
        return checkpoint.write(output, self._source, layout, prefixes, unfinished.load, unquantized)


class _Bar:
    """Blocks done and time left; a line for each block where nobody watches."""

    def __init__(self, total: int, console: Console) -> None:
        columns = (TextColumn("block"), BarColumn(), TextColumn("{task.completed}/{task.total}"))
        self._console, self._total = console, total
        self._progress = Progress(*columns, TimeRemainingColumn(), console=console, transient=True)
        self._task = self._progress.add_task("", total=total)
        self._started, self._quantized = time.monotonic(), 0

    def __enter__(self) -> _Bar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def advance(self, index: int, is_new: bool) -> None:
        self._progress.update(self._task, completed=index + 1)
        self._quantized += is_new
        if is_new and not self._console.is_terminal:
            left = (self._total - index - 1) * (time.monotonic() - self._started) / self._quantized
            self._console.print(f"block {index + 1} of {self._total} done, about {left:.0f} s left")


def _other_weights(blocks: nn.Module) -> list[str]:
    """The modules that have matrices of their own and are no linear layers."""
    return [
        name
        for name, module in blocks.named_modules()
        if not isinstance(module, nn.Linear) and any(p.ndim > 1 for p in module.parameters(recurse=False))
    ]


def _others(block: nn.Module) -> dict[str, Tensor]:
    """What belongs to a block beside its linear layers' weights."""
    weights = {f"{name}.weight" for name in linears(block)}
    return {name: tensor for name, tensor in block.state_dict().items() if name not in weights}


@torch.inference_mode()
def _put(block: nn.Module, saved: Block) -> None:
    methods.put(block, saved.quantized)
    others = _others(block)
    for name, tensor in saved.changed.items():
        others[name].copy_(tensor)


def _load(kind: Any, source: Source, **options: Any) -> Any:
    try:
        return kind.from_pretrained(source.folder, **options)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--model: cannot load {str(source.folder)!r}: {error}") from error


def _model(source: Source, requested: str) -> PreTrainedModel:
    device = choose_device(requested)
    model = _load(AutoModelForCausalLM, source, dtype="auto")
    dtype = choose_dtype("auto", model.config, device)
    loaded: PreTrainedModel = model.to(device, dtype).eval().requires_grad_(False)
    return loaded


def _length(requested: int | None, model: PreTrainedModel) -> int:
    config = model.config.get_text_config(decoder=True)
    longest = getattr(config, "max_position_embeddings", None)
    if requested is None:
        return min(DEFAULT_LENGTH, longest or DEFAULT_LENGTH)
    if longest is not None and requested > longest:
        raise ConfigError(f"--sequence-length: {requested} exceeds the model's {longest} positions")
    return requested


def _texts(
    options: QuantizeOptions, data: Path, samples: int, length: int, tokenizer: PreTrainedTokenizerBase
) -> tuple[Tensor, HeldOut]:
    """Windows to calibrate with, int64 [samples, length], and those to measure on."""
    stream = encode_texts(read_texts(data), tokenizer)
    given = len(stream)
    if options.held_out is not None:
        held_out = encode_texts(read_texts(options.held_out, "--held-out"), tokenizer)
    else:
        kept = len(stream) - max(length, int(len(stream) * HELD_OUT_SHARE))
        stream, held_out = stream[: max(0, kept)], stream[max(0, kept) :]
    windows = _windows(stream, length)
    if len(windows) < samples:
        raise ConfigError(
            f"--data: {data} has {given:,} tokens, {len(stream):,} of them to calibrate with, and "
            f"{samples} samples of {length} are {samples * length:,} (--samples, --sequence-length)"
        )
    measured = _windows(held_out, length)
    if not len(measured):
        raise ConfigError(f"--held-out: {len(held_out)} tokens are less than a window of {length}")
    order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(options.seed))
    spread = torch.linspace(0, len(measured) - 1, min(HELD_OUT_WINDOWS, len(measured))).long()
    return windows[order[:samples]], HeldOut.of(measured[spread], tokenizer)


def _windows(stream: Tensor, length: int) -> Tensor:
    return stream[: len(stream) // length * length].view(-1, length).long()


def _settings(
    options: QuantizeOptions, recipe: Recipe, model: PreTrainedModel, windows: Tensor, text: HeldOut
) -> dict[str, Any]:
    """What a run depends on, by the names of options where there are some."""
    return {
        "model": options.model,
        "weights": model_fingerprint(model).hex(),
        **dataclasses.asdict(recipe),
        "samples": len(windows),
        "sequence_length": windows.shape[1],
        "seed": options.seed,
        "data": _hash(windows),
        "held_out": _hash(text.windows),
    }


def _hash(tokens: Tensor) -> str:
    return hashlib.blake2b(tokens.numpy().tobytes(), digest_size=8).hexdigest()


def _before(unfinished: Unfinished, model: PreTrainedModel, text: HeldOut) -> TextQuality:
    noted = unfinished.noted(_BEFORE)
    if noted is None:
        noted = dataclasses.asdict(predict(model, text))
        unfinished.note(_BEFORE, noted)
    return TextQuality(**noted)


def _command(options: QuantizeOptions, recipe: Recipe, length: int) -> str:
    given = {
        "--model": options.model,
        "--method": recipe.method,
        "--bits": recipe.bits,
        "--group-size": recipe.group_size,
        "--data": options.data,
        "--held-out": options.held_out,
        "--output": options.output,
        "--samples": options.samples,
        "--sequence-length": length,
        "--seed": options.seed,
    }
    words = [word for flag, value in given.items() if value is not None for word in (flag, str(value))]
    return shlex.join(["tandem", "quantize", *words, *(["--desc-act"] if recipe.desc_act else [])])
