"""The model's forward over packed rows, compiled where that pays.

A forward of a small model on a CPU is dominated by the many small operators between the matrix products.
torch.compile fuses those, and inductor's freezing packs the weights for the matrix kernels once.
"""

from __future__ import annotations

import logging
import shutil
import time
import types
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from engine.batch.rows import BlockTable, SequenceRows, span_of
from engine.batch.runner import Fill, ForwardOutput, Step
from engine.batch.step_inputs import StepInputs, StepShape, step_inputs
from engine.devices.torch import transformers_hook
from engine.devices.torch.products import torch_products
from engine.devices.torch.recurrent import StepOperators
from engine.devices.torch.recurrent_hooks import RecurrentHooks
from engine.kv.attention import AttentionBackend
from engine.lora.layers import begin_step, groups_of
from engine.lora.table import Adapters
from engine.phases import phase
from engine.upload import upload_to
from native.build import own_inductor_cache
from protocol.errors import ConfigError

logger = logging.getLogger("tandem.engine")

MIN_ROWS = 2
"""torch.compile specializes on a size of 1, so one dynamic graph serves every size only from two rows on."""

WARM_UP_ROWS = 67
"""Unlike the number of logit rows and any width, or torch.compile would take the two sizes for one."""

LAYER_S = 3
"""[s] The CPU time that torch.compile takes for a layer, as measured on a Llama of 30 layers."""

ONEDNN_MIN_ROWS = 4
"""oneDNN's matrix kernels take less time for four rows than for one or two."""


class RowsForward(ABC):
    """A `Runner` by a function of packed rows in torch, compiled where that pays."""

    any_threads = deterministic = False
    can_fill = True

    def __init__(
        self,
        backend: AttentionBackend,
        device: torch.device,
        mode: str,
        *,
        products: str,
        packed: bool = False,
        adapters: Adapters | None = None,
    ) -> None:
        """`packed`: the linear layers are ours (`engine.linear`). Rows' `adapters` are attached to them."""
        self.products = products
        self._backend = backend
        self._adapters = adapters
        self._packed = packed
        self._min_rows = MIN_ROWS if packed else ONEDNN_MIN_ROWS
        self._device = device
        self._upload = upload_to(device)
        self._block_table = BlockTable(backend.block_size, backend.num_tables)
        self._mode = mode
        self.compiled, self.choice = _choose(mode, device)
        self._run = _compile(self._compute, adapters is not None) if self.compiled else self._compute

    def run(self, step: Step, fill: Fill | None = None) -> ForwardOutput:
        least = StepShape(self._min_rows, MIN_ROWS) if self.compiled else StepShape(logits=1)
        logits, hidden = self._execute(step, least, fill)
        return ForwardOutput(logits[: len(step.logit_rows)], hidden if step.wants_hidden else None)

    @torch.inference_mode()
    def _execute(self, step: Step, least: StepShape, fill: Fill | None = None) -> ForwardOutput:
        """A logit for each row asked for, and those that pad them."""
        inputs = step_inputs(step.batch, step.logit_rows, self._upload, self._block_table, least)
        if fill is not None:
            fill(inputs)
        self._backend.plan(inputs.attention)
        self._backend.begin_step(inputs.attention)
        self._begin(step.batch)
        return self._call(inputs, step.hidden)

    def _begin(self, batch: Sequence[SequenceRows]) -> None:
        """Prepare the backend and the adapters that layers call for these rows."""
        transformers_hook.set_current_backend(self._backend)
        adapters = self._adapters
        begin_step(groups_of(batch, adapters, self._device) if adapters is not None else ())

    @abstractmethod
    def _call(self, inputs: StepInputs, before: Tensor | None) -> ForwardOutput: ...

    @abstractmethod
    def _compute(self, *inputs: Tensor) -> tuple[Tensor, Tensor | None]:
        """Run the rows. This is compiled."""

    def _expected(self) -> str:
        """Return how long compiling takes, for a log line."""
        return "about ten seconds"

    def warm_up(self) -> float:
        """Compile by running padding rows; returns the seconds it took.

        A model that does not compile runs eagerly from now on; with `--compile on` that is a ConfigError.
        """
        if self._packed and self._adapters is None:
            compiled, self._run = self._run, self._compute
            self.deterministic = not torch_products(
                lambda: self._execute(Step([], [0, 1]), StepShape(WARM_UP_ROWS))
            )
            self._run = compiled
        if not self.compiled:
            return 0.0
        start = time.monotonic()
        try:
            with phase("compiling the model", self._expected()):
                self._execute(Step([], [0, 1]), StepShape(WARM_UP_ROWS))
        except torch._dynamo.exc.TorchDynamoException as error:
            if self._mode == "on":
                raise ConfigError(f"--compile: the model does not compile: {error}") from error
            logger.warning("the model does not compile, so it runs eagerly: %s", error)
            self.compiled, self.choice = False, f"eager (torch.compile failed: {type(error).__name__})"
            self._run = self._compute
        return time.monotonic() - start


class Forward(RowsForward):
    """A model's own modules, with recurrent layers by our `operators`, if it has some, which `hooks` put in
    place.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        backend: AttentionBackend,
        mode: str,
        hidden_layers: tuple[int, ...] = (),
        *,
        products: str,
        packed: bool = False,
        adapters: Adapters | None = None,
        hooks: RecurrentHooks | None = None,
        operators: StepOperators | None = None,
    ) -> None:
        """`hidden_layers` are captured, numbered as in Transformers' `hidden_states`."""
        mode = mode if operators is None else "off"
        super().__init__(backend, model.device, mode, products=products, packed=packed, adapters=adapters)
        self._hooks, self._operators = hooks, operators
        if operators is not None:
            self.choice = f"eager, recurrent layers by {operators.name} operators"
        self._model = model
        self._hidden_layers = hidden_layers
        self._can_capture = not hidden_layers

    def _begin(self, batch: Sequence[SequenceRows]) -> None:
        super()._begin(batch)
        if self._hooks is not None and self._operators is not None:
            self._operators.begin_step([span_of(rows) for rows in batch])
            self._hooks.operators = self._operators

    def _expected(self) -> str:
        layers = self._model.config.get_text_config(decoder=True).num_hidden_layers
        seconds = 10 + LAYER_S * layers
        slower = "none with --compile off, which decodes several requests more slowly"
        return f"about {seconds} s of CPU time for its {layers} layers, and {slower}"

    def _call(self, inputs: StepInputs, before: Tensor | None) -> ForwardOutput:
        rows = inputs.token_ids.unsqueeze(0), inputs.positions.unsqueeze(0), inputs.logit_rows
        if self.compiled and not self._can_capture:
            # Transformers sets its hooks in the first forward, which compiled code cannot.
            self._compute(*rows)
            self._can_capture = True
        logits, hidden = self._run(*rows)
        return ForwardOutput(logits[0], None if hidden is None else hidden[0])

    def _compute(self, *inputs: Tensor) -> tuple[Tensor, Tensor | None]:
        return run_model(self._model, self._hidden_layers, *inputs)


def run_model(
    model: PreTrainedModel, hidden_layers: Sequence[int], token_ids: Tensor, positions: Tensor, rows: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Run packed rows [1, total]; return logits [1, rows asked for, vocab_size] and, for `hidden_layers`,
    their states [1, total, layers * hidden_size].
    """
    capture = {"output_hidden_states": True} if hidden_layers else {}
    output = model(
        input_ids=token_ids, position_ids=positions, use_cache=False, logits_to_keep=rows, **capture
    )
    if not hidden_layers:
        return output.logits, None
    return output.logits, torch.cat([output.hidden_states[i] for i in hidden_layers], dim=-1)


def _compile(
    method: Callable[..., tuple[Tensor, Tensor | None]], with_adapters: bool
) -> Callable[..., tuple[Tensor, Tensor | None]]:
    import torch._dynamo.config as dynamo
    import torch._inductor.config as inductor

    dynamo.specialize_float = True  # an epsilon or a scale is no input to be made a tensor of at each step
    inductor.freezing = True
    inductor.cpp.dynamic_threads = True
    inductor.size_asserts = inductor.alignment_asserts = False
    # The model never changes, so guards on it would only cost time at each step. But what is compiled
    # belongs to the code, and without guards one model's would serve the next: so each has a code of its
    # own.
    options = {
        "guard_filter_fn": torch.compiler.skip_all_guards_unsafe,
        # One product for q, k, v and one for gate and up; it loses what adapters add to a part.
        "cpp.enable_concat_linear": not with_adapters,
    }
    assert isinstance(method, types.MethodType)
    function = method.__func__
    own = types.FunctionType(function.__code__.replace(), function.__globals__, function.__name__)
    return torch.compile(
        types.MethodType(own, method.__self__), fullgraph=True, dynamic=True, options=options
    )


def _choose(mode: str, device: torch.device) -> tuple[bool, str]:
    if mode == "off":
        return False, "eager (--compile off)"
    if device.type != "cpu":
        return False, f"eager (compiling is for CPU hosts, this is {device.type})"
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        return False, "eager (no C++ compiler on this host)"
    try:
        own_inductor_cache()
    except OSError as error:
        return False, f"eager (nowhere to compile: {error})"
    return True, f"torch.compile with packed weights ({compiler})"
