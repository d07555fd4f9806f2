"""Trains the bundled models: the options, the batches, the run.

The learning rate is constant after the warm-up and falls linearly to zero over the last `--decay-steps`, in
which windows grow to the model's whole context. Until the decay starts, a run doesn't depend on `--steps`, so
a run resumed from `--state` may change it.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import PreTrainedModel

from models.training.corpus import DocumentWindows, encode_documents, training_texts
from models.training.shapes import CONTEXT, END_OF_TEXT_ID
from training.data import read_texts
from training.loop import FinishedStep, Schedule, Trainer

Loss = Callable[[torch.Tensor], torch.Tensor]
"""A function of tokens [windows, length + 1] that returns a mean in nats."""


class ModelLearner:
    """The `training.loop.Learner` of a model. Passes run in the model's dtype, the optimizers in fp32.
    `batches(step)` returns int64 [windows, length + 1].

    Muon (Jordan et al., 2024) orthogonalizes the momentum of each weight matrix; its update is scaled to
    AdamW's RMS (Liu et al., 2025), so that one learning rate fits both.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        loss: Loss,
        batches: Callable[[int], torch.Tensor],
        *,
        learning_rate: float,
        batch_tokens: int,
        micro_tokens: int,
    ) -> None:
        self._model = model
        self._loss = loss
        self._batches = batches
        self._micro_tokens = micro_tokens
        self.batch_tokens = batch_tokens
        self.module = copy.deepcopy(model).float()
        named = list(self.module.named_parameters())
        matrices = [p for name, p in named if p.ndim == 2 and ".layers." in name]
        others = [p for name, p in named if p.ndim != 2 or ".layers." not in name]
        self.optimizers = {
            "adamw": torch.optim.AdamW(others, lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0),
            "muon": torch.optim.Muon(
                matrices, lr=learning_rate, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"
            ),
        }

    def backward(self, step: int) -> float:
        tokens = self._batches(step)
        micros = tokens.split(max(1, self._micro_tokens // (tokens.shape[1] - 1)))
        total = 0.0
        for micro in micros:
            loss = self._loss(micro) / len(micros)
            loss.backward()
            self._take_gradients()
            total += loss.item()
        return total

    def _take_gradients(self) -> None:
        for master, parameter in zip(self.module.parameters(), self._model.parameters(), strict=True):
            assert parameter.grad is not None
            gradient = parameter.grad.float()
            master.grad = gradient if master.grad is None else master.grad.add_(gradient)
            parameter.grad = None

    @torch.no_grad()
    def updated(self) -> None:
        for master, parameter in zip(self.module.parameters(), self._model.parameters(), strict=True):
            parameter.copy_(master)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `run`."""
    parser.add_argument("--texts", type=Path, help="JSONL of texts to learn from, if not the corpus's files")
    parser.add_argument(
        "--state", type=Path, required=True, help="file for checkpoints (safetensors); it is resumed"
    )
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--decay-steps", type=int, required=True, help="last steps, of falling learning rate")
    parser.add_argument("--warmup-steps", type=int, default=40)
    parser.add_argument("--batch-tokens", type=int, default=4096, help="tokens in a step")
    parser.add_argument("--micro-tokens", type=int, default=4096, help="tokens in a forward")
    parser.add_argument("--length", type=int, default=256, help="tokens in a window before the decay")
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)


def window_shape(step: int, arguments: argparse.Namespace) -> tuple[int, int]:
    """Return (windows, length) of a step. All steps have the same number of tokens."""
    length = CONTEXT if step >= arguments.steps - arguments.decay_steps else arguments.length
    return arguments.batch_tokens // length, length


class Batches:
    """The batches of a run, read in order. A resumed run skips batches before its first step."""

    def __init__(self, windows: DocumentWindows, arguments: argparse.Namespace) -> None:
        self._windows = windows
        self._arguments = arguments
        self._next = 0

    def __call__(self, step: int) -> torch.Tensor:
        while True:
            batch = self._windows.next(*window_shape(self._next, self._arguments))
            self._next += 1
            if self._next > step:
                return torch.from_numpy(batch)


def run(model: PreTrainedModel, loss: Loss, tokenizer: Tokenizer, arguments: argparse.Namespace) -> None:
    """Train `model` in place on `loss(tokens [windows, length + 1])`, a mean in nats."""
    documents = encode_documents(
        tokenizer, read_texts(arguments.texts, "--texts") if arguments.texts else training_texts()
    )
    windows = DocumentWindows(documents, END_OF_TEXT_ID, arguments.seed)
    learner = ModelLearner(
        model,
        loss,
        Batches(windows, arguments),
        learning_rate=arguments.learning_rate,
        batch_tokens=arguments.batch_tokens,
        micro_tokens=arguments.micro_tokens,
    )

    def report(step: FinishedStep) -> None:
        if step.number % 10 == 0:
            rate = step.tokens / step.seconds
            print(
                f"step {step.number} epoch {windows.epoch} loss {step.loss:.4f} {rate:.0f} tokens/s",
                flush=True,
            )

    schedule = Schedule(arguments.steps, arguments.warmup_steps, arguments.decay_steps)
    Trainer(learner, schedule, {"seed": arguments.seed}, arguments.state).run(report)
