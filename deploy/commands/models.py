"""Commands that train draft heads for a model, choose its layers to skip, or quantize it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from deploy.commands.common import failures
from deploy.hub import check_source
from models.bundled import bundled_path

speculate = typer.Typer(help="Drafts for a model of your own.", no_args_is_help=True)


def _found(model: str) -> str:
    """Return the model's folder or hub id after checking that it exists. Import modules that need torch
    afterwards.
    """
    with failures():
        check_source(source := bundled_path(model), "--model")
    return source


@speculate.command("train")
def speculate_train(
    method: Annotated[Literal["eagle3", "medusa"], typer.Option(help="Kind of heads to train.")],
    model: Annotated[str, typer.Option(help="Local folder or hub id of the model to serve.")],
    data: Annotated[
        Path, typer.Option(help='Text: a file, a folder of files, or JSONL with a "text" in each line.')
    ],
    output: Annotated[
        Path | None, typer.Option(help="Folder for the heads. Default: the model's name and the method's.")
    ] = None,
    held_out: Annotated[
        Path | None, typer.Option(help="Text to measure on. Default: a twentieth of the data.")
    ] = None,
    depth: Annotated[
        int | None, typer.Option(min=1, help="Tokens to draft, the number of Medusa's heads.")
    ] = None,
    num_layers: Annotated[int | None, typer.Option(min=1, help="Layers of each head.")] = None,
    draft_vocab_size: Annotated[
        int | None, typer.Option(min=1, help="Draft only from this many of the most frequent tokens.")
    ] = None,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Training steps. Default: once through the data.")
    ] = None,
    batch_tokens: Annotated[int, typer.Option(min=1, help="Tokens in a step.")] = 4096,
    length: Annotated[int, typer.Option(min=32, help="Tokens in a window.")] = 512,
    learning_rate: Annotated[float, typer.Option(min=0.0)] = 1e-3,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    device: Annotated[Literal["auto", "cpu", "cuda"], typer.Option()] = "auto",
) -> None:
    """Train draft heads on text and measure them on text held out. Run it again to resume it."""
    model = _found(model)
    from rich.console import Console

    from training.heads.command import TrainOptions, train
    from training.heads.contract import HeadOptions

    options = TrainOptions(
        method=method,
        model=model,
        data=data,
        output=output or Path(f"{Path(model).name}-{method}"),
        held_out=held_out,
        head=HeadOptions(depth=depth, num_layers=num_layers, draft_vocab_size=draft_vocab_size),
        steps=steps,
        batch_tokens=batch_tokens,
        length=length,
        learning_rate=learning_rate,
        seed=seed,
        device=device,
    )
    with failures():
        train(options, Console())


@speculate.command("choose-layers")
def speculate_choose_layers(
    model: Annotated[str, typer.Option(help="Local folder or hub id of the model to serve.")],
    data: Annotated[
        Path,
        typer.Option(help='Text to measure on: a file, a folder, or JSONL with a "text" in each line.'),
    ],
    output: Annotated[Path, typer.Option(help="File for the value of --speculative-config.")] = Path(
        "layers.json"
    ),
    num_layers: Annotated[
        int | None,
        typer.Option(min=1, help="Layers to skip. Default: the fastest number, up to half."),
    ] = None,
    windows: Annotated[int, typer.Option(min=1, help="Windows of text to measure on.")] = 8,
    length: Annotated[int, typer.Option(min=32, help="Tokens in a window.")] = 256,
    device: Annotated[Literal["auto", "cpu", "cuda"], typer.Option()] = "auto",
) -> None:
    """Choose the layers that a model skips when it drafts for itself."""
    model = _found(model)
    from rich.console import Console

    from training.layer_choice import ChooseOptions, choose_layers

    options = ChooseOptions(model, data, output, num_layers, windows, length, device)
    with failures():
        choose_layers(options, Console())


def quantize(
    method: Annotated[
        Literal["awq", "gptq", "int8", "fp8"],
        typer.Option(help="Quantization method; awq and gptq calibrate."),
    ],
    model: Annotated[str, typer.Option(help="Local folder or hub id.")],
    output: Annotated[Path, typer.Option(help="Folder for the quantized model.")],
    data: Annotated[
        Path | None,
        typer.Option(help='Text: a file, a folder of files, or JSONL with a "text" in each line.'),
    ] = None,
    held_out: Annotated[
        Path | None, typer.Option(help="Text to measure on. Default: a twentieth of the data.")
    ] = None,
    bits: Annotated[int | None, typer.Option(help="Bits of a weight. Default: 4 for awq and gptq.")] = None,
    group_size: Annotated[
        int | None,
        typer.Option(
            help="Weights that share a scale, for awq and gptq. Default: the largest fitting of 32, 64, 128."
        ),
    ] = None,
    desc_act: Annotated[
        bool, typer.Option("--desc-act", help="gptq: round the inputs with the largest activations first.")
    ] = False,
    samples: Annotated[
        int | None, typer.Option(min=2, help="Windows of text to calibrate with. Default: up to 128.")
    ] = None,
    sequence_length: Annotated[
        int | None, typer.Option(min=32, help="Tokens in a window. Default: 512.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Random seed of the choice of windows.")] = 0,
    device: Annotated[Literal["auto", "cpu", "cuda"], typer.Option()] = "auto",
) -> None:
    """Quantize a model's linear layers, block by block, and measure it before and after.

    An interrupted run continues when you run the command again.
    """
    given = dict(locals()) | {"model": _found(model)}
    from rich.console import Console

    from quantization.command import quantize as run
    from quantization.preparation import QuantizeOptions

    with failures():
        run(QuantizeOptions(**given), Console())
