"""The model's forward over packed rows, compiled where that pays.

A forward of a small model on a CPU is dominated by the many small operators between the matrix products.
torch.compile fuses those, and inductor's freezing packs the weights for the matrix kernels once.
"""

from __future__ import annotations

import logging
import shutil
import time
import types
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from protocol.errors import ConfigError

logger = logging.getLogger("tandem.engine")

MIN_ROWS = 2
"""torch.compile specializes on a size of 1, so one dynamic graph serves every size only from two rows on."""

ONEDNN_MIN_ROWS = 4
"""oneDNN's matrix kernels take less time for four rows than for one or two."""


class ForwardOutput(NamedTuple):
    """`logits` [rows asked for, vocab_size]. `hidden` [all rows, captured layers * hidden_size], if any."""

    logits: Tensor
    hidden: Tensor | None


class Forward:
    """Callable (token_ids [rows], positions [rows], logit_rows) -> ForwardOutput.

    `choice` says whether it is compiled, and why.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        device: torch.device,
        mode: str,
        hidden_layers: tuple[int, ...] = (),
        *,
        products: str,
        packed: bool = False,
    ) -> None:
        """`hidden_layers` are captured, numbered as in Transformers' `hidden_states`. `products` says how its
        linear layers multiply; `packed`: with our kernel (`engine.linear`)."""
        self._min_rows = MIN_ROWS if packed else ONEDNN_MIN_ROWS
        self._model = model
        self._device = device
        self._mode = mode
        self._hidden_layers = hidden_layers
        self.products = products
        self.compiled, self.choice = _choose(mode, device)
        self._run = self._compile() if self.compiled else self._model_forward

    def padded_rows(self, total_tokens: int) -> int:
        """How many rows the packed input should have for `total_tokens` real ones."""
        return max(total_tokens, self._min_rows) if self.compiled else total_tokens

    def __call__(self, token_ids: Tensor, positions: Tensor, logit_rows: list[int]) -> ForwardOutput:
        keep = logit_rows
        wanted = MIN_ROWS if self.compiled else 1
        if len(keep) < wanted:
            keep = keep + [0] * (wanted - len(keep))
        rows = torch.tensor(keep, device=self._device)
        logits, hidden = self._run(token_ids.unsqueeze(0), positions.unsqueeze(0), rows)
        return ForwardOutput(logits[0, : len(logit_rows)], None if hidden is None else hidden[0])

    def _model_forward(
        self, token_ids: Tensor, positions: Tensor, rows: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        capture = {"output_hidden_states": True} if self._hidden_layers else {}
        output = self._model(
            input_ids=token_ids, position_ids=positions, use_cache=False, logits_to_keep=rows, **capture
        )
        if not self._hidden_layers:
            return output.logits, None
        return output.logits, torch.cat([output.hidden_states[i] for i in self._hidden_layers], dim=-1)

    def _compile(self) -> Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor | None]]:
        import torch._inductor.config as inductor

        inductor.freezing = True
        inductor.cpp.enable_concat_linear = True  # one product for q, k, v and one for gate and up
        inductor.cpp.dynamic_threads = True
        inductor.size_asserts = inductor.alignment_asserts = False
        # The model never changes, so guards on it would only cost time at each step. But what is compiled
        # belongs to the code, and without guards one model's would serve the next: so each has a code of its
        # own.
        options = {"guard_filter_fn": torch.compiler.skip_all_guards_unsafe}
        function = type(self)._model_forward
        own = types.FunctionType(function.__code__.replace(), function.__globals__, function.__name__)
        return torch.compile(types.MethodType(own, self), fullgraph=True, dynamic=True, options=options)

    def warm_up(self, run: Callable[[], None]) -> float:
        """`run` some rows, which compiles; returns the seconds it took.

        A model that does not compile runs eagerly from now on; with `--compile on` that is a ConfigError.
        """
        if not self.compiled:
            return 0.0
        start = time.monotonic()
        try:
            run()
        except torch._dynamo.exc.TorchDynamoException as error:
            if self._mode == "on":
                raise ConfigError(f"--compile: the model does not compile: {error}") from error
            logger.warning("the model does not compile, so it runs eagerly: %s", error)
            self.compiled, self.choice = False, f"eager (torch.compile failed: {type(error).__name__})"
            self._run = self._model_forward
        return time.monotonic() - start


def _choose(mode: str, device: torch.device) -> tuple[bool, str]:
    if mode == "off":
        return False, "eager (--compile off)"
    if device.type != "cpu":
        return False, f"eager (compiling is for CPU hosts, this is {device.type})"
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        return False, "eager (no C++ compiler on this host)"
    return True, f"torch.compile with packed weights ({compiler})"
