"""Runs a model's own modules, or a draft head's, by torch's operators: for models that nothing else runs."""

from __future__ import annotations

import logging
import shutil
import time
import types
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from engine.batch.runner import Step, StepOperators
from engine.batch.step_inputs import SequenceRows, StepInputs, StepShape
from engine.copies import Upload, upload_to
from engine.devices.step_runner import Outputs, StepRunner
from engine.devices.torch import transformers_hook
from engine.devices.torch.recurrent_hooks import RecurrentHooks
from engine.kv.attention import AttentionBackend
from engine.lora.layers import Addition, attach, begin_step, groups_of
from engine.lora.table import Adapters
from engine.phases import phase
from native.build import own_inductor_cache
from native.ownership import CACHE_VARIABLE
from protocol.errors import ConfigError

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


logger = logging.getLogger("tandem.engine")

MIN_ROWS = 2
"""Fewest rows of a compiled step: torch.compile specializes on size 1; one dynamic graph serves the rest."""

WARM_UP_ROWS = 67
"""Warm-up rows: unequal to the logit rows and any width, or torch.compile would take the sizes for one."""

ONEDNN_MIN_ROWS = 4
"""Fewest rows with oneDNN: its matrix kernels take less time for four rows than for one or two."""


class TorchRunner(StepRunner):
    """A runner that is eager until `warm_up` has compiled the forward."""

    def __init__(
        self,
        forward: TorchForward,
        backend: AttentionBackend,
        device: torch.device,
        mode: str,
        *,
        products: str,
        packed: bool = False,
    ) -> None:
        """Make the runner. `mode` is the value of `--compile`; `packed` says whether `engine.linear` packed
        the layers.
        """
        super().__init__(forward, backend, products)
        self._torch_forward, self._mode, self._packed = forward, mode, packed
        self._upload = upload_to(device)
        self.compiled, self.choice = _choose(mode, device, forward)
        compiled = StepShape(MIN_ROWS if packed else ONEDNN_MIN_ROWS, MIN_ROWS)
        eager = StepShape(logits=0 if forward.hidden_of_all else 1)
        self._shape = compiled if self.compiled else eager

    def _shape_of(self, step: Step) -> StepShape:
        return self._shape

    def _uploader(self, shape: StepShape) -> Upload:
        return self._upload

    def _execute(
        self, inputs: StepInputs, batch: Sequence[SequenceRows], shape: StepShape
    ) -> tuple[Outputs, bool]:
        self._torch_forward.group(batch)
        return self._compute(inputs), False

    def warm_up(self) -> float:
        """Compile by running padding rows; return the seconds that it took. A model that does not compile
        stays eager or, with `--compile on`, raises ConfigError.
        """
        forward = self._torch_forward
        if self._packed or self.compiled:  # an eager forward also sets Transformers' hooks
            torchs = torch_products(self._run_padding)
            sums_alike = self._backend.deterministic and not torchs
            self.deterministic = self._packed and forward.adapters is None and sums_alike
        if not self.compiled:
            return 0.0
        start = time.monotonic()
        forward.compute = _compiled(forward.run_rows, forward.adapters is not None)
        try:
            with phase("compiling the model", forward.compile_time):
                self._run_padding()
        except torch._dynamo.exc.TorchDynamoException as error:
            if self._mode == "on":
                raise ConfigError(f"--compile: the model does not compile: {error}") from error
            logger.warning("the model does not compile, so it runs eagerly: %s", error)
            self.compiled, self.choice = False, f"eager (torch.compile failed: {type(error).__name__})"
            forward.compute, self._shape = forward.run_rows, StepShape(logits=1)
        return time.monotonic() - start

    @torch.inference_mode()
    def _run_padding(self) -> None:
        shape = StepShape(WARM_UP_ROWS)
        inputs = self._inputs(Step([], [0, 1]), shape)
        self._backend.plan(inputs.attention)
        self._execute(inputs, [], shape)


def _compiled(
    method: Callable[..., tuple[Tensor, Tensor | None]], with_adapters: bool
) -> Callable[..., tuple[Tensor, Tensor | None]]:
    import torch._dynamo.config as dynamo
    import torch._inductor.config as inductor

    dynamo.specialize_float = True  # else floats such as epsilons become tensors in each step
    inductor.freezing = True
    inductor.cpp.dynamic_threads = True
    inductor.size_asserts = inductor.alignment_asserts = False
    # The model never changes, so guards would only cost time in each step. But compiled code is cached by
    # code object, and without guards the next model would get this model's: so each model has its own code
    # object.
    options = {
        "guard_filter_fn": torch.compiler.skip_all_guards_unsafe,
        # One product for q, k, v and one for gate and up; it would lose adapters' additions to a part.
        "cpp.enable_concat_linear": not with_adapters,
    }
    assert isinstance(method, types.MethodType)
    function = method.__func__
    own = types.FunctionType(function.__code__.replace(), function.__globals__, function.__name__)
    return torch.compile(
        types.MethodType(own, method.__self__), fullgraph=True, dynamic=True, options=options
    )


def _choose(mode: str, device: torch.device, forward: TorchForward) -> tuple[bool, str]:
    """Return whether to compile, and the runner's name."""
    if forward.operators is not None:
        return False, f"eager, recurrent layers by {forward.operators.name} operators"
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
        return False, f"eager (nowhere to compile, see {CACHE_VARIABLE}: {error})"
    return True, f"torch.compile with packed weights ({compiler})"


_PRODUCTS = {
    **dict.fromkeys(("mm", "bmm", "mv", "dot", "matmul", "linear", "_grouped_mm", "_scaled_mm"), 0),
    **dict.fromkeys(("addmm", "baddbmm", "addmv", "addbmm"), 1),
}
"""Torch's products by the index of the left factor, whose last dimension is summed over."""


def torch_products(run: Callable[[], object]) -> list[str]:
    """Return the names of torch's operators that sum products while `run` runs."""
    with _Watch() as watch:
        run()
    return sorted(watch.found)


class _Watch(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if name in _PRODUCTS:
            left: Tensor = args[_PRODUCTS[name]]
            if left.shape[-1] > 1:  # a single product, as in a rotary embedding, is no sum
                self.found.add(name)
        elif "conv" in name or "einsum" in name:
            self.found.add(name)
        return func(*args, **(kwargs or {}))
