"""From logits to tokens, for a whole batch at once.

A row's token is the argmax of its processed log-probabilities plus noise keyed by (seed, position), so it
depends on the row alone. Processing goes, in vLLM's order: logit bias, allowed tokens, bans, `min_tokens`,
penalties, grammar, temperature, min-p, top-k, top-p. Greedy rows take the argmax before the temperature.
Among equals the lowest token id wins.

On a CPU with a compiler, one native call (`native.py`) does everything after the edits of the logits; on a
CUDA device, two kernels (`triton_kernel/`) do all of it. Torch's operators give the same tokens elsewhere.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from engine.devices.attention import backend_fault
from engine.download import Downloader
from engine.sampler.batch import BatchParams, RequestParams
from engine.sampler.choice import TokenChoice
from engine.sampler.edits import apply_edits, apply_masks
from engine.sampler.filters import apply_filters
from engine.sampler.grammars import Grammars
from engine.sampler.logprobs import token_logprobs
from engine.sampler.masks import TokenMasks
from engine.sampler.native import compiled
from engine.sampler.noise import NOISE_SPAN, Purpose, round_keys, round_seeds, stream_keys
from engine.sampler.penalties import Penalties
from engine.sampler.race import draw, race
from engine.sampler.rows import SamplingRow
from engine.sampler.triton_kernel.chosen import Chosen
from engine.sampler.triton_kernel.edits import EditLists, edit_lists
from engine.upload import upload_to
from protocol.outputs import TokenLogprobs
from protocol.sampling import SamplingParams

if TYPE_CHECKING:
    from engine.sampler.triton_kernel.chooser import TritonSampler


@dataclass(slots=True, eq=False)
class SampleOutput:
    """One entry per row. `failed_rows` had no token of finite score (NaN logits, or every token forbidden);
    their tokens mean nothing."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs | None]
    failed_rows: list[int] = field(default_factory=list)


class Sampler:
    """Samples for one model. Its only state follows from each request's tokens: the penalties' counts and
    the place in the grammar, which `forget` drops. Without `grammars` it samples as if there were none.
    """

    def __init__(
        self,
        vocab_size: int,
        device: torch.device | str,
        eos_token_ids: Sequence[int],
        grammars: Grammars | None = None,
    ) -> None:
        self.vocab_size = vocab_size
        self.device = torch.device(device)
        self._eos_token_ids = [token for token in eos_token_ids if token < vocab_size]
        self._penalties = Penalties()
        self.grammars = grammars
        self._requests: RequestParams | None = None
        self._batch: BatchParams | None = None
        self._native = compiled() if self.device.type == "cpu" else None
        self._kernels = _kernels_for(self.device)
        self.upload, self.download = upload_to(self.device), Downloader(self.device)

    @property
    def has_kernels(self) -> bool:
        """Whether kernels choose on the device."""
        return self._kernels is not None

    @property
    def is_native(self) -> bool:
        """Whether choices are compiled calls."""
        return self._native is not None

    def warm_up(self, dtype: torch.dtype) -> None:
        """Compile what chooses from logits of this dtype, so that no request waits for it."""
        if self._kernels is None:
            return
        logits = torch.zeros(1, self.vocab_size, dtype=dtype, device=self.device)
        for params in (
            SamplingParams(max_tokens=1, temperature=0.0),
            SamplingParams(max_tokens=1),
            SamplingParams(max_tokens=1, logit_bias={0: 1.0}),
        ):
            self.choose(logits, [SamplingRow(params, [], [], 0, "")])

    def sample(self, logits: Tensor, rows: Sequence[SamplingRow]) -> SampleOutput:
        """Choose a token for each row of `logits` [n, vocab], any float dtype, which stay as they are."""
        if not rows:
            return SampleOutput([], [])
        return self.finish(self.begin(logits, rows), logits, rows)

    def finish(self, choice: TokenChoice, logits: Tensor, rows: Sequence[SamplingRow]) -> SampleOutput:
        """The tokens of `begin`, and log-probabilities where they are wanted."""
        chosen, failed_rows = choice.wait()
        token_ids = chosen.tolist()
        logprobs = self.logprobs(logits, rows, dict(enumerate(token_ids)))
        return SampleOutput(token_ids, [logprobs.get(row) for row in range(len(rows))], failed_rows)

    def choose(self, logits: Tensor, rows: Sequence[SamplingRow]) -> tuple[Tensor, list[int]]:
        """The tokens alone, int64 [n], and the rows that failed. There is at least one row."""
        return self.begin(logits, rows).wait()

    def begin(self, logits: Tensor, rows: Sequence[SamplingRow]) -> TokenChoice:
        """As `choose`, without waiting for the device where its kernels choose."""
        requests, index = self._requests_of(rows)
        positions = [row.position for row in rows]
        if self._native is not None:
            logits = self._edited_if_asked(logits, rows, requests, index)
            return TokenChoice.made(*self._native(logits, requests, index, positions, self.masks(rows)))
        if self._kernels is not None:
            return self._kernels(logits, requests, index, positions, self._edit_lists(rows, requests, index))
        batch = self._batch_for(requests, index)
        values, failed = self._values(logits, rows, batch)
        failed_rows = failed.nonzero()[:, 0].tolist()
        likeliest = values.argmax(dim=1)
        if batch.all_greedy:
            return TokenChoice.made(likeliest, failed_rows)
        apply_filters(values, batch.distribution)
        places = torch.tensor(positions, dtype=torch.int64, device=values.device)
        chosen = race(values, stream_keys(batch.distribution.seeds, places))
        chosen[batch.greedy_rows] = likeliest[batch.greedy_rows]
        return TokenChoice.made(chosen, failed_rows)

    def tokens(self, logits: Tensor, rows: Sequence[SamplingRow], further: Tensor | None = None) -> Tensor:
        """The tokens of `choose`, on the logits' device. A row that fails has any token there, which may be
        negative. Kernels take rows that are so much `further`, int64 [n], than they say.
        """
        if self._kernels is None:
            assert further is None
            return self.begin(logits, rows).token_ids
        requests, index = self._requests_of(rows)
        positions = [row.position for row in rows]
        edits = self._edit_lists(rows, requests, index)
        return self._kernels.tokens(logits, requests, index, positions, edits, further)

    def probabilities(self, logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
        """float32 [n, vocab]: the distributions that `sample` draws from; only zeros in rows that fail.

        The token that a row gets is the argmax of their logarithm and its noise.
        """
        requests, index = self._requests_of(rows)
        if self._native is not None:
            logits = self._edited_if_asked(logits, rows, requests, index)
            return self._native.probabilities(logits, requests, index, self.masks(rows))
        if self._kernels is not None:
            return self._kernels.shares(self.chosen(logits, rows))
        batch = self._batch_for(requests, index)
        values, failed = self._values(logits, rows, batch)
        greedy = values[batch.greedy_rows].argmax(dim=1) if batch.greedy_rows else None
        if not batch.all_greedy:
            apply_filters(values, batch.distribution)
            values = values.masked_fill_(values < -NOISE_SPAN, -torch.inf).softmax(dim=1)
        if greedy is not None:
            values[batch.greedy_rows] = 0.0
            values[batch.greedy_rows, greedy] = 1.0
        return values.masked_fill_(failed, 0.0)

    def chosen(self, logits: Tensor, rows: Sequence[SamplingRow], further: Tensor | None = None) -> Chosen:
        """By kernels, `tokens`, and from what these compute probabilities; it holds until the next call."""
        assert self._kernels is not None
        requests, index = self._requests_of(rows)
        positions = [row.position for row in rows]
        edits = self._edit_lists(rows, requests, index)
        return self._kernels.chosen(logits, requests, index, positions, edits, further=further)

    def draw_drafts(
        self, logits: Tensor, rows: Sequence[SamplingRow], starts: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """Tokens int64 [n] with noise of `Purpose.DRAFT`, in rounds that began at `starts`, and float32
        [n, vocab] what they are drawn from.
        """
        requests, index = self._requests_of(rows)
        positions = [row.position for row in rows]
        if self._native is not None:
            logits = self._edited_if_asked(logits, rows, requests, index)
            return self._native.draw_drafts(logits, requests, index, positions, starts, self.masks(rows))
        seeds = [row.params.seed for row in rows]
        if self._kernels is not None:
            edits = self._edit_lists(rows, requests, index)
            keys = round_seeds(np.array(seeds), np.array(starts), Purpose.DRAFT)
            chosen = self._kernels.chosen(logits, requests, index, positions, edits, keys)
            return chosen.tokens, self._kernels.shares(chosen)
        probabilities = self.probabilities(logits, rows)
        columns = torch.tensor([seeds, [*starts], positions], dtype=torch.int64, device=logits.device)
        keys = round_keys(columns[0], columns[1], columns[2], Purpose.DRAFT)
        return draw(probabilities, keys), probabilities

    def expect(self, rows: Sequence[SamplingRow]) -> None:
        """That tokens for these rows will be chosen, once their logits are computed. A device that computes
        these leaves the host time for the masks anyway.
        """
        is_asked = any(row.params.grammar is not None for row in rows)
        if is_asked and self.grammars is not None and self.device.type == "cpu":
            self.grammars.expect(rows)

    def masks(self, rows: Sequence[SamplingRow]) -> TokenMasks | None:
        """The tokens that grammars let the rows get; None if none has one."""
        return self.grammars.masks(rows) if self.grammars is not None else None

    def logprobs(
        self, logits: Tensor, rows: Sequence[SamplingRow], token_ids: Mapping[int, int]
    ) -> dict[int, TokenLogprobs]:
        """The log-probabilities of tokens chosen at some of the rows, by row, for the rows that want them."""
        wanted = [row for row in token_ids if rows[row].params.logprobs is not None]
        if not wanted:
            return {}
        num_top = [rows[row].params.logprobs or 0 for row in wanted]
        if len(wanted) < len(rows):
            logits = logits[self.upload([np.array(wanted)])[0]]
        found = self._token_logprobs(logits, [token_ids[row] for row in wanted], num_top)
        return dict(zip(wanted, found, strict=True))

    def prompt_logprobs(self, logits: Tensor, next_token_ids: list[int], num_top: int) -> list[TokenLogprobs]:
        """Log-probabilities of the prompt's own tokens: row i of `logits` predicts `next_token_ids[i]`."""
        return self._token_logprobs(logits, next_token_ids, [num_top] * len(next_token_ids))

    def _token_logprobs(
        self, logits: Tensor, token_ids: Sequence[int], num_top: Sequence[int]
    ) -> list[TokenLogprobs]:
        return token_logprobs(logits, token_ids, num_top, self.upload, self.download)

    def problem(self, request_id: str) -> str:
        """The reason why the request's grammar failed; "" if it did not."""
        return self.grammars.problem(request_id) if self.grammars is not None else ""

    def forget(self, request_id: str) -> None:
        """Drop what is kept for a request that is over. Unknown ids are ignored."""
        self._penalties.forget(request_id)
        if self.grammars is not None:
            self.grammars.forget(request_id)

    def _requests_of(self, rows: Sequence[SamplingRow]) -> tuple[RequestParams, list[int]]:
        """The parameters of the rows' requests, and each row's number among these."""
        params: list[SamplingParams] = []
        index: list[int] = []
        for row in rows:
            if not params or row.params is not params[-1]:
                params.append(row.params)
            index.append(len(params) - 1)
        return self.params_of(params), index

    def params_of(self, params: Sequence[SamplingParams]) -> RequestParams:
        """Kept until others are asked for."""
        if self._requests is None or not self._requests.describes(params):
            self._requests = RequestParams(params, self.vocab_size, self.device)
        return self._requests

    def _batch_for(self, requests: RequestParams, index: list[int]) -> BatchParams:
        if self._batch is None or not self._batch.describes(requests, index):
            self._batch = BatchParams(requests, index)
        return self._batch

    def _values(
        self, logits: Tensor, rows: Sequence[SamplingRow], batch: BatchParams
    ) -> tuple[Tensor, Tensor]:
        """float32 [n, vocab]: log-probabilities up to a constant per row, each row's maximum at 0; and bool
        [n, 1], which rows fail: they are zeros.
        """
        values = self._edited(logits, rows, batch)
        masks = self.masks(rows)
        if masks is not None:
            apply_masks(values, masks)
        best = values.amax(dim=1, keepdim=True)
        failed = ~best.isfinite()
        values.sub_(best)
        if not batch.all_greedy:
            values.div_(batch.distribution.temperature)
        return values.masked_fill_(failed, 0.0), failed

    def _edited_if_asked(
        self, logits: Tensor, rows: Sequence[SamplingRow], requests: RequestParams, index: list[int]
    ) -> Tensor:
        if not requests.edits_logits:
            return logits
        return self._edited(logits, rows, self._batch_for(requests, index))

    def _edit_lists(
        self, rows: Sequence[SamplingRow], requests: RequestParams, index: list[int]
    ) -> EditLists | None:
        masks = self.masks(rows)
        if not requests.edits_logits and masks is None:
            return None
        return edit_lists(rows, requests, index, self._penalties, self._eos_token_ids, masks)

    def _edited(self, logits: Tensor, rows: Sequence[SamplingRow], batch: BatchParams) -> Tensor:
        """A copy float32 [n, vocab] with all edits and penalties."""
        values = torch.empty(logits.shape, dtype=torch.float32, device=logits.device).copy_(logits)
        if batch.edits_logits:
            apply_edits(values, rows, batch, self._eos_token_ids)
            if batch.penalty_rows:
                self._penalties.apply(values, rows, batch)
        return values


def _kernels_for(device: torch.device) -> TritonSampler | None:
    if device.type == "cpu" or backend_fault("triton", device):
        return None
    kernels: type[TritonSampler] = importlib.import_module(
        "engine.sampler.triton_kernel.chooser"
    ).TritonSampler
    return kernels(device)
