"""The command line: `tandem serve`, and what talks to a server, trains and measures."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from deploy.config import load_config
from deploy.options import with_config_options
from models.bundled import bundled_path
from protocol.errors import TandemError

DEFAULT_URL = "http://127.0.0.1:8000"

app = typer.Typer(
    help="Serve large language models with prefill and decode on separate workers.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

Url = Annotated[str, typer.Option(help="Base URL of the server.", envvar="TANDEM_URL")]
ApiKey = Annotated[str | None, typer.Option(help="Bearer token.", envvar="TANDEM_API_KEY")]


def fail(error: Exception | str) -> typer.Exit:
    """Print one clear line; the caller raises what this returns."""
    typer.echo(f"tandem: {error}", err=True)
    return typer.Exit(1)


@contextmanager
def _failures() -> Iterator[None]:
    """What Tandem raises on purpose ends the command with one line."""
    try:
        yield
    except TandemError as error:
        raise fail(error) from error


def with_model(flags: dict[str, Any], model_tag: str | None) -> dict[str, Any]:
    """The options, with the model that was given as an argument."""
    if model_tag is None:
        return flags
    if flags["model"] is not None:
        raise fail("--model: given twice, as an option and as an argument")
    return flags | {"model": model_tag}


@app.callback()
def _interruptible(context: typer.Context) -> None:
    """`serve` has handlers of its own. Until then Ctrl-C just ends it: imports may lose an exception."""
    if context.invoked_subcommand != "serve":
        signal.signal(signal.SIGINT, signal.default_int_handler)


@app.command(no_args_is_help=False)
@with_config_options
def serve(
    model_tag: Annotated[
        str | None, typer.Argument(metavar="[MODEL]", help="Local folder or hub id; the same as --model.")
    ] = None,
    config: Annotated[str | None, typer.Option(metavar="FILE", help="YAML file of options.")] = None,
    **flags: Any,
) -> None:
    """Serve a model over HTTP, with the OpenAI API.

    Every option can also be set in the environment (--max-model-len as TANDEM_MAX_MODEL_LEN) or in a YAML
    file (--config). A flag wins over the environment, and that over the file.
    """
    with _failures():
        checked = load_config(with_model(flags, model_tag), config_file=config)
    from deploy.serve import serve as run

    raise typer.Exit(run(checked))


@app.command()
def status(
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    once: Annotated[bool, typer.Option("--once", help="Print one table and end.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the router's JSON and end.")] = False,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks.")] = 1.0,
) -> None:
    """Show workers, roles, load and KV usage, live."""
    from deploy.status import show_status

    with _failures():
        show_status(url, api_key, once=once, as_json=as_json, interval_s=interval)


@app.command()
def top(
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    once: Annotated[bool, typer.Option("--once", help="Print one frame and end.")] = False,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks.")] = 1.0,
) -> None:
    """Show load, KV, links, drafts and their rates, live."""
    from deploy.top import show_top

    with _failures():
        show_top(url, api_key, once=once, interval_s=interval)


Worker = Annotated[str, typer.Argument(help="A worker's id, as `tandem status` shows it.")]


@app.command()
def drain(worker: Worker, url: Url = DEFAULT_URL, api_key: ApiKey = None) -> None:
    """Move a worker's requests to others, with their KV, and have it leave."""
    from deploy.operate import operate

    with _failures():
        operate(url, api_key, f"/workers/{worker}/drain", {})


@app.command()
def role(
    worker: Worker,
    new_role: Annotated[Literal["prefill", "decode"], typer.Argument(help="What it is to be.")],
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
) -> None:
    """Move a worker's requests to others, and have it go on in another role without a restart."""
    from deploy.operate import operate

    with _failures():
        operate(url, api_key, f"/workers/{worker}/role", {"role": new_role})


@app.command()
def restart(url: Url = DEFAULT_URL, api_key: ApiKey = None) -> None:
    """Restart every worker, one after the other. Their requests go on elsewhere, with their KV."""
    from deploy.operate import restart as run

    with _failures():
        run(url, api_key)


@app.command()
def scale(
    prefill: Annotated[str | None, typer.Option(metavar="N", help="Prefill workers.")] = None,
    decode: Annotated[str | None, typer.Option(metavar="N", help="Decode workers.")] = None,
    draft: Annotated[str | None, typer.Option(metavar="N", help="Draft workers.")] = None,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
) -> None:
    """Have so many workers of each role. Requests of workers that leave go on elsewhere, with their KV."""
    from deploy.operate import scale as run

    with _failures():
        run(url, api_key, {"prefill": prefill, "decode": decode, "draft": draft})


@app.command()
def doctor(
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    seconds: Annotated[float, typer.Option(min=0.1, max=60.0, help="How long to watch.")] = 3.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the router's JSON.")] = False,
) -> None:
    """Name what keeps requests waiting now, with its figures and what to change."""
    from deploy.doctor import show_findings

    with _failures():
        show_findings(url, api_key, seconds=seconds, as_json=as_json)


keys = typer.Typer(help="API keys.", no_args_is_help=True)
app.add_typer(keys, name="key")


@keys.callback()
def _keys() -> None:
    """Keeps `add` a command of its own while there is no other."""


@keys.command("add")
def add_key(
    name: Annotated[str, typer.Argument(help="Whose it is, as metrics and logs show it.")],
    api_key_file: Annotated[
        str, typer.Option(metavar="FILE", envvar="TANDEM_API_KEY_FILE", help="It is made if it is not there.")
    ],
    requests_per_minute: Annotated[int | None, typer.Option(help="Default: no limit.")] = None,
    tokens_per_minute: Annotated[
        int | None, typer.Option(help="Of prompts and answers. Default: no limit.")
    ] = None,
    concurrent_requests: Annotated[int | None, typer.Option(help="Default: no limit.")] = None,
    priority: Annotated[
        int | None, typer.Option(help="Of its requests; the lowest come first. Default: 0.")
    ] = None,
    operator: Annotated[
        bool, typer.Option("--operator", help="It may also drain workers and the like.")
    ] = False,
) -> None:
    """Make an API key, print it, and write its hash to a file for `tandem serve --api-key-file`.

    Nothing else has the key. Remove its line from the file to have it refused; a server sees that at once.
    """
    from router.key_file import add_key as add

    limits = {
        "requests_per_minute": requests_per_minute,
        "tokens_per_minute": tokens_per_minute,
        "concurrent_requests": concurrent_requests,
    }
    with _failures():
        typer.echo(add(api_key_file, name=name, priority=priority, operator=operator, **limits))


@app.command()
def complete(
    prompt: Annotated[str, typer.Argument(help="The prompt; `-` reads it from standard input.")],
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    model: Annotated[str | None, typer.Option(help="Default: the first that the server names.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1)] = 128,
    temperature: Annotated[float, typer.Option(min=0.0)] = 0.0,
    seed: Annotated[int | None, typer.Option()] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Stop string; may be repeated.")] = None,
) -> None:
    """Complete a prompt and print the text as it comes."""
    from deploy.complete import stream_completion

    body = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed, "stop": stop or None}
    text = sys.stdin.read() if prompt == "-" else prompt
    with _failures():
        stream_completion(url, api_key, model, text, body)


@app.command()
def batch(
    source: Annotated[
        Path, typer.Argument(metavar="INPUT", help="JSONL: custom_id, url and body in a line.")
    ],
    target: Annotated[Path, typer.Argument(metavar="OUTPUT", help="JSONL: custom_id, response and error.")],
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
    concurrency: Annotated[int, typer.Option(min=1, max=4096, help="Requests at a time.")] = 64,
    priority: Annotated[
        int, typer.Option(min=-(2**31), max=2**31 - 1, help="Of requests that name none; lower comes first.")
    ] = 1000,
) -> None:
    """Run a file of requests in the Batch API's format. Run again, it goes on where it ended."""
    from deploy.batch import run_batch

    with _failures():
        run_batch(url, api_key, source, target, concurrency=concurrency, priority=priority)


@app.command(
    add_help_option=False,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
def bench(context: typer.Context) -> None:
    """Measure a server: `tandem bench serve --help`."""
    try:
        from bench.cli import app as bench_app
    except ModuleNotFoundError as error:
        raise fail(f"bench needs the package {error.name}: pip install 'tandem-serve[bench]'") from error
    bench_app(args=context.args, prog_name="tandem bench")


@app.command("profile", no_args_is_help=False)
@with_config_options
def profile_model(
    model_tag: Annotated[
        str | None, typer.Argument(metavar="[MODEL]", help="Local folder or hub id; the same as --model.")
    ] = None,
    config: Annotated[str | None, typer.Option(metavar="FILE", help="YAML file of options.")] = None,
    output: Annotated[Path, typer.Option(metavar="FILE", help="Where to write it.")] = Path("profile.json"),
    **flags: Any,
) -> None:
    """Measure what steps, prompts and wires take here, for `tandem plan`. Takes the options of `serve`."""
    from rich.console import Console

    from deploy.profile import profile

    with _failures():
        profile(with_model(flags, model_tag), config, output, Console())


@app.command()
def plan(
    trace: Annotated[str, typer.Option(metavar="FILE", help="JSONL trace in Mooncake's form.")],
    slo_ttft: Annotated[str, typer.Option(metavar="SECONDS", help="To the first token.")],
    slo_tpot: Annotated[str, typer.Option(metavar="SECONDS", help="Between two tokens.")],
    workers: Annotated[str, typer.Option(metavar="N", help="Prefill and decode workers in all, from 2 on.")],
    profile: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="What `tandem profile` wrote. (default: h100-llama-3.1-8b)"),
    ] = None,
    trace_scale_lengths: Annotated[
        str | None, typer.Option(metavar="NUMBER", help="Factor on the trace's lengths. (default: 1)")
    ] = None,
    trace_speedup: Annotated[
        str | None, typer.Option(metavar="NUMBER", help="Have requests come this much faster. (default: 1)")
    ] = None,
    max_input_len: Annotated[
        str | None, typer.Option(metavar="INTEGER", help="Cut the trace's prompts to this.")
    ] = None,
    max_output_len: Annotated[
        str | None, typer.Option(metavar="INTEGER", help="Cut the trace's outputs to this.")
    ] = None,
    num_prompts: Annotated[
        str | None, typer.Option(metavar="INTEGER", help="Only the first requests of the trace.")
    ] = None,
    output: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="For plan.json and plan.svg. (default: plan)")
    ] = None,
) -> None:
    """Simulate a trace on so many workers, in every split of roles, and recommend one."""
    given = dict(locals())
    from rich.console import Console

    from planner.command import parse
    from planner.command import plan as run

    with _failures():
        run(parse(given), Console())


speculate = typer.Typer(help="Drafts for a model of your own.", no_args_is_help=True)
app.add_typer(speculate, name="speculate")


@speculate.command("train")
def speculate_train(
    method: Annotated[Literal["eagle3", "medusa"], typer.Option(help="What to train.")],
    model: Annotated[str, typer.Option(help="Local folder or hub id of the model that is to be served.")],
    data: Annotated[
        Path, typer.Option(help='Text: a file, a folder of files, or JSONL with a "text" in each line.')
    ],
    output: Annotated[
        Path | None, typer.Option(help="Folder for the heads. Default: the model's name and the method's.")
    ] = None,
    held_out: Annotated[
        Path | None, typer.Option(help="Text to measure on. Default: a twentieth of the data.")
    ] = None,
    depth: Annotated[int | None, typer.Option(min=1, help="Tokens to draft: Medusa's heads.")] = None,
    num_layers: Annotated[int | None, typer.Option(min=1, help="Layers of each head.")] = None,
    draft_vocab_size: Annotated[
        int | None, typer.Option(min=1, help="Draft only so many of the most frequent tokens.")
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Default: once through the data.")] = None,
    batch_tokens: Annotated[int, typer.Option(min=1, help="Tokens in a step.")] = 4096,
    length: Annotated[int, typer.Option(min=32, help="Tokens in a window.")] = 512,
    learning_rate: Annotated[float, typer.Option(min=0.0)] = 1e-3,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    device: Annotated[Literal["auto", "cpu", "cuda"], typer.Option()] = "auto",
) -> None:
    """Train draft heads on text and measure them on text held out. Run it again to resume it."""
    from rich.console import Console

    from training.heads.command import TrainOptions, train
    from training.heads.contract import HeadOptions

    options = TrainOptions(
        method=method,
        model=bundled_path(model),
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
    with _failures():
        train(options, Console())


@speculate.command("choose-layers")
def speculate_choose_layers(
    model: Annotated[str, typer.Option(help="Local folder or hub id of the model that is to be served.")],
    data: Annotated[
        Path,
        typer.Option(help='Text to measure on: a file, a folder, or JSONL with a "text" in each line.'),
    ],
    output: Annotated[Path, typer.Option(help="File for the --speculative-config.")] = Path("layers.json"),
    num_layers: Annotated[
        int | None,
        typer.Option(min=1, help="Layers to skip. Default: as many as make it fastest, up to half."),
    ] = None,
    windows: Annotated[int, typer.Option(min=1, help="Windows of text to measure on.")] = 8,
    length: Annotated[int, typer.Option(min=32, help="Tokens in a window.")] = 256,
    device: Annotated[Literal["auto", "cpu", "cuda"], typer.Option()] = "auto",
) -> None:
    """Choose which of its layers a model skips when it drafts for itself."""
    from rich.console import Console

    from training.layer_choice import ChooseOptions, choose_layers

    options = ChooseOptions(bundled_path(model), data, output, num_layers, windows, length, device)
    with _failures():
        choose_layers(options, Console())


@app.command("quantize")
def quantize_model(
    method: Annotated[
        Literal["awq", "gptq", "int8", "fp8"], typer.Option(help="How to round; awq and gptq calibrate.")
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
    bits: Annotated[int | None, typer.Option(help="Of a weight. Default: 4 for awq and gptq.")] = None,
    group_size: Annotated[
        int | None, typer.Option(help="Weights that share a scale, for awq and gptq. Default: 128.")
    ] = None,
    desc_act: Annotated[
        bool, typer.Option("--desc-act", help="gptq: round the inputs with the largest activations first.")
    ] = False,
    samples: Annotated[int, typer.Option(min=2, help="Windows of text to calibrate with.")] = 128,
    sequence_length: Annotated[
        int | None, typer.Option(min=32, help="Tokens in a window. Default: 512.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Chooses the windows.")] = 0,
    device: Annotated[Literal["auto", "cpu", "cuda"], typer.Option()] = "auto",
) -> None:
    """Quantize a model's linear layers, block by block, and measure it before and after.

    Run it again to go on with a run that was stopped.
    """
    given = dict(locals()) | {"model": bundled_path(model)}
    from rich.console import Console

    from quantization.command import QuantizeOptions, quantize

    with _failures():
        quantize(QuantizeOptions(**given), Console())


@app.command()
def version() -> None:
    """Print the version."""
    from protocol.version import version as installed

    typer.echo(installed())
