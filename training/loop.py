"""The training loop: warm-up, constant rate, linear decay; checkpoints by the clock; resuming."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from checkpoints.source import open_tensors
from protocol.errors import ConfigError
from training.output import save_tensors

CLIP_NORM = 1.0


class Learner(Protocol):
    """A trainable model.

    `module` holds the float32 parameters that `optimizers` step, by their names in a checkpoint. An
    optimizer's initial learning rate is the maximum of the run.
    """

    module: nn.Module
    batch_tokens: int

    @property
    def optimizers(self) -> Mapping[str, Optimizer]: ...

    def backward(self, step: int) -> float:
        """Add the gradients of the batch, which the step's number determines; return the loss."""
        ...

    def updated(self) -> None:
        """React to changed parameters, after a step or after a checkpoint was loaded."""
        ...


@dataclass(frozen=True)
class Schedule:
    """Numbers of steps: of the run, of the warm-up at its start, of the decay at its end."""

    steps: int
    warm_up: int
    decay: int

    def scale(self, step: int) -> float:
        """Return the factor in (0, 1] on the learning rate at `step`."""
        return min(1.0, (step + 1) / self.warm_up, (self.steps - step) / max(1, self.decay))


@dataclass(frozen=True)
class FinishedStep:
    """A finished step. `tokens` and `seconds` count from the first step of this process."""

    number: int
    loss: float
    tokens: int
    seconds: float


class Trainer:
    """A run that trains in place, with a checkpoint every `save_every_s` seconds.

    It resumes from `checkpoint` if that exists and has the same `settings`.
    """

    def __init__(
        self,
        learner: Learner,
        schedule: Schedule,
        settings: Mapping[str, Any],
        checkpoint: Path,
        save_every_s: float = 60.0,
    ) -> None:
        self._learner = learner
        self._schedule = schedule
        self._settings = settings
        self._checkpoint = checkpoint
        self._save_every_s = save_every_s
        self._parameters = [p for p in learner.module.parameters() if p.requires_grad]
        self._rates = {name: each.defaults["lr"] for name, each in learner.optimizers.items()}
        self.first_step = self._resume() if checkpoint.exists() else 0

    def run(self, report: Callable[[FinishedStep], None], until: int | None = None) -> None:
        """Train to the schedule's end or to step `until`. Write checkpoints on the way and at the end."""
        started = saved = time.monotonic()
        end = self._schedule.steps if until is None else until
        self._learner.module.train()
        for step in range(self.first_step, end):
            loss = self._step(step)
            now = time.monotonic()
            tokens = (step + 1 - self.first_step) * self._learner.batch_tokens
            report(FinishedStep(step + 1, loss, tokens, now - started))
            if step + 1 == end or now - saved > self._save_every_s:
                self._save(step + 1)
                saved = now
        self.first_step = end
        self._learner.module.eval()

    def _step(self, step: int) -> float:
        loss = self._learner.backward(step)
        torch.nn.utils.clip_grad_norm_(self._parameters, CLIP_NORM)
        for name, optimizer in self._learner.optimizers.items():
            for group in optimizer.param_groups:
                group["lr"] = self._rates[name] * self._schedule.scale(step)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self._learner.updated()
        return loss

    def _save(self, step: int) -> None:
        tensors = {f"module/{name}": value for name, value in self._learner.module.state_dict().items()}
        for kind, optimizer in self._learner.optimizers.items():
            for index, state in optimizer.state_dict()["state"].items():
                tensors |= {f"{kind}/{index}/{key}": value for key, value in state.items()}
        metadata = {"step": str(step), "settings": json.dumps(self._settings)}
        # safetensors refuses tied tensors, so each is written as a tensor of its own
        save_tensors(self._checkpoint, {name: value.clone() for name, value in tensors.items()}, metadata)

    def _resume(self) -> int:
        with open_tensors(self._checkpoint, "--output") as file:
            metadata = file.metadata()
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        check_same_run(self._checkpoint, json.loads(metadata["settings"]), self._settings)
        module = {n.removeprefix("module/"): t for n, t in tensors.items() if n.startswith("module/")}
        self._learner.module.load_state_dict(module)
        for kind, optimizer in self._learner.optimizers.items():
            content: dict[str, Any] = optimizer.state_dict()
            for name, value in tensors.items():
                if name.startswith(f"{kind}/"):
                    _, index, key = name.split("/")
                    content["state"].setdefault(int(index), {})[key] = value
            optimizer.load_state_dict(content)
        self._learner.updated()
        return int(metadata["step"])


def check_same_run(unfinished: Path, before: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """Raise `ConfigError` if the unfinished run had other settings."""
    for name, now in settings.items():
        if before.get(name) != now:
            raise ConfigError(
                f"--output: {unfinished} is of a run with {name} {before.get(name)!r}, this has {now!r}: "
                "give the same options to resume it, or another --output"
            )
