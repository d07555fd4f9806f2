"""Sampling of tokens from logits, for a whole batch at once.

A row's token is the argmax of its processed log-probabilities plus noise keyed by (seed, position), so it
depends on the row only. The processing, in vLLM's order: logit bias, allowed tokens, bans, `min_tokens`,
penalties, grammar, temperature, min-p, top-k, top-p. Greedy rows take the argmax before the temperature.
Among equal values the lowest token id wins.

On a CPU with a compiler, one native call (`native.py`) samples a batch; on a CUDA device, one or two kernels
do (`triton_kernel/`). Elsewhere torch's operators (`torch_sampler.py`) give the same tokens.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from torch import Tensor

from engine.copies import Downloader, upload_to
from engine.devices.attention import backend_fault
from engine.sampler.edits import Penalties, edit_lists
from engine.sampler.grammars import Grammars
from engine.sampler.logprobs import token_logprobs
from engine.sampler.native import NativeSampler, compiled
from engine.sampler.rows import Batch, RequestParams, RowSampler, SamplingRow, TokenChoice, TokenMasks
from engine.sampler.torch_sampler import TorchSampler
from protocol.outputs import TokenLogprobs
from protocol.sampling import SamplingParams

if TYPE_CHECKING:
    from engine.sampler.triton_kernel.chooser import Chosen, TritonSampler


@dataclass(slots=True, eq=False)
class SampleOutput:
    """One entry per row. `failed_rows` had no token of finite score (NaN logits, or every token forbidden);
    their tokens are undefined."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs | None]
    failed_rows: list[int] = field(default_factory=list)


class Sampler:
    """The sampler of one model. Its only state follows from each request's tokens: the penalties' counts and
    the place in the grammar, which `forget` drops. Without `grammars`, requests' grammars are ignored.
    """

    def __init__(
        self,
        vocab_size: int,
        device: torch.device | str,
        eos_token_ids: Sequence[int],
        grammars: Grammars | None = None,
        row_sampler: RowSampler | None = None,
    ) -> None:
        """Use `row_sampler`, or by default the best one for the device."""
        self.vocab_size = vocab_size
        self.device = torch.device(device)
        self._eos_token_ids = [token for token in eos_token_ids if token < vocab_size]
        self._penalties = Penalties()
        self.grammars = grammars
        self._requests: RequestParams | None = None
        self._row_sampler = row_sampler or _row_sampler_for(self.device)
        self.upload, self.download = upload_to(self.device), Downloader(self.device)

    @property
    def has_kernels(self) -> bool:
        return self._row_sampler.on_device

    @property
    def _kernels(self) -> TritonSampler:
        return cast("TritonSampler", self._row_sampler)

    @property
    def is_native(self) -> bool:
        return isinstance(self._row_sampler, NativeSampler)

    def warm_up(self, dtype: torch.dtype) -> None:
        """Compile the kernels that sample from logits of this dtype and that draw draft tokens, so that no
        request waits for them.
        """
        if not self.has_kernels:
            return
        logits = torch.zeros(1, self.vocab_size, dtype=dtype, device=self.device)
        greedy, sampled = SamplingParams(max_tokens=1, temperature=0.0), SamplingParams(max_tokens=1)
        edited = SamplingParams(max_tokens=1, logit_bias={0: 1.0})
        for params in (greedy, sampled, edited):
            self.choose(logits, [SamplingRow(params, [], [], 0, "")])
        for params in (sampled, edited):
            self.draw_drafts(logits, [SamplingRow(params, [], [], 0, "")], [0])

    def sample(self, logits: Tensor, rows: Sequence[SamplingRow]) -> SampleOutput:
        """Choose a token for each row of `logits` [n, vocab], of any float dtype; do not change them."""
        if not rows:
            return SampleOutput([], [])
        return self.finish(self.begin(logits, rows), logits, rows)

    def finish(self, choice: TokenChoice, logits: Tensor, rows: Sequence[SamplingRow]) -> SampleOutput:
        """Wait for the tokens of `begin`; return them and the log-probabilities that rows ask for."""
        chosen, failed_rows = choice.wait()
        token_ids = chosen.tolist()
        logprobs = self.logprobs(logits, rows, dict(enumerate(token_ids)))
        return SampleOutput(token_ids, [logprobs.get(row) for row in range(len(rows))], failed_rows)

    def choose(self, logits: Tensor, rows: Sequence[SamplingRow]) -> tuple[Tensor, list[int]]:
        """Return only the tokens, int64 [n], and the rows that failed. There must be at least one row."""
        return self.begin(logits, rows).wait()

    def begin(self, logits: Tensor, rows: Sequence[SamplingRow]) -> TokenChoice:
        """Begin `choose`. If kernels choose, do not wait for the device."""
        return self._row_sampler.begin(self._batch(logits, rows))

    def tokens(self, logits: Tensor, rows: Sequence[SamplingRow], offsets: Tensor | None = None) -> Tensor:
        """Return the tokens of `choose`, on the logits' device. A failed row's token is undefined and may be
        negative. With kernels, `offsets`, int64 [n], is added to the rows' positions.
        """
        if not self._row_sampler.on_device:
            assert offsets is None
            return self.begin(logits, rows).token_ids
        return self._kernels.tokens(self._batch(logits, rows), offsets)

    def probabilities(self, logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
        """Return the distributions that `sample` draws from, float32 [n, vocab]; zeros in rows that fail.

        A row's token is the argmax of its distribution's logarithm plus its noise.
        """
        return self._row_sampler.probabilities(self._batch(logits, rows))

    def chosen(self, logits: Tensor, rows: Sequence[SamplingRow], offsets: Tensor | None = None) -> Chosen:
        """Return the kernels' tokens, with the data to compute probabilities; valid until the next call."""
        return self._kernels.chosen(self._batch(logits, rows), offsets)

    def draw_drafts(
        self, logits: Tensor, rows: Sequence[SamplingRow], starts: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        return self._row_sampler.draw_drafts(self._batch(logits, rows), starts)

    def expect(self, rows: Sequence[SamplingRow]) -> None:
        """Begin to compute the masks of rows whose logits are being computed. Do nothing on a GPU, which
        leaves the host time for the masks anyway.
        """
        is_asked = any(row.params.grammar is not None for row in rows)
        if is_asked and self.grammars is not None and self.device.type == "cpu":
            self.grammars.expect(rows)

    def masks(self, rows: Sequence[SamplingRow]) -> TokenMasks | None:
        """Return the tokens that grammars allow the rows; None if no row has a grammar."""
        return self.grammars.masks(rows) if self.grammars is not None else None

    def logprobs(
        self, logits: Tensor, rows: Sequence[SamplingRow], token_ids: Mapping[int, int]
    ) -> dict[int, TokenLogprobs]:
        """Return the log-probabilities of `token_ids`, tokens by row, for the rows that ask for them."""
        wanted = [row for row in token_ids if rows[row].params.logprobs is not None]
        if not wanted:
            return {}
        num_top = [rows[row].params.logprobs or 0 for row in wanted]
        if len(wanted) < len(rows):
            logits = logits[self.upload([np.array(wanted)])[0]]
        found = self._token_logprobs(logits, [token_ids[row] for row in wanted], num_top)
        return dict(zip(wanted, found, strict=True))

    def prompt_logprobs(self, logits: Tensor, next_token_ids: list[int], num_top: int) -> list[TokenLogprobs]:
        """Return the log-probabilities of prompt tokens: row i of `logits` predicts `next_token_ids[i]`."""
        return self._token_logprobs(logits, next_token_ids, [num_top] * len(next_token_ids))

    def _token_logprobs(
        self, logits: Tensor, token_ids: Sequence[int], num_top: Sequence[int]
    ) -> list[TokenLogprobs]:
        return token_logprobs(logits, token_ids, num_top, self.upload, self.download)

    def problem(self, request_id: str) -> str:
        """Return the reason why the request's grammar failed; "" if it did not."""
        return self.grammars.problem(request_id) if self.grammars is not None else ""

    def forget(self, request_id: str) -> None:
        """Drop the state of a request that is over. Ignore an unknown id."""
        self._penalties.forget(request_id)
        if self.grammars is not None:
            self.grammars.forget(request_id)

    def _batch(self, logits: Tensor, rows: Sequence[SamplingRow]) -> Batch:
        params: list[SamplingParams] = []
        index: list[int] = []
        for row in rows:
            if not params or row.params is not params[-1]:
                params.append(row.params)
            index.append(len(params) - 1)
        requests, masks = self.params_of(params), self.masks(rows)
        edits = None
        if requests.edits_logits or (masks is not None and not self.is_native):
            edits = edit_lists(rows, requests, index, self._penalties, self._eos_token_ids, masks)
        return Batch(logits, rows, requests, index, edits, masks)

    def params_of(self, params: Sequence[SamplingParams]) -> RequestParams:
        """Return the parameters as arrays, which are cached until a call with other parameters."""
        if self._requests is None or not self._requests.describes(params):
            self._requests = RequestParams(params, self.vocab_size)
        return self._requests


def _row_sampler_for(device: torch.device) -> RowSampler:
    if device.type == "cpu":
        return compiled() or TorchSampler()
    if backend_fault("triton", device):
        return TorchSampler()
    chooser = importlib.import_module("engine.sampler.triton_kernel.chooser")
    sampler: RowSampler = chooser.TritonSampler(device)
    return sampler
