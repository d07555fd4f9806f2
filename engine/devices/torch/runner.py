"""The runner of forwards by torch's operators, compiled where that pays.

The many small operators between matrix products dominate a small model's forward on a CPU. torch.compile
fuses them, and inductor's freezing packs the weights for the matrix kernels once. The last bits of a row that
torch multiplies may depend on the number of rows.
"""

from __future__ import annotations

import logging
import shutil
import time
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from engine.batch.rows import SequenceRows
from engine.batch.runner import Step
from engine.batch.step_inputs import StepInputs, StepShape
from engine.copies import Upload, upload_to
from engine.devices.step_runner import Outputs, StepRunner
from engine.devices.torch.forward import TorchForward
from engine.kv.attention import AttentionBackend
from engine.phases import phase
from native.build import own_inductor_cache
from protocol.errors import ConfigError

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
        """Compile by running padding rows; return the seconds that it took.

        A model that does not compile runs eagerly from then on; with `--compile on`, raise ConfigError.
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
        return False, f"eager (nowhere to compile: {error})"
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
