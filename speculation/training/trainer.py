"""The training loop: AdamW with warm-up and linear decay, checkpoints by the clock, resuming."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from protocol.errors import ConfigError
from speculation.training.data import Windows
from speculation.training.head import Target, TrainableHead

_WARM_UP = 0.05
_CLIP_NORM = 1.0


@dataclass(frozen=True)
class Step:
    """One that is over. `tokens` and `seconds` count from the first that this process made."""

    number: int
    loss: float
    tokens: int
    seconds: float


@dataclass(frozen=True)
class Schedule:
    """A run's settings. A checkpoint of other ones is not resumed."""

    method: str
    model: str
    data: str
    """A hash of the training tokens."""
    steps: int
    batch_tokens: int
    length: int
    learning_rate: float
    seed: int
    options: dict[str, int | None]

    def rate(self, step: int) -> float:
        """The learning rate at a step: it rises, then falls to zero on the last one's end."""
        warm_up = max(1, round(self.steps * _WARM_UP))
        return self.learning_rate * min(
            (step + 1) / warm_up, (self.steps - step) / (self.steps - warm_up + 1)
        )


class Trainer:
    """Trains a head's parameters in place. `checkpoint` is written every `save_every_s` seconds."""

    def __init__(
        self,
        head: TrainableHead,
        target: Target,
        windows: Windows,
        schedule: Schedule,
        checkpoint: Path,
        save_every_s: float,
    ) -> None:
        self._head = head
        self._target = target
        self._windows = windows
        self._schedule = schedule
        self._checkpoint = checkpoint
        self._save_every_s = save_every_s
        self._parameters = [p for p in head.module.parameters() if p.requires_grad]
        self._optimizer = torch.optim.AdamW(self._parameters, lr=0.0, betas=(0.9, 0.95), weight_decay=0.0)
        self.first_step = self._resume() if checkpoint.exists() else 0

    def run(self, report: Callable[[Step], None], until: int | None = None) -> None:
        """Train to the schedule's end or to step `until`; then, and every so often, write a checkpoint."""
        started = saved = time.monotonic()
        end = self._schedule.steps if until is None else until
        self._head.module.train()
        for step in range(self.first_step, end):
            loss = self._step(step)
            now = time.monotonic()
            tokens = (step + 1 - self.first_step) * self._schedule.batch_tokens
            report(Step(step + 1, loss, tokens, now - started))
            if step + 1 == end or now - saved > self._save_every_s:
                self._save(step + 1)
                saved = now
        self.first_step = end
        self._head.module.eval()

    def _step(self, step: int) -> float:
        for group in self._optimizer.param_groups:
            group["lr"] = self._schedule.rate(step)
        token_ids = self._windows[step].to(self._target.device)
        loss = self._head.loss(token_ids, hidden_states(self._target, token_ids, self._head.hidden_layers))
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._parameters, _CLIP_NORM)
        self._optimizer.step()
        return loss.item()

    def _save(self, step: int) -> None:
        tensors = {f"module/{name}": value for name, value in self._head.module.state_dict().items()}
        for index, state in self._optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer/{index}/{key}": value for key, value in state.items()}
        metadata = {"step": str(step), "schedule": json.dumps(dataclasses.asdict(self._schedule))}
        partial = self._checkpoint.with_suffix(".partial")
        partial.parent.mkdir(parents=True, exist_ok=True)
        save_file({name: value.contiguous() for name, value in tensors.items()}, partial, metadata=metadata)
        partial.replace(self._checkpoint)

    def _resume(self) -> int:
        path = self._checkpoint
        try:
            with safe_open(path, "pt") as file:
                metadata = file.metadata()
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"--output: the checkpoint {path} cannot be read: {error}") from error
        self._check_same(json.loads(metadata["schedule"]))
        module = {n.removeprefix("module/"): t for n, t in tensors.items() if n.startswith("module/")}
        self._head.module.load_state_dict(module)
        content: dict[str, Any] = self._optimizer.state_dict()
        for name, value in tensors.items():
            if name.startswith("optimizer/"):
                _, index, key = name.split("/")
                content["state"].setdefault(int(index), {})[key] = value
        self._optimizer.load_state_dict(content)
        return int(metadata["step"])

    def _check_same(self, before: dict[str, Any]) -> None:
        for name, now in dataclasses.asdict(self._schedule).items():
            then = before.get(name)
            if then != now:
                raise ConfigError(
                    f"--output: {self._checkpoint} is of a run with {name} {then!r}, this has {now!r}: give "
                    "the same options to resume it, or another --output"
                )


@torch.no_grad()
def hidden_states(target: Target, token_ids: Tensor, layers: tuple[int, ...]) -> Tensor:
    """Of these layers, side by side: [windows, length, len(layers) * hidden_size]. `token_ids` [windows,
    length].
    """
    output = target.model(input_ids=token_ids, use_cache=False, output_hidden_states=True, logits_to_keep=1)
    return torch.cat([output.hidden_states[layer] for layer in layers], dim=-1)
