"""Launches of steps on the device; on a GPU the next step is launched before this step's tokens are read.

While a GPU computes a step, the host packs and launches the next one. Its rows take their tokens on the
device, where this step leaves them (`LateTokens`). So the GPU computes the next step while the host reads
this step's tokens, commits them and schedules.

Sequences hold committed tokens only and get a step's tokens when the step is over. A sequence may turn out to
have ended when it has a row in the next step already; that row's token is dropped. The row writes KV after
the sequence's last token, so the blocks are kept until the next step is over. It changes the state of
recurrent layers only after the grid point (see `pack_ahead`). State slots are taken when no step is ahead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from engine.batch.runner import ForwardOutput, Runner
from engine.kv.sequence_blocks import SequenceBlocks
from engine.sampler import Sampler
from engine.sampler.rows import SamplingRow, TokenChoice
from engine.step.draft import LateTokens, Verdict
from engine.step.packing import PackedStep, pack, pack_ahead
from engine.step.scheduler import ScheduledStep, Scheduler
from engine.step.sequence import SequenceStage, SequenceState
from engine.step.speculation_interface import Speculator


@dataclass(eq=False)
class Launched:
    """A step on the device. `choice` has the tokens sampled for `rows`; it is None if no row samples, or if
    drafts are to be verified.
    """

    step: ScheduledStep
    packed: PackedStep
    logits: Tensor
    hidden: Tensor | None = None
    rows: Sequence[SamplingRow] = ()
    choice: TokenChoice | None = None
    kept: list[SequenceBlocks] = field(default_factory=list)
    """The blocks of sequences that ended after the launch; the device may still write to them."""

    @property
    def sampled(self) -> Tensor:
        count = self.packed.num_sampled_rows
        return self.logits if len(self.logits) == count else self.logits[:count]

    def free_kept(self) -> None:
        """Free the kept blocks once the step is over."""
        for sequence_blocks in self.kept:
            sequence_blocks.free()


class StepLauncher:
    def __init__(
        self,
        runner: Runner,
        sampler: Sampler,
        scheduler: Scheduler,
        speculator: Speculator,
        *,
        runs_ahead: bool,
        embeds: bool = False,
    ) -> None:
        """Launch steps ahead if `runs_ahead` and the runner can fill in late tokens. With `embeds`, requests
        may ask for embeddings.
        """
        self._runner = runner
        self._runs_ahead = runs_ahead and runner.can_fill
        self._sampler = sampler
        self._scheduler = scheduler
        self._embeds = embeds
        self._speculator = speculator
        self._ahead: Launched | None = None

    @property
    def is_ahead(self) -> bool:
        return self._ahead is not None

    def step_ahead(self) -> ScheduledStep | None:
        """Return the step that was launched ahead, if any, with the sequences that still run."""
        if self._ahead is None:
            return None
        step = self._ahead.step
        step.sequences = [each for each in step.sequences if each.stage is SequenceStage.RUNNING]
        step.num_tokens = [1] * len(step.sequences)
        return step

    def take_ahead(self) -> Launched | None:
        """Return the step that was launched ahead, if any, to be finished now."""
        launched, self._ahead = self._ahead, None
        if launched is not None:
            self._speculator.went_ahead(launched.step, self._scheduler.num_active)
        return launched

    def launch(self, step: ScheduledStep) -> Launched:
        scheduler = self._scheduler
        wants_hidden = self._speculator.prepare(step, scheduler.num_active, scheduler.make_room)
        if self._embeds:
            wants_hidden = any(sequence.params.embeds for sequence in step.sequences)
        packed = pack(step, takes_late=self._runner.can_fill)
        rows = _sampling_rows(packed)
        self._sampler.expect(rows)
        logits, hidden = self._run(packed, wants_hidden)
        launched = Launched(step, packed, logits, hidden)
        if rows and len(rows) == len(packed.sampled):
            launched.rows = rows
            launched.choice = self._sampler.begin(launched.sampled, rows)
        return launched

    def _run(self, packed: PackedStep, wants_hidden: bool) -> ForwardOutput:
        fill = packed.late.fill if packed.late is not None else None
        return self._runner.run(packed.step(wants_hidden=wants_hidden), fill)

    def launch_ahead(self, launched: Launched) -> None:
        """Launch the next step if it is one more token for each continuing sequence, whatever the tokens."""
        if not self._runs_ahead or launched.choice is None:
            return
        step = self._scheduler.following(launched.step)
        if step is None:
            return
        if not self._speculator.may_go_ahead(step, self._scheduler.num_active_with(len(step.sequences))):
            return
        chosen = LateTokens(launched.choice.token_ids, self._sampler.download)
        packed = pack_ahead(step.sequences, launched.packed, chosen)
        logits, _ = self._run(packed, wants_hidden=False)
        rows = [sequence.row_after(1) for sequence in step.sequences]
        self._ahead = Launched(step, packed, logits, None, rows, self._sampler.begin(logits, rows))

    def verdicts(self, launched: Launched) -> list[Verdict]:
        """Wait for the tokens, and return the verdict for each sequence that samples in this step."""
        sampled = launched.packed.sampled
        if not sampled:
            return []
        if launched.choice is None:
            return self._speculator.verify(sampled, launched.sampled)
        output = self._sampler.finish(launched.choice, launched.sampled, launched.rows)
        failed = set(output.failed_rows)
        return [
            Verdict([token_id], [], [logprobs], failed=index in failed)
            for index, (token_id, logprobs) in enumerate(zip(output.token_ids, output.logprobs, strict=True))
        ]

    def collect_prompt_logprobs(self, launched: Launched) -> None:
        """Add the log-probabilities of the step's chunks of prompts to their sequences."""
        place = launched.packed.num_sampled_rows
        for sequence, count in launched.packed.prompts:
            if not sequence.prompt_logprobs:
                sequence.prompt_logprobs.append(None)
            first = sequence.num_computed + 1
            targets = sequence.prompt_token_ids[first : first + count]
            num_top = sequence.params.prompt_logprobs or 0
            logits = launched.logits[place : place + len(targets)]
            sequence.prompt_logprobs.extend(self._sampler.prompt_logprobs(logits, targets, num_top))
            place += count

    def keep(self, sequence: SequenceState) -> None:
        """Keep the blocks of a sequence that ends for as long as the device may write to them."""
        if self._ahead is not None and sequence.sequence_blocks is not None:
            self._ahead.kept.append(sequence.sequence_blocks)
            sequence.sequence_blocks = None


def _sampling_rows(packed: PackedStep) -> list[SamplingRow]:
    """Return the rows to sample. If drafts are verified, return rows only if a grammar masks them."""
    sampled = packed.sampled
    if packed.num_sampled_rows == len(sampled):
        return [sequence.sampling_row() for sequence in sampled]
    if any(sequence.params.grammar is not None for sequence in sampled):
        return [row for sequence in sampled for row in sequence.step_rows()]
    return []


def embeddings(launched: Launched) -> dict[SequenceState, bytes]:
    """Return the embeddings of the prompts that this step ends, from the last layer's captured states."""
    packed, rows, end = launched.packed, {}, 0
    for sequence, each in zip(launched.step.sequences, packed.batch, strict=True):
        end += len(each.token_ids)
        if sequence.params.embeds:
            rows[sequence] = end - 1
    if not rows:
        return {}
    assert launched.hidden is not None
    states = launched.hidden[[*rows.values()]].float()
    vectors = torch.nn.functional.normalize(states, dim=-1).cpu().numpy().astype("<f4")
    return {sequence: vector.tobytes() for sequence, vector in zip(rows, vectors, strict=True)}
