"""Commands that need no running server: simulate, measure, train draft heads, choose layers, quantize."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal

import typer

from checkpoints.source import is_gguf
from deploy.commands import Command, fail
from deploy.preflight import check_source
from models.bundled import bundled_path
from protocol.errors import ConfigError


def bench(context: typer.Context) -> None:
    """Measure a server: `tandem bench serve --help`."""
    try:
        from bench.cli import app as bench_app

        bench_app(args=context.args, prog_name="tandem bench")
    except ModuleNotFoundError as error:
        raise fail(f"bench needs the package {error.name}: pip install 'tandem-serve[bench]'") from error


def plan(
    trace: Annotated[Path, typer.Option(metavar="FILE", help="JSONL trace in Mooncake's form.")],
    slo_ttft: Annotated[float, typer.Option(help="Limit of the time to the first token, in seconds.")],
    slo_tpot: Annotated[float, typer.Option(help="Limit of the time between two tokens, in seconds.")],
    workers: Annotated[int, typer.Option(help="Prefill and decode workers together, at least 2.")],
    profile: Annotated[Path, typer.Option(metavar="FILE", help="Profile from `tandem profile`.")] = Path(
        "h100-llama-3.1-8b"
    ),
    trace_scale_lengths: Annotated[float, typer.Option(help="Factor on the trace's lengths.")] = 1,
    trace_speedup: Annotated[float, typer.Option(help="Factor on the rate of requests.")] = 1,
    max_input_len: Annotated[int | None, typer.Option(help="Longest prompt; longer ones are cut.")] = None,
    max_output_len: Annotated[int | None, typer.Option(help="Longest output; longer ones are cut.")] = None,
    num_prompts: Annotated[int | None, typer.Option(help="Only the first requests of the trace.")] = None,
    output: Annotated[Path, typer.Option(metavar="FOLDER", help="Folder for plan.json and plan.svg.")] = Path(
        "plan"
    ),
) -> None:
    """Simulate a trace on a number of workers with every split into roles, and recommend a split."""
    options = dict(locals()) | {"trace": str(trace), "profile": str(profile), "output": str(output)}
    from rich.console import Console

    from planner.command import parse
    from planner.command import plan as run

    run(parse(options), Console())


Seed = Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Seed of every random choice.")]

speculate = typer.Typer(help="Drafts for a model of your own.", no_args_is_help=True)


def _found(model: str) -> str:
    """Return the model's folder or hub id, which exists. Import modules that need torch afterwards."""
    if is_gguf(model):
        raise ConfigError(
            f"--model: {model}: only `tandem serve` reads GGUF files; give the folder or hub id of the model "
            "that the file was made from"
        )
    check_source(source := bundled_path(os.path.expanduser(model)), "--model")
    return source


@speculate.command("train", cls=Command)
def speculate_train(
    method: Annotated[Literal["eagle3", "mtp", "medusa"], typer.Option(help="Kind of heads to train.")],
    model: Annotated[str, typer.Option(help="Local folder or hub id of the model to serve.")],
    data: Annotated[
        Path | None,
        typer.Option(help='Text: a file, a folder of files, or JSONL with a "text" in each line.'),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(help='Learn from answers to these: lines, or JSONL with "prompt" or "messages".'),
    ] = None,
    answer_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of an answer.")] = 256,
    output: Annotated[
        Path | None, typer.Option(help="Folder for the heads. Default: the model's name and the method's.")
    ] = None,
    held_out: Annotated[
        Path | None,
        typer.Option(help="Text, or prompts, to measure on. Default: a twentieth of the data."),
    ] = None,
    depth: Annotated[
        int | None, typer.Option(min=1, help="Tokens to draft, the number of Medusa's heads.")
    ] = None,
    num_layers: Annotated[int | None, typer.Option(min=1, help="Layers of each head.")] = None,
    draft_vocab_size: Annotated[
        int | None, typer.Option(min=1, help="Draft only from this many of the most frequent tokens.")
    ] = None,
    epochs: Annotated[int, typer.Option(min=1, help="Times through the data.")] = 4,
    steps: Annotated[int | None, typer.Option(min=1, help="Training steps, instead of --epochs.")] = None,
    batch_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens in a step. Default: up to 4096, fewer with little text.")
    ] = None,
    length: Annotated[int, typer.Option(min=32, help="Tokens in a window.")] = 512,
    learning_rate: Annotated[float, typer.Option(min=0.0)] = 1e-3,
    seed: Seed = 0,
    device: Annotated[Literal["auto", "cpu", "cuda"], typer.Option()] = "auto",
    recording: Annotated[
        Path | None,
        typer.Option(help="Folder that keeps the model's hidden states for other runs. Default: none."),
    ] = None,
    recording_gib: Annotated[float, typer.Option(min=0.001, help="Most GiB of hidden states on disk.")] = 20,
) -> None:
    """Train draft heads on text, or on the model's answers to prompts. Measure them on what is held out.

    Run it again to resume it.
    """
    options = dict(locals())
    options["model"] = model = _found(model)
    from rich.console import Console

    from training.heads.command import TrainOptions, train
    from training.heads.contract import HeadOptions

    options["output"] = output or Path(f"{Path(model).name}-{method}")
    head = HeadOptions(*map(options.pop, ("depth", "num_layers", "draft_vocab_size")))
    train(TrainOptions(head=head, **options), Console())


@speculate.command("choose-layers", cls=Command)
def speculate_choose_layers(
    model: Annotated[str, typer.Option(help="Local folder or hub id of the model to serve.")],
    data: Annotated[
        Path, typer.Option(help='Text to measure on: a file, a folder, or JSONL with a "text" in each line.')
    ],
    output: Annotated[Path, typer.Option(help="File for the value of --speculative-config.")] = Path(
        "layers.json"
    ),
    num_layers: Annotated[
        int | None, typer.Option(min=1, help="Layers to skip. Default: the fastest number, up to half.")
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
    seed: Seed = 0,
    device: Annotated[Literal["auto", "cpu", "cuda"], typer.Option()] = "auto",
) -> None:
    """Quantize a model's linear layers, block by block, and measure it before and after.

    An interrupted run continues when you run the command again.
    """
    options = dict(locals()) | {"model": _found(model)}
    from rich.console import Console

    from quantization.command import quantize as run
    from quantization.preparation import QuantizeOptions

    run(QuantizeOptions(**options), Console())
