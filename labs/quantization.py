"""Quantization: weights and cached keys in 8 and 4 bits, and its effect on a model.

    python -m labs.quantization

`round_to` does all of it: round to nearest, with one scale for each group of numbers. The table shows each
format's size and its cost: in predicted bits, changed probabilities and changed tokens.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer
from torch import Tensor

from labs.decoding import MODELS, TARGET, Attend, Cache, Llama, attend

WINDOW = 512
"""Tokens of each text that are predicted together."""


@dataclass(frozen=True)
class Format:
    """A number format of `bits` bits, with a scale of 16 bits for each `group` of numbers (0: for a whole
    row).

    With a zero point a group spans its minimum to its maximum, otherwise a range that is symmetric about 0.
    """

    name: str
    bits: int
    group: int = 0
    zero_point: bool = False

    def bits_each(self, row: int) -> float:
        """Return the bits per number, including its share of scales and zero points, for rows of `row`
        numbers.
        """
        return self.bits + (16 + self.bits * self.zero_point) / (self.group or row)


WEIGHTS = (
    Format("int8, a row", 8),
    Format("int4, a row", 4),
    Format("int4, 128", 4, 128),
    Format("int4, 32", 4, 32),
    Format("int4, 32, zero", 4, 32, zero_point=True),
    Format("int3, 32, zero", 3, 32, zero_point=True),
)
KV = (Format("int8", 8), Format("int4", 4))


def round_to(numbers: Tensor, to: Format) -> Tensor:
    """Return the nearest numbers of that format: the values that a kernel gets by expanding the codes."""
    groups = numbers.unflatten(-1, (-1, to.group or numbers.shape[-1]))
    steps = 2**to.bits - 1
    if to.zero_point:
        low, high = groups.amin(-1, keepdim=True).clamp(max=0), groups.amax(-1, keepdim=True).clamp(min=0)
        scale = ((high - low) / steps).clamp(min=1e-8)
        zero = (-low / scale).round()
        codes = (groups / scale + zero).round().clamp(0, steps)
        rounded = (codes - zero) * scale
    else:
        limit = steps // 2
        scale = (groups.abs().amax(-1, keepdim=True) / limit).clamp(min=1e-8)
        rounded = (groups / scale).round().clamp(-limit, limit) * scale
    return rounded.flatten(-2)


def quantized(to: Format) -> Llama:
    """Return the bundled model with its layers' weights in that format; embeddings and head stay in
    float32.
    """
    model = Llama(TARGET)
    for name, weight in model.weights.items():
        if "_proj" in name:
            model.weights[name] = round_to(weight, to)
    return model


def attend_rounded(to: Format) -> Attend:
    """Return an attention whose cache holds keys and values in that format, with a scale for each token and
    head.
    """
    return lambda q, keys, values: attend(q, round_to(keys, to), round_to(values, to))


def read_windows(tokenizer: Tokenizer, count: int) -> list[list[int]]:
    """Return windows of texts that the model has not seen."""
    with (MODELS / "heldout_prompts.jsonl").open() as lines:
        texts = [tokenizer.encode(json.loads(line)["prompt"]).ids for line in lines]
    return [ids[:WINDOW] for ids in texts if len(ids) >= WINDOW][:count]


def predict(model: Llama, windows: list[list[int]], attend: Attend = attend) -> Tensor:
    """Return the log-probabilities [tokens, vocabulary] after each token."""
    logits = [Cache(model, WINDOW, attend).compute(model, window)[:-1] for window in windows]
    return torch.cat(logits).log_softmax(-1)


@dataclass(frozen=True)
class Damage:
    bits_per_byte: float
    divergence: float
    same_token: float
    overlap: float


def compare(log_p: Tensor, log_q: Tensor, text: Tensor, num_bytes: int) -> Damage:
    """Measure how much worse a model that predicts `log_q` instead of `log_p` is on this text.

    `divergence` is KL(p || q) in bits. `overlap` is the sum of min(p, q): the probability that speculation
    accepts a draft of q for p.
    """
    p, q = log_p.exp(), log_q.exp()
    bits = -log_q.gather(1, text[:, None]).sum() / math.log(2)
    return Damage(
        bits_per_byte=float(bits) / num_bytes,
        divergence=float((p * (log_p - log_q)).sum(-1).mean()) / math.log(2),
        same_token=float((log_p.argmax(-1) == log_q.argmax(-1)).float().mean()),
        overlap=float(torch.minimum(p, q).sum(-1).mean()),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--texts", type=int, default=16, help=f"of {WINDOW} tokens")
    options = parser.parse_args()
    tokenizer, model = Tokenizer.from_file(str(TARGET / "tokenizer.json")), Llama(TARGET)
    windows = read_windows(tokenizer, options.texts)
    text = torch.tensor(list(itertools.chain.from_iterable(window[1:] for window in windows)))
    num_bytes = sum(len(tokenizer.decode(window[1:]).encode()) for window in windows)
    exact = predict(model, windows)

    def show(name: str, bits: float, log_q: Tensor) -> None:
        damage = compare(exact, log_q, text, num_bytes)
        print(
            f"{name:26}{bits:7.2f}{damage.bits_per_byte:11.4f}{damage.divergence:11.5f}{damage.same_token:13.1%}"
            f"{damage.overlap:10.1%}"
        )

    print(f"{len(text)} tokens of unseen text")
    print(f"{'':26}{'bits':>7}{'bits/byte':>11}{'KL, bits':>11}{'same token':>13}{'overlap':>10}")
    show("as published (bf16)", 16, exact)
    for to in WEIGHTS:
        show(f"weights {to.name}", to.bits_each(row=384), predict(quantized(to), windows))
    for to in KV:
        show(f"KV {to.name}", to.bits_each(row=model.size), predict(model, windows, attend_rounded(to)))
    both = predict(quantized(WEIGHTS[0]), windows, attend_rounded(KV[0]))
    show("weights and KV int8", WEIGHTS[0].bits_each(row=384), both)


if __name__ == "__main__":
    main()
