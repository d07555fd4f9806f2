"""`tandem speculate train`: trains heads and writes a card with their measured acceptance."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase

from protocol.errors import ConfigError
from protocol.speculation import MAX_DRAFT_TOKENS
from training.data import (
    Windows,
    encode_texts,
    load,
    load_frozen,
    read_prompts,
    read_texts,
    spread_windows,
)
from training.heads.contract import HeadLearner, HeadOptions, Target, TrainableHead, acceptance
from training.heads.eagle import build_eagle3, captured_layers
from training.heads.medusa import build_medusa
from training.heads.mtp import build_mtp
from training.loop import Schedule, Trainer
from training.output import only_run, write_text
from training.recording import LONGEST_PIECE, Device, Recording, SourceText, answer, check_room, digest


@dataclass(frozen=True)
class _Method:
    """A kind of heads: its builder, the layers that make its feature, the method that serves it, and its most
    tokens and layers.
    """

    build: Callable[[Target, HeadOptions], TrainableHead]
    captured: Callable[[int], tuple[int, ...]]
    served_as: str
    most_depth: int = MAX_DRAFT_TOKENS
    most_layers: int = 1


METHODS = {
    "eagle3": _Method(build_eagle3, captured_layers, "eagle"),
    "mtp": _Method(build_mtp, lambda _: (), "mtp"),
    "medusa": _Method(build_medusa, lambda _: (), "medusa", most_depth=16, most_layers=16),
}
HELD_OUT_SHARE = 0.05
CONTINUED_TOKENS = 96
_CHECKPOINT, _RECORDING, _CARD = "checkpoint.safetensors", "recording", "README.md"
_UNFINISHED = {_CHECKPOINT, _RECORDING, "model.safetensors"}
"""The names in the folder of an unfinished run. A run that was saving its heads has a card, too."""
_LOG_EVERY_S = 60.0
_WARM_UP = 0.05
_USEFUL_STEPS = 2000
"""The least number of useful steps. With less text, batches become smaller to reach it."""
_LARGEST_BATCH = 4096
"""The largest number of tokens in a batch whose size is not given."""


@dataclass(frozen=True)
class TrainOptions:
    """The command's options; either `data` or `prompts` is given. `steps` None means `epochs` epochs.
    `batch_tokens` None means a batch small enough for `_USEFUL_STEPS`.
    """

    method: Literal["eagle3", "mtp", "medusa"]
    model: str
    data: Path | None
    output: Path
    prompts: Path | None = None
    answer_tokens: int = 256
    held_out: Path | None = None
    head: HeadOptions = field(default_factory=HeadOptions)
    steps: int | None = None
    epochs: int = 4
    batch_tokens: int | None = None
    length: int = 512
    learning_rate: float = 1e-3
    seed: int = 0
    device: Device = "auto"
    held_out_windows: int = 64
    save_every_s: float = 60.0
    recording: Path | None = None
    recording_gib: float = 20.0


def train(options: TrainOptions, console: Console) -> list[float]:
    """Train, measure, save; return the held-out acceptance of each drafted position.

    The same command resumes an interrupted run from its checkpoint. Raises `ConfigError` that names the
    option.
    """
    _check_head(options)
    _check_output(options.output, _recording_folder(options))
    with only_run(options.output, "--output"):
        return _train(options, console)


def _train(options: TrainOptions, console: Console) -> list[float]:
    pieces, held_out = _pieces(options, load(AutoTokenizer, options.model))
    if options.data is not None:
        _windows(options, sum(len(piece.token_ids) for piece in pieces))  # refuses too little text
    recording = _record(options, "training", pieces, console)
    answers = _record(options, "held-out", held_out, console)
    model = load_frozen(options.model, options.device)
    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    target = Target(options.model, model, recording.token_counts(vocab_size))
    head = METHODS[options.method].build(target, options.head)
    windows = _windows(options, recording.num_tokens)
    steps = options.steps or options.epochs * windows.steps_per_epoch
    settings = {  # a checkpoint with other ones is not resumed
        "method": options.method,
        "model": options.model,
        "data": digest(pieces),
        "steps": steps,
        "batch_tokens": windows.batch_tokens,
        "length": options.length,
        "learning_rate": options.learning_rate,
        "seed": options.seed,
        "options": dataclasses.asdict(options.head),
    }
    checkpoint = options.output / _CHECKPOINT
    learner = HeadLearner(head, target, recording, windows, options.learning_rate)
    trainer = Trainer(learner, head_schedule(steps), settings, checkpoint, options.save_every_s)
    parameters = sum(p.numel() for p in head.module.parameters() if p.requires_grad)
    console.print(
        f"{options.method} heads for {options.model}: {parameters:,} parameters, {recording.num_tokens:,} "
        f"tokens of text, {steps} steps of {windows.batch_tokens} tokens on {target.device}"
    )
    if trainer.first_step:
        console.print(f"going on from step {trainer.first_step} of {checkpoint}")
    with _progress(console, steps, "step", trainer.first_step) as report:
        trainer.run(
            lambda step: report(
                step.number, f"loss {step.loss:.3f}, {step.tokens / step.seconds:,.0f} tokens/s"
            )
        )
    rates = acceptance(head, answers)
    _write_card(options.output, settings, rates, parameters, answers.num_texts)
    head.save(options.output)  # config.json last: with it the heads count as finished
    checkpoint.unlink()
    if options.recording is None:
        shutil.rmtree(_recording_folder(options))
    console.print(_table(rates))
    console.print(f"saved in {options.output}")
    return rates


def _check_head(options: TrainOptions) -> None:
    """Raise `ConfigError` for heads that cannot be, before their texts are recorded, which may take hours."""
    method, size = METHODS[options.method], options.head.draft_vocab_size
    options.head.check(options.method, method.most_depth, method.most_layers)
    known = _text_config(options).vocab_size
    if size is not None and size > known:
        raise ConfigError(f"--draft-vocab-size: {size} exceeds the model's {known} tokens")


def _check_output(folder: Path, recording: Path) -> None:
    """Raise `ConfigError` if the folder holds anything other than an unfinished run and its recording."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"--output: {folder} is a file")
    if (folder / "config.json").exists():
        raise ConfigError(f"--output: {folder} has finished heads already; choose another folder")
    found = [path for path in folder.glob("*") if path.suffix != ".partial"]
    own = _UNFINISHED | ({_CARD} if (folder / _CHECKPOINT).exists() else set())
    others = {path.name for path in found if not recording.is_relative_to(path)} - own
    if others:
        raise ConfigError(
            f"--output: {folder} has other files already ({min(others)}); choose another folder"
        )


def _pieces(
    options: TrainOptions, tokenizer: PreTrainedTokenizerBase
) -> tuple[list[SourceText], list[SourceText]]:
    """Return the pieces to train on and the pieces to measure on, from another file or a part of the same."""
    if (options.data is None) == (options.prompts is None):
        raise ConfigError("--data or --prompts: give one of them")
    if options.data is None:
        assert options.prompts is not None
        return _answered(options, options.prompts, tokenizer)
    stream = encode_texts(read_texts(options.data), tokenizer)
    if options.held_out is not None:
        held_out = encode_texts(read_texts(options.held_out, "--held-out"), tokenizer)
    else:
        kept = len(stream) - int(len(stream) * HELD_OUT_SHARE)
        stream, held_out = stream[:kept], stream[kept:]
    longest = min(LONGEST_PIECE, _text_config(options).max_position_embeddings - 1)
    measured = spread_windows(held_out, options.length, options.held_out_windows, "held-out text")
    prompts = measured[:, : max(1, min(options.length, longest) - CONTINUED_TOKENS)].tolist()
    return (
        [SourceText(part.tolist()) for part in stream.split(longest)],
        [SourceText(prompt, CONTINUED_TOKENS, ignores_end=True) for prompt in prompts],
    )


def _answered(
    options: TrainOptions, path: Path, tokenizer: PreTrainedTokenizerBase
) -> tuple[list[SourceText], list[SourceText]]:
    prompts = read_prompts(path, "--prompts", tokenizer)
    most = options.held_out_windows
    if options.held_out is not None:
        held_out = read_prompts(options.held_out, "--held-out", tokenizer)[:most]
    else:
        count = max(1, min(most, int(len(prompts) * HELD_OUT_SHARE)))
        prompts, held_out = prompts[:-count], prompts[-count:]
    if not prompts:
        raise ConfigError("--prompts: has one prompt, and one is held out; give another, or --held-out")
    longest = _text_config(options).max_position_embeddings - options.answer_tokens
    for prompt in [*prompts, *held_out]:
        if len(prompt) > longest:
            raise ConfigError(
                f"--prompts: a prompt of {len(prompt)} tokens and --answer-tokens {options.answer_tokens} "
                f"exceed the model's {_text_config(options).max_position_embeddings} tokens"
            )
    training = [SourceText(prompt, options.answer_tokens) for prompt in prompts]
    return training, [SourceText(prompt, options.answer_tokens) for prompt in held_out]


def _text_config(options: TrainOptions) -> Any:
    return load(AutoConfig, options.model).get_text_config(decoder=True)


def _windows(options: TrainOptions, num_tokens: int) -> Windows:
    """Return the batches of a recording of so many tokens. Raises `ConfigError` if it has none."""
    fitting = min(_LARGEST_BATCH, num_tokens * options.epochs // _USEFUL_STEPS)
    batch = max(1, (options.batch_tokens or fitting) // options.length)
    return Windows(num_tokens, options.length, batch, options.seed)


def _recording_folder(options: TrainOptions) -> Path:
    return options.recording or options.output / _RECORDING


def _record(options: TrainOptions, name: str, pieces: list[SourceText], console: Console) -> Recording:
    """Return the recording of the pieces, after recording the missing ones."""
    config, folder = _text_config(options), _recording_folder(options) / name
    layers = (*METHODS[options.method].captured(config.num_hidden_layers), config.num_hidden_layers)
    width, most_bytes = len(layers) * config.hidden_size, int(options.recording_gib * 2**30)
    settings = {"model": options.model, "layers": list(layers), "data": digest(pieces)}
    recording = Recording(folder, width, most_bytes, settings)
    done = recording.numbers
    rest = [(number, piece) for number, piece in enumerate(pieces) if number not in done]
    if rest and not recording.is_full:
        check_room(folder, [piece for _, piece in rest], width, most_bytes)
        with _progress(console, len(pieces), f"{name} texts", recording.num_texts) as report:
            before, started = recording.num_tokens, time.monotonic()

            def recorded(texts: int, tokens: int) -> None:
                rate = (tokens - before) / (time.monotonic() - started)
                report(texts, f"{tokens:,} tokens recorded, {rate:,.0f} tokens/s")

            recording.add(answer(options.model, options.device, layers, rest), recorded)
    if recording.num_texts < len(pieces):
        console.print(
            f"{folder} is full (--recording-gib {options.recording_gib:g}): {recording.num_texts} of "
            f"{len(pieces)} texts are used"
        )
    return recording


def head_schedule(steps: int) -> Schedule:
    """Return a schedule whose rate rises for a twentieth of the steps, then falls to zero."""
    warm_up = max(1, round(steps * _WARM_UP))
    return Schedule(steps, warm_up, decay=steps - warm_up + 1)


@contextlib.contextmanager
def _progress(
    console: Console, total: int, name: str, completed: int
) -> Iterator[Callable[[int, str], None]]:
    """Show a progress bar, or a line every minute. Yields a function of the units done and a text."""
    columns = (TextColumn("{task.fields[state]}"), BarColumn(), TextColumn("{task.completed}/{task.total}"))
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as progress:
        task = progress.add_task("", total=total, completed=completed, state=name)
        logged = time.monotonic()

        def report(done: int, state: str) -> None:
            nonlocal logged
            progress.update(task, completed=done, state=state)
            if not console.is_terminal and time.monotonic() - logged > _LOG_EVERY_S:
                logged = time.monotonic()
                console.print(f"{name} {done} of {total}: {state}")

        yield report


def _table(rates: list[float]) -> Table:
    table = Table(title="held-out acceptance, greedy")
    for number in range(len(rates)):
        table.add_column(f"token {number + 1}", justify="right")
    table.add_row(*(f"{rate:.1%}" for rate in rates))
    return table


def _write_card(folder: Path, run: dict[str, Any], rates: list[float], parameters: int, windows: int) -> None:
    """Write the card, with the acceptance of each drafted position on held-out `windows`."""
    config = json.dumps({"method": METHODS[run["method"]].served_as, "model": str(folder)})
    rows = "\n".join(f"| {number} | {rate:.1%} |" for number, rate in enumerate(rates, start=1))
    write_text(
        folder / _CARD,
        f"""# {folder.name}

{run["method"]} heads for `{run["model"]}`, {parameters:,} parameters, trained by `tandem speculate train`.

```sh
tandem serve --model {run["model"]} --speculative-config '{config}'
```

| drafted token | accepted, with all before it |
|---|---|
{rows}

Measured on the model's own greedy continuations of {windows} held-out texts, at every place of them: the
share of places where a greedy draft's tokens are what the model itself says. With all {len(rates)} drafted, a
step brings {1 + sum(rates):.2f} tokens in the mean.

Training: {run["steps"]} steps of {run["batch_tokens"]} tokens in windows of {run["length"]}, learning
rate {run["learning_rate"]:g}, seed {run["seed"]}.
""",
    )
