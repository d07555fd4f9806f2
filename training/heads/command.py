"""`tandem speculate train`: trains heads from a model and texts, and writes a card with their measured
acceptance.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from protocol.errors import ConfigError
from training.data import Windows, encode_texts, load, load_frozen, read_texts, spread_windows
from training.heads.contract import HeadOptions, Target, TrainableHead
from training.heads.eagle import build_eagle3
from training.heads.learner import HeadLearner, acceptance, continue_greedily
from training.heads.medusa import build_medusa
from training.loop import FinishedStep, Schedule, Trainer

METHODS: dict[str, Callable[[Target, HeadOptions], TrainableHead]] = {
    "eagle3": build_eagle3,
    "medusa": build_medusa,
}
_SERVED_AS = {"eagle3": "eagle", "medusa": "medusa"}
HELD_OUT_SHARE = 0.05
CONTINUED_TOKENS = 96
_CHECKPOINT = "checkpoint.safetensors"
_LOG_EVERY_S = 60.0
_WARM_UP = 0.05


@dataclass(frozen=True)
class TrainOptions:
    """The command's options. `steps` None means once through the data."""

    method: Literal["eagle3", "medusa"]
    model: str
    data: Path
    output: Path
    held_out: Path | None = None
    head: HeadOptions = field(default_factory=HeadOptions)
    steps: int | None = None
    batch_tokens: int = 4096
    length: int = 512
    learning_rate: float = 1e-3
    seed: int = 0
    device: str = "auto"
    held_out_windows: int = 64
    save_every_s: float = 60.0


@dataclass(frozen=True)
class TrainingRun:
    """The settings of a training run. A checkpoint with other settings is not resumed.

    `data` is a hash of the training tokens.
    """

    method: str
    model: str
    data: str
    steps: int
    batch_tokens: int
    length: int
    learning_rate: float
    seed: int
    options: dict[str, int | None]


def train(options: TrainOptions, console: Console) -> list[float]:
    """Train, measure, save; return the held-out acceptance of each drafted position.

    The same command resumes an interrupted run from its checkpoint. Raises `ConfigError` that names the
    option.
    """
    if (options.output / "config.json").exists():
        raise ConfigError(f"--output: {options.output} has finished heads already; choose another folder")
    tokenizer = load(AutoTokenizer, options.model)
    stream, held_out = _streams(options, tokenizer)
    prompts = spread_windows(held_out, options.length, options.held_out_windows, "held-out text")
    prompts = prompts[:, : max(1, options.length - CONTINUED_TOKENS)]
    target = _target(options, stream)
    head = METHODS[options.method](target, options.head)
    windows = Windows(stream, options.length, max(1, options.batch_tokens // options.length), options.seed)
    run = _describe(options, windows, stream)
    checkpoint = options.output / _CHECKPOINT
    learner = HeadLearner(head, target, windows, options.learning_rate)
    schedule, settings = head_schedule(run.steps), dataclasses.asdict(run)
    trainer = Trainer(learner, schedule, settings, checkpoint, options.save_every_s)
    parameters = sum(p.numel() for p in head.module.parameters())
    console.print(
        f"{options.method} heads for {options.model}: {parameters:,} parameters, {len(stream):,} tokens of "
        f"text, {run.steps} steps of {windows.batch_tokens} tokens on {target.device}"
    )
    if trainer.first_step:
        console.print(f"going on from step {trainer.first_step} of {checkpoint}")
    _run(trainer, run.steps, console)
    rates = acceptance(head, target, continue_greedily(target, prompts, CONTINUED_TOKENS))
    head.save(options.output)
    _write_card(options.output, run, rates, parameters, len(prompts))
    checkpoint.unlink()
    console.print(_table(rates))
    console.print(f"saved in {options.output}")
    return rates


def _streams(options: TrainOptions, tokenizer: PreTrainedTokenizerBase) -> tuple[Tensor, Tensor]:
    """Return the tokens to train on, and the held-out ones: another text's, or a part of the same."""
    stream = encode_texts(read_texts(options.data), tokenizer)
    if options.held_out is not None:
        return stream, encode_texts(read_texts(options.held_out, "--held-out"), tokenizer)
    kept = len(stream) - int(len(stream) * HELD_OUT_SHARE)
    return stream[:kept], stream[kept:]


def _target(options: TrainOptions, stream: Tensor) -> Target:
    model = load_frozen(options.model, options.device)
    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    return Target(options.model, model, torch.bincount(stream.long(), minlength=vocab_size))


def head_schedule(steps: int) -> Schedule:
    """Return a schedule whose rate rises in the first twentieth of the steps and then falls to zero."""
    warm_up = max(1, round(steps * _WARM_UP))
    return Schedule(steps, warm_up, decay=steps - warm_up + 1)


def _describe(options: TrainOptions, windows: Windows, stream: Tensor) -> TrainingRun:
    return TrainingRun(
        method=options.method,
        model=options.model,
        data=hashlib.blake2b(stream.numpy().tobytes(), digest_size=8).hexdigest(),
        steps=options.steps or windows.steps_per_epoch,
        batch_tokens=windows.batch_tokens,
        length=options.length,
        learning_rate=options.learning_rate,
        seed=options.seed,
        options=dataclasses.asdict(options.head),
    )


def _run(trainer: Trainer, steps: int, console: Console) -> None:
    """Show a progress bar; without a terminal, a line every minute."""
    columns = (TextColumn("{task.fields[state]}"), BarColumn(), TextColumn("{task.completed}/{task.total}"))
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as progress:
        task = progress.add_task("", total=steps, completed=trainer.first_step, state="training")
        logged = 0.0

        def report(step: FinishedStep) -> None:
            nonlocal logged
            state = f"loss {step.loss:.3f}, {step.tokens / step.seconds:,.0f} tokens/s"
            progress.update(task, completed=step.number, state=state)
            if not console.is_terminal and step.seconds - logged > _LOG_EVERY_S:
                logged = step.seconds
                console.print(f"step {step.number} of {steps}: {state}")

        trainer.run(report)


def _table(rates: list[float]) -> Table:
    table = Table(title="held-out acceptance, greedy")
    for number in range(len(rates)):
        table.add_column(f"token {number + 1}", justify="right")
    table.add_row(*(f"{rate:.1%}" for rate in rates))
    return table


def _write_card(folder: Path, run: TrainingRun, rates: list[float], parameters: int, windows: int) -> None:
    """Write the card. `rates` is the held-out acceptance of each drafted position, measured on `windows`
    windows.
    """
    config = json.dumps({"method": _SERVED_AS[run.method], "model": str(folder)})
    rows = "\n".join(f"| {number} | {rate:.1%} |" for number, rate in enumerate(rates, start=1))
    (folder / "README.md").write_text(
        f"""# {folder.name}

{run.method} heads for `{run.model}`, {parameters:,} parameters, trained by `tandem speculate train`.

```sh
tandem serve --model {run.model} --speculative-config '{config}'
```

| drafted token | accepted, with all before it |
|---|---|
{rows}

Measured on the model's own greedy continuations of {windows} held-out texts, at every place of them: the
share of places where a greedy draft's tokens are what the model itself says. With all {len(rates)} drafted, a
step brings {1 + sum(rates):.2f} tokens in the mean.

Training: {run.steps} steps of {run.batch_tokens} tokens in windows of {run.length}, learning
rate {run.learning_rate:g}, seed {run.seed}.
""",
        encoding="utf-8",
    )
