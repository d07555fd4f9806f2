"""The speculator of a draft worker's engine, which makes several draft tokens of a request in one step."""

from __future__ import annotations

from torch import Tensor

from engine.batch.step_inputs import SequenceRows
from engine.devices.attention import backend_over, select_backend
from engine.devices.loaded_model import LoadedModel
from engine.kv.layout import TARGET
from engine.kv.pool import KVPool
from engine.load.select import build_runner
from engine.sampler import Sampler
from engine.step.draft import Outcome
from engine.step.scheduler import ScheduledStep
from engine.step.sequence import SequenceStage, SequenceState
from engine.step.speculation_interface import Speculator
from protocol.config import ServeConfig
from protocol.errors import ConfigError
from speculation.chains import NativeChain

AT_ONCE = 8
"""The most draft tokens of a request per step. An additional token costs a tenth of a step of its own, but
the engine only learns after the step which drafts the target has contradicted meanwhile.
"""


class MultiStepSpeculator(Speculator):
    """The speculator of a draft worker. It verifies nothing, since each
    token of its engine is a draft for another worker. Without the native decoder a step makes one token.
    """

    def __init__(self, config: ServeConfig, loaded: LoadedModel) -> None:
        """Raise `ConfigError` if the draft model cannot drop tokens."""
        if loaded.recurrent is not None:
            name = loaded.model.config.model_type
            raise ConfigError(
                f"--speculative-config: model: {name}: a draft with recurrent state is not supported on "
                "draft workers"
            )
        self._config = config
        self._chain: NativeChain | None = None

    def attach(self, loaded: LoadedModel, pool: KVPool, sampler: Sampler) -> None:
        backend_class, _ = select_backend(loaded.device, loaded.dtype, self._config.attention_backend)
        backend = backend_over(backend_class, pool.layers(TARGET), pool.groups[TARGET])
        chains = build_runner(loaded, backend, self._config.compile).chains
        if chains is not None:
            self._chain = NativeChain(chains, loaded.vocab_size, "coupled")

    def finish(self, step: ScheduledStep, hidden: Tensor | None) -> None:
        """Draft further tokens for requests that got a token in this step and want more."""
        if self._chain is None:
            return
        drafting: list[tuple[int, SequenceState, Outcome]] = []
        for sequence, outcome in zip(step.sequences, step.outcomes, strict=True):
            if outcome.verdict is None or sequence.stage is not SequenceStage.RUNNING:
                continue
            wanted = (sequence.hold_at or 0) - len(sequence.token_ids)
            count = min(AT_ONCE - 1, wanted)
            if self._has_room(sequence, count):
                drafting.append((count, sequence, outcome))
        if not drafting:
            return
        drafting.sort(key=lambda each: -each[0])
        counts, sequences = [each[0] for each in drafting], [each[1] for each in drafting]
        rows = [
            SequenceRows(each.token_ids[each.num_computed :], each.num_computed, each.held.blocks)
            for each in sequences
        ]
        drafts = self._chain.draft(sequences, rows, counts)
        for (count, sequence, outcome), draft in zip(drafting, drafts, strict=True):
            for token_id in draft.token_ids:
                sequence.append(token_id)
            sequence.num_computed += count
            outcome.num_tokens += count
            outcome.num_accepted += count  # so the router learns how many tokens a step gives a row

    def _has_room(self, sequence: SequenceState, count: int) -> bool:
        if count <= 0 or self._chain is None or not self._chain.can_draft([sequence]):
            return False
        return sequence.held.grow(sequence.num_computed, len(sequence.token_ids) + count)

    def may_go_ahead(self, step: ScheduledStep, num_active: int) -> bool:
        return False  # a step may end with several tokens
