"""Forwards by torch's operators: a model's own modules, for models without another executor."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from engine.batch.operators import StepOperators
from engine.batch.rows import SequenceRows
from engine.batch.step_inputs import StepInputs
from engine.devices.torch import transformers_hook
from engine.devices.torch.recurrent_hooks import RecurrentHooks
from engine.kv.attention import AttentionBackend
from engine.lora.layers import Addition, attach, begin_step, groups_of
from engine.lora.table import Adapters

LAYER_S = 3
"""CPU seconds that torch.compile takes for a layer, measured on a Llama of 30 layers."""


class TorchForward(ABC):
    """A `Forward` whose attention runs over the pool of `backend`."""

    name = "torch's operators"
    no_hidden: Tensor | None = None
    hidden_of_all = False
    compile_time = "about ten seconds"
    """The time that compiling takes, for a log line."""

    def __init__(
        self,
        backend: AttentionBackend,
        adapters: Adapters | None = None,
        operators: StepOperators | None = None,
    ) -> None:
        self.adapters, self.operators = adapters, operators
        self._backend = backend
        self._additions: Sequence[Addition] = ()
        self.compute: Callable[..., tuple[Tensor, Tensor | None]] = self.run_rows
        """The method `run_rows`, or its compiled form."""

    def group(self, batch: Sequence[SequenceRows]) -> None:
        """Group the rows by adapter, for a step whose inputs have no adapter addresses."""
        if self.adapters is not None:
            self._additions = groups_of(batch, self.adapters)

    def forward(self, inputs: StepInputs) -> tuple[Tensor, Tensor | None]:
        transformers_hook.set_current_backend(self._backend)
        return self._call(inputs)

    @abstractmethod
    def _call(self, inputs: StepInputs) -> tuple[Tensor, Tensor | None]: ...

    @abstractmethod
    def run_rows(self, *inputs: Tensor) -> tuple[Tensor, Tensor | None]:
        """Compute packed rows. torch.compile compiles this method."""


class Modules(TorchForward):
    """A model's own modules. `hooks` replace its recurrent layers' functions by `operators`."""

    def __init__(
        self,
        model: PreTrainedModel,
        backend: AttentionBackend,
        hidden_layers: tuple[int, ...] = (),
        adapters: Adapters | None = None,
        hooks: RecurrentHooks | None = None,
        operators: StepOperators | None = None,
        by_address: Callable[[Tensor], Addition] | None = None,
    ) -> None:
        """Make the forward. `hidden_layers` are captured, numbered like in Transformers' `hidden_states`.
        `by_address` turns the rows' adapter addresses into an addition.
        """
        super().__init__(backend, adapters, operators)
        self.name = "the model's own modules"
        if operators is not None:
            self.name += f", recurrent layers by {operators.name} operators"
        if adapters is not None:
            attach(model, adapters)
        self._model, self._hidden_layers = model, hidden_layers
        self._hooks, self._by_address = hooks, by_address
        layers = model.config.get_text_config(decoder=True).num_hidden_layers
        self.compile_time = (
            f"about {10 + LAYER_S * layers} s of CPU time for its {layers} layers, and none with "
            "--compile off, which decodes several requests more slowly"
        )

    def _call(self, inputs: StepInputs) -> tuple[Tensor, Tensor | None]:
        if inputs.adapters is None:
            begin_step(self._additions)
        else:
            assert self._by_address is not None
            begin_step([self._by_address(inputs.adapters)])
        if self._hooks is not None and self.operators is not None:
            self._hooks.operators = self.operators
        rows = inputs.token_ids.unsqueeze(0), inputs.positions.unsqueeze(0), inputs.logit_rows
        logits, hidden = self.compute(*rows)
        return logits[0], None if hidden is None else hidden[0]

    def run_rows(self, *inputs: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the logits [1, rows in `logit_rows`, vocab_size] of packed rows [1, total], and the states
        of `hidden_layers` [1, total, layers * hidden_size].
        """
        token_ids, positions, rows = inputs
        capture = {"output_hidden_states": True} if self._hidden_layers else {}
        output = self._model(
            input_ids=token_ids, position_ids=positions, use_cache=False, logits_to_keep=rows, **capture
        )
        if not self._hidden_layers:
            return output.logits, None
        states = [output.hidden_states[layer] for layer in self._hidden_layers]
        return output.logits, torch.cat(states, dim=-1)


class HeadModules(TorchForward):
    """The modules of a draft head: a model of its decoder layers, after an `entry` that makes their input
    from rows' embeddings and the previous hidden states (`engine.load.extra_layers.Entrance`).
    """

    def __init__(
        self,
        model: PreTrainedModel,
        backend: AttentionBackend,
        embeddings: nn.Module | None = None,
        *,
        hidden_of_all: bool = False,
    ) -> None:
        """Make the forward. `embeddings` are the model's own by default."""
        super().__init__(backend)
        self.hidden_of_all = hidden_of_all
        self.name = "the head's own modules"
        self._model: Any = model
        self._embeddings: Any = embeddings or model.get_input_embeddings()
        weight = self._embeddings.weight
        self.no_hidden = weight.new_zeros((0, weight.shape[1]))

    def _call(self, inputs: StepInputs) -> tuple[Tensor, Tensor | None]:
        assert inputs.hidden is not None
        return self.compute(inputs.token_ids, inputs.positions, inputs.logit_rows, inputs.hidden)

    def run_rows(self, *inputs: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the logits of the requested rows, and their outputs, or all outputs with `hidden_of_all`."""
        token_ids, positions, rows, before = inputs
        entered = self._model.entry(self._embeddings(token_ids), before).unsqueeze(0)
        decoder = self._model.get_decoder()
        states = decoder(inputs_embeds=entered, position_ids=positions.unsqueeze(0), use_cache=False)
        outputs = states.last_hidden_state[0]
        last = outputs[rows]
        logits = self._model.get_output_embeddings()(last) if len(last) else last
        return logits, outputs if self.hidden_of_all else last
