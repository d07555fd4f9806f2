"""The texts for calibration and measurement as windows of tokens, and a model's quality on them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from protocol.errors import ConfigError
from training.data import cut_windows, encode_texts, spread


@dataclass(frozen=True)
class HeldOut:
    """Windows of tokens, int64 [n, length], and the bytes of their text without each window's first token."""

    windows: Tensor
    num_bytes: int

    @classmethod
    def of(cls, windows: Tensor, tokenizer: PreTrainedTokenizerBase) -> HeldOut:
        texts = tokenizer.batch_decode(windows[:, 1:].tolist())
        return cls(windows, sum(len(text.encode()) for text in texts))

    @property
    def num_tokens(self) -> int:
        """Number of tokens that the model predicts."""
        return self.windows[:, 1:].numel()


@dataclass(frozen=True)
class TextQuality:
    perplexity: float
    bits_per_byte: float


@torch.inference_mode()
def predict(model: PreTrainedModel, text: HeldOut) -> TextQuality:
    nats = sum(_nats(model, window) for window in text.windows.to(model.device).split(1))
    return TextQuality(math.exp(nats / text.num_tokens), nats / math.log(2) / max(1, text.num_bytes))


def _nats(model: PreTrainedModel, window: Tensor) -> float:
    logits = model(input_ids=window, use_cache=False).logits[0, :-1].float()
    return float(torch.nn.functional.cross_entropy(logits, window[0, 1:], reduction="sum"))


HELD_OUT_SHARE = 0.05
HELD_OUT_WINDOWS = 64
DEFAULT_SAMPLES = 128
_LEAST_SAMPLES = 2

SHARED_RUN = 32
"""Number of consecutive tokens shared with the calibration that exclude a window from the measurement."""


@dataclass(frozen=True)
class Texts:
    """Windows for calibration, int64 [samples, length], and for measurement. `num_seen` measurement windows
    were left out because they overlap the calibration.
    """

    calibration: Tensor
    held_out: HeldOut
    num_seen: int


def cut(
    data: list[str],
    held_out: list[str] | None,
    samples: int | None,
    length: int,
    seed: int,
    tokenizer: PreTrainedTokenizerBase,
) -> Texts:
    """Cut the texts into windows of `length` tokens. Without `held_out`, a part of `data` is held out.

    Without `samples`, all windows of `data` are used, up to `DEFAULT_SAMPLES`. Raises `ConfigError` if the
    texts are too short or the same.
    """
    stream = encode_texts(data, tokenizer)
    total = len(stream)
    if held_out is not None:
        measured = encode_texts(held_out, tokenizer)
    else:
        kept = max(0, total - max(length, int(total * HELD_OUT_SHARE)))
        stream, measured = stream[:kept], stream[kept:]
    windows = cut_windows(stream, length)
    least = _LEAST_SAMPLES if samples is None else samples
    if len(windows) < least:
        raise ConfigError(
            f"--data: has {total:,} tokens, {len(stream):,} of them to calibrate with, and "
            f"{least} samples of {length} are {least * length:,} (--samples, --sequence-length)"
        )
    order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(seed))
    calibration = windows[order[: DEFAULT_SAMPLES if samples is None else samples]]
    return Texts(calibration, *_unseen(cut_windows(measured, length), calibration, len(measured), tokenizer))


def _unseen(
    windows: Tensor, calibration: Tensor, num_tokens: int, tokenizer: PreTrainedTokenizerBase
) -> tuple[HeldOut, int]:
    """Choose spread windows. Return those that the calibration has not seen, and the number of the rest."""
    if not len(windows):
        length = windows.shape[1]
        raise ConfigError(f"--held-out: {num_tokens} tokens are less than a window of {length}")
    chosen = spread(windows, HELD_OUT_WINDOWS)
    seen = {run for window in calibration for run in _runs(window)}
    unseen = [window for window in chosen if seen.isdisjoint(_runs(window))]
    if not unseen:
        raise ConfigError(
            f"--held-out: each of its windows of {chosen.shape[1]} tokens shares {SHARED_RUN} in a row with "
            "the text of --data that the calibration sees; give other text"
        )
    return HeldOut.of(torch.stack(unseen), tokenizer), len(chosen) - len(unseen)


def _runs(window: Tensor) -> list[bytes]:
    return [run.tobytes() for run in window.unfold(0, SHARED_RUN, 1).numpy()]
