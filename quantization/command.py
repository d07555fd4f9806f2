"""`tandem quantize`: a quantized checkpoint of a model, with a model card that states the quality loss."""

from __future__ import annotations

import dataclasses
import hashlib
import platform
import shlex
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from torch import Tensor, nn
from transformers import PreTrainedModel

from engine.load.loader import model_fingerprint
from protocol.version import version
from quantization import checkpoint, methods, texts
from quantization.calibration import Calibration, find_blocks, linears
from quantization.checkpoint import FinishedBlock, Source, Unfinished
from quantization.preparation import PreparedRun, QuantizeOptions, Recipe, prepare
from quantization.texts import SHARED_RUN, HeldOut, TextQuality, predict
from training.data import fast_dtype, load_frozen
from training.output import only_run, write_text


def quantize(options: QuantizeOptions, console: Console) -> None:
    """Calibrate, quantize, measure and save. An interrupted run continues after its last finished block.

    Raises `ConfigError`, which names the option, before it writes anything.
    """
    prepared = prepare(options)
    with only_run(options.output, "--output"):
        checkpoint.check_output(options.output)  # another run may have finished it since
        _run(options, prepared, console)


def _run(options: QuantizeOptions, prepared: PreparedRun, console: Console) -> None:
    recipe, source = prepared.recipe, prepared.source
    windows, text = prepared.texts.calibration, prepared.texts.held_out
    model = load_frozen(str(source.folder), options.device)
    model.to(fast_dtype(model.dtype, model.device))
    job = _Job(model, recipe, source)
    unfinished = Unfinished(options.output, _settings(options, recipe, model, windows, text))
    for line in _choices(options, prepared):
        console.print(line)
    before = predict(model, text)
    console.print(
        f"{options.model}: {_describe(recipe)}; {len(job.blocks)} blocks, {windows.numel():,} tokens of "
        f"calibration; before: perplexity {before.perplexity:.4f}, {before.bits_per_byte:.4f} bits per byte"
    )
    job.run(unfinished, windows, console)
    after = predict(model, text)
    size = job.write(options.output, unfinished)
    card = _card(options, recipe, windows, text, (before, after), (source.size, size))
    write_text(options.output / "README.md", card)
    unfinished.remove()
    console.print(
        f"after: perplexity {after.perplexity:.4f}, {after.bits_per_byte:.4f} bits per byte "
        f"({_change(before.bits_per_byte, after.bits_per_byte)}); saved in {options.output}"
    )


class _Job:
    """One quantization of `model`, in place."""

    def __init__(self, model: PreTrainedModel, recipe: Recipe, source: Source) -> None:
        self._model, self._recipe, self._source = model, recipe, source
        self._name, self.blocks = find_blocks(model)

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

        started, total = time.monotonic(), len(self.blocks)
        for index, block in enumerate(self.blocks):
            is_new = not unfinished.has(index)
            if is_new:
                unfinished.save(index, self._quantize(block, calibration, log))
            else:
                _restore(block, unfinished.load(index))
            if calibration is not None and index + 1 < total:
                calibration.advance()
            if is_new:
                left_s = (total - index - 1) * (time.monotonic() - started) / (index + 1 - finished)
                console.print(f"block {index + 1} of {total} done, about {left_s:.0f} s left")

    @torch.inference_mode()
    def _quantize(
        self, block: nn.Module, calibration: Calibration | None, log: Callable[[str], None]
    ) -> FinishedBlock:
        before = {name: tensor.clone() for name, tensor in _others(block).items()}
        if calibration is None:
            quantized = methods.round_block(self._recipe, block)
        else:
            quantized = methods.calibrate_block(self._recipe, calibration, log)
        others = _others(block)
        return FinishedBlock(quantized, {n: t for n, t in others.items() if not torch.equal(t, before[n])})

    def write(self, output: Path, unfinished: Unfinished) -> int:
        """Write the checkpoint. Return the size of its weights in bytes."""
        prefixes = {f"{self._name}.{index}.": index for index in range(len(self.blocks))}
        unquantized = [name for name in linears(self._model) if not name.startswith(f"{self._name}.")]
        unquantized += [f"{self._name}.{name}" for name in _other_weights(self.blocks)]
        layout = self._recipe.layout()
        return checkpoint.write(output, self._source, layout, prefixes, unfinished.load, unquantized)


def _other_weights(blocks: nn.Module) -> list[str]:
    """Return the names of modules that have matrices of their own but are not quantized."""
    quantized = linears(blocks)
    return [
        name
        for name, module in blocks.named_modules()
        if name not in quantized and any(p.ndim > 1 for p in module.parameters(recurse=False))
    ]


def _others(block: nn.Module) -> dict[str, Tensor]:
    """Return the block's tensors that are not weights of linear layers."""
    weights = {f"{name}.weight" for name in linears(block)}
    return {name: tensor for name, tensor in block.state_dict().items() if name not in weights}


@torch.inference_mode()
def _restore(block: nn.Module, saved: FinishedBlock) -> None:
    methods.set_weights(block, saved.quantized)
    others = _others(block)
    for name, tensor in saved.changed.items():
        others[name].copy_(tensor)


def _choices(options: QuantizeOptions, prepared: PreparedRun) -> Iterator[str]:
    """Yield a line for each defaulted option, and one for the windows that were left out."""
    recipe, found = prepared.recipe, prepared.texts
    if recipe.calibrates and options.group_size is None:
        inputs = " and ".join(f"{count:,}" for count in prepared.inputs)
        yield f"--group-size {recipe.group_size}: the largest that divides the layers' inputs ({inputs})"
    samples = len(found.calibration)
    if recipe.calibrates and options.samples is None and samples < texts.DEFAULT_SAMPLES:
        yield f"--samples {samples}: all that --data has; {texts.DEFAULT_SAMPLES} are the usual number"
    if found.num_seen:
        yield (
            f"{found.num_seen} windows of the text to measure on are left out, as they share "
            f"{texts.SHARED_RUN} tokens in a row with the text to calibrate with"
        )


def _settings(
    options: QuantizeOptions, recipe: Recipe, model: PreTrainedModel, windows: Tensor, text: HeldOut
) -> dict[str, Any]:
    """Return everything that a run's result depends on, keyed by option name where an option exists."""
    return {
        "model": options.model,
        "weights": model_fingerprint(model, model.device.type).hex(),
        **dataclasses.asdict(recipe),
        "samples": len(windows),
        "sequence_length": windows.shape[1],
        "seed": options.seed,
        "data": _hash(windows),
        "held_out": _hash(text.windows),
    }


def _hash(tokens: Tensor) -> str:
    return hashlib.blake2b(tokens.numpy().tobytes(), digest_size=8).hexdigest()


def _command(options: QuantizeOptions, recipe: Recipe, windows: Tensor, text: HeldOut) -> str:
    flags = {
        "--model": options.model,
        "--method": recipe.method,
        "--bits": recipe.bits,
        "--group-size": recipe.group_size,
        "--data": options.data,
        "--held-out": options.held_out,
        "--output": options.output,
        "--samples": len(windows) if recipe.calibrates else None,
        "--sequence-length": text.windows.shape[1],
        "--seed": options.seed,
    }
    words = [word for flag, value in flags.items() if value is not None for word in (flag, str(value))]
    return shlex.join(["tandem", "quantize", *words, *(["--desc-act"] if recipe.desc_act else [])])


def _describe(recipe: Recipe) -> str:
    groups = "each output channel" if recipe.group_size is None else f"each {recipe.group_size} inputs"
    order = ", the largest inputs first (desc_act)" if recipe.desc_act else ""
    return f"{recipe.method}, {recipe.bits} bits, a scale for {groups}{order}"


def _card(
    options: QuantizeOptions,
    recipe: Recipe,
    windows: Tensor,
    text: HeldOut,
    qualities: tuple[TextQuality, TextQuality],
    sizes: tuple[int, int],
) -> str:
    """Return a model card with the qualities and the sizes in bytes before and after."""
    perplexity, bits = (
        (f"{before:.4f}", f"{after:.4f}", _change(before, after))
        for before, after in zip(*map(dataclasses.astuple, qualities), strict=True)
    )
    size = (*(f"{size / 1e6:,.1f}" for size in sizes), _change(*sizes))
    rows = {"perplexity": perplexity, "bits per byte": bits, "weights, MB": size}
    table = "\n".join(f"| {name} | {' | '.join(row)} |" for name, row in rows.items())
    shares = f", none of which shares {SHARED_RUN} tokens in a row with the calibration"
    return f"""# {options.output.name}

`{options.model}` with quantized linear layers: {
        _describe(recipe)
    }. Embeddings, head and norms are not quantized.

| | before | after | |
|---|---|---|---|
{table}

Measured on {text.num_tokens:,} tokens ({text.num_bytes:,} bytes), in windows of {text.windows.shape[1]}{
        shares if recipe.calibrates else ""
    }.

```sh
{_command(options, recipe, windows, text)}
tandem serve --model {options.output}
```

Made with Tandem {version()}, torch {torch.__version__}, Transformers {transformers.__version__},
Python {platform.python_version()}.
"""


def _change(before: float, after: float) -> str:
    return f"{after / before - 1:+.2%}"
