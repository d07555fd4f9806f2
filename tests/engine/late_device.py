"""A device that computes late: work runs on the CPU in order when the host waits for it.

At a wait the device may be anywhere between the awaited work and the end of its queue.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from engine.batch.runner import Fill, ForwardOutput, Step
from engine.batch.step_inputs import SequenceRows, span_of
from engine.engine import Engine
from engine.kv.state_slots import RowSpan
from engine.sampler.rows import SamplingRow, TokenChoice
from engine.step.launch import StepLauncher


class LateDevice:
    """Records in `log` the numbers of launched and awaited work, in the host's order."""

    def __init__(self) -> None:
        self.log: list[tuple[str, int]] = []
        self._queue: list[Callable[[], object]] = []
        self._num_done = 0
        self.num_steps = 0
        self._random = random.Random(1)

    def put(self, work: Callable[[], object]) -> int:
        """Queue work. Return the number of things that must be done before it is."""
        self._queue.append(work)
        return self._num_done + len(self._queue)

    def reach(self, end: int) -> None:
        """Compute at least up to `end`."""
        end = max(end, self._num_done + self._random.randint(0, len(self._queue)))
        while self._num_done < end:
            self._queue.pop(0)()
            self._num_done += 1

    def finish(self) -> None:
        self.reach(self._num_done + len(self._queue))

    @property
    def is_busy(self) -> bool:
        return bool(self._queue)


class LateStateSlots:
    """Moves reads and writes of states to the device. The host knows at once where they will be."""

    def __init__(self, state_slots: Any, device: LateDevice) -> None:
        self._states, self._device = state_slots._states, device
        self._run, self._save, self._load = state_slots.run, state_slots.save, state_slots.load
        self._spans: list[tuple[RowSpan, int]] = []
        self._state_slots = state_slots
        self._state_slots.run, self._state_slots.save, self._state_slots.load = self.run, self.save, self.load

    def launch(self, batch: Sequence[SequenceRows]) -> None:
        """Queue a step's state accesses, which its operators need when it is computed."""
        state_slots = range(len(self._states))
        self._state_slots._states = [
            SimpleNamespace(zero_=partial(self._clear, state_slot)) for state_slot in state_slots
        ]
        spans = [span_of(rows) for rows in batch]
        self._spans += [(span, self._run(span)) for span in spans]
        self._state_slots._states = self._states

    def _clear(self, state_slot: int) -> None:
        self._device.put(self._states[state_slot].zero_)

    def run(self, span: RowSpan) -> int:
        launched, base = self._spans.pop(0)
        assert launched == span
        return base

    def save(self, state_slot: int, memory: Tensor, blocks: Sequence[int]) -> None:
        self._device.put(partial(self._save, state_slot, memory, [*blocks]))

    def load(self, state_slot: int, memory: Tensor, blocks: Sequence[int], num_tokens: int) -> int:
        bases, copied = self._state_slots._bases, [*blocks]
        bases[state_slot] = point = self._state_slots.layout.position(num_tokens)

        def load() -> None:
            now = bases[state_slot]
            self._load(state_slot, memory, copied, num_tokens)
            bases[state_slot] = now

        self._device.put(load)
        return point


class LateRunner:
    """Rows are fixed at the launch; the device reads what fills them later."""

    can_fill = True
    chains = None

    def __init__(
        self, runner: Any, vocab_size: int, device: LateDevice, state_slots: LateStateSlots | None
    ) -> None:
        self._runner = runner
        self._device = device
        self._state_slots = state_slots
        self._kept = torch.empty(256, vocab_size)
        """Logits, until others are computed."""

    def run(self, step: Step, fill: Fill | None = None) -> ForwardOutput:
        rows = [
            replace(each, token_ids=[*each.token_ids], tables=[[*blocks] for blocks in each.tables])
            for each in step.batch
        ]
        logits = self._kept[: len(step.logit_rows)]
        if self._state_slots is not None:
            self._state_slots.launch(rows)

        def compute() -> None:
            computed = self._runner.run(step._replace(batch=rows), fill).logits
            self._kept.fill_(torch.nan)
            logits.copy_(computed)

        self._device.log.append(("launch", self._device.num_steps))
        self._device.num_steps += 1
        self._device.put(compute)
        return ForwardOutput(logits, None)


class LateSampler:
    def __init__(self, sampler: Any, device: LateDevice) -> None:
        self._sampler = sampler
        self._device = device

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)

    def prompt_logprobs(self, logits: Tensor, next_token_ids: list[int], num_top: int) -> Any:
        self._device.finish()
        return self._sampler.prompt_logprobs(logits, next_token_ids, num_top)

    def begin(self, logits: Tensor, rows: Sequence[SamplingRow]) -> TokenChoice:
        device, step = self._device, self._device.num_steps - 1
        chosen = torch.full((len(rows),), 1 << 40)
        failed: list[int] = []

        def choose() -> None:
            tokens, failed_rows = self._sampler.choose(logits, rows)
            failed.extend(failed_rows)
            chosen.copy_(tokens)
            chosen[failed_rows] = -1

        end = device.put(choose)

        def wait() -> tuple[Tensor, list[int]]:
            device.log.append(("wait", step))
            device.reach(end)
            return chosen.clamp_min(0), failed

        return TokenChoice(chosen, wait)


def put_on_late_device(engine: Engine, *, ahead: bool) -> LateDevice:
    """Put an engine's torch runner on such a device, with or without steps ahead. Drafts must not come from a
    model.
    """
    device, held = LateDevice(), engine.pool
    state_slots = LateStateSlots(held.state_slots, device) if held.state_slots is not None else None
    runner: Any = LateRunner(engine._runner, engine.vocab_size, device, state_slots)
    sampler: Any = LateSampler(engine._sampler, device)
    copy = held.copy_block
    held.copy_block = lambda *args: device.put(lambda: copy(*args))
    engine._sampler = sampler
    engine._launcher = StepLauncher(runner, sampler, engine.scheduler, engine._speculator, runs_ahead=ahead)
    engine.sequences.sampler, engine.sequences.launcher = sampler, engine._launcher
    _verify_late(engine._speculator, device)
    return device


def _verify_late(speculator: Any, device: LateDevice) -> None:
    verify = speculator.verify

    def wait_and_verify(*args: Any) -> Any:
        device.log.append(("wait", device.num_steps - 1))
        device.finish()
        return verify(*args)

    speculator.verify = wait_and_verify
