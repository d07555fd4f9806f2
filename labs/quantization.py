"""Quantization: weights and cached keys in 8 and 4 bits, and its effect on a model.

    python -m labs.quantization

`round_to` does all of it: round to nearest, with one scale for each group of numbers. `awq` scales columns by
their inputs before they are rounded. The first table shows each format's memory and its cost: in predicted
bits, changed probabilities and changed tokens. The second shows how fast torch multiplies with fewer bits.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
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
    A floating format is FP8 with 4 bits of exponent and 3 of fraction (E4M3).
    """

    name: str
    bits: int
    group: int = 0
    zero_point: bool = False
    floating: bool = False

    def bits_each(self, row: int) -> float:
        """Return the bits per number, including its share of scales and zero points, for rows of `row`
        numbers.
        """
        return self.bits + (16 + self.bits * self.zero_point) / (self.group or row)


WEIGHTS = (
    Format("int8, a row", 8),
    Format("fp8, a row", 8, floating=True),
    Format("int4, a row", 4),
    Format("int4, 128", 4, 128),
    Format("int4, 32", 4, 32),
    Format("int4, 32, zero", 4, 32, zero_point=True),
    Format("int3, 32, zero", 3, 32, zero_point=True),
)
KV = (Format("int8", 8), Format("int4", 4))
AWQ = Format("int4, 128", 4, 128)
ROW = 384
"""Numbers in most rows of the model's weights."""
POWERS = (0.0, 0.25, 0.5, 0.75, 1.0)
CALIBRATING = 4
"""Texts on which AWQ chooses its scales; others are predicted."""


def round_to(numbers: Tensor, to: Format) -> Tensor:
    """Return the nearest numbers of that format: the values that a kernel gets by expanding the codes."""
    groups = numbers.unflatten(-1, (-1, to.group or numbers.shape[-1]))
    steps = 2**to.bits - 1
    if to.floating:
        scale = groups.abs().amax(-1, keepdim=True) / torch.finfo(torch.float8_e4m3fn).max
        rounded = (groups / scale).to(torch.float8_e4m3fn).float() * scale
    elif to.zero_point:
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


class Recorder(Llama):
    """The bundled model, which keeps the inputs of its layers' weights."""

    def __init__(self) -> None:
        super().__init__(TARGET)
        self.inputs: dict[str, list[Tensor]] = {}

    def _linear(self, x: Tensor, name: str) -> Tensor:
        self.inputs.setdefault(f"{name}.weight", []).append(x)
        return super()._linear(x, name)


def scaled_and_rounded(weight: Tensor, inputs: Tensor, to: Format) -> Tensor:
    """Return the rounded weight whose products with these inputs are nearest to the exact ones.

    Columns are multiplied by a power of their inputs' mean size, rounded, and divided again (Lin et al.,
    2024): the error of a column with large inputs falls, and that of others grows.
    """
    size = inputs.abs().mean(0).clamp(min=1e-4)

    def rounded(power: float) -> Tensor:
        return round_to(weight * size**power, to) / size**power

    def error(candidate: Tensor) -> float:
        return float(F.linear(inputs, candidate - weight).square().sum())

    return min(map(rounded, POWERS), key=error)


def awq(to: Format, windows: list[list[int]]) -> Llama:
    """Return the bundled model with its layers' weights in that format, calibrated on these texts."""
    model = Recorder()
    predict(model, windows)
    calibrated = Llama(TARGET)
    for name, weight in model.weights.items():
        if "_proj" in name:
            calibrated.weights[name] = scaled_and_rounded(weight, torch.cat(model.inputs[name]), to)
    return calibrated


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


def memory_mib(model: Llama, weights: float, kv: float) -> float:
    """Return what the layers' weights and the KV of 4,096 tokens take, in these numbers of bits."""
    of_weights = sum(weight.numel() for name, weight in model.weights.items() if "_proj" in name)
    of_kv = 4096 * 2 * model.layers * model.kv_heads * model.size
    return (of_weights * weights + of_kv * kv) / 8 / 2**20


def products(rows: int, side: int) -> dict[str, Callable[[], Tensor]]:
    """Return torch's products of so many rows with one square weight in three formats."""
    weight, x = torch.randn(side, side), torch.randn(rows, side, dtype=torch.bfloat16)
    plain = weight.bfloat16()
    scale = weight.abs().amax(1) / 127
    int8 = (weight / scale[:, None]).round().to(torch.int8)
    groups = weight.unflatten(1, (-1, 32))
    low, steps = groups.amin(-1), (groups.amax(-1) - groups.amin(-1)) / 15
    codes = ((groups - low[..., None]) / steps[..., None]).round().clamp(0, 15).int().flatten(1)
    int4 = torch._convert_weight_to_int4pack_for_cpu(codes, 1)
    scales = torch.stack([steps, low + 8 * steps], -1).transpose(0, 1).contiguous().bfloat16()
    return {
        "bf16": lambda: F.linear(x, plain),
        "int8, a row": lambda: torch._weight_int8pack_mm(x, int8, scale.bfloat16()),
        "int4, 32, zero": lambda: torch._weight_int4pack_mm_for_cpu(x, int4, 32, scales),
    }


def fastest_ms(run: Callable[[], Tensor], tries: int) -> float:
    run()
    times = []
    for _ in range(tries):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times) * 1e3


def show_speed(side: int, tries: int) -> None:
    print(f"\nA product with a weight of {side} x {side} by torch, ms")
    by_rows = {rows: products(rows, side) for rows in (1, 16)}
    print(f"{'':26}{'MiB':>7}{'one row':>11}{'16 rows':>11}")
    for name, bits in (("bf16", 16), ("int8, a row", WEIGHTS[0].bits_each(side)), ("int4, 32, zero", 5)):
        times = "".join(f"{fastest_ms(each[name], tries):11.2f}" for each in by_rows.values())
        print(f"{name:26}{side * side * bits / 8 / 2**20:7.1f}{times}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--texts", type=int, default=8, help=f"of {WINDOW} tokens")
    parser.add_argument("--side", type=int, default=4096, help="of the weight whose products are timed")
    parser.add_argument("--tries", type=int, default=20, help="of each product; the fastest counts")
    options = parser.parse_args()
    tokenizer, model = Tokenizer.from_file(str(TARGET / "tokenizer.json")), Llama(TARGET)
    windows = read_windows(tokenizer, options.texts + CALIBRATING)
    windows, others = windows[:-CALIBRATING], windows[-CALIBRATING:]
    text = torch.tensor(list(itertools.chain.from_iterable(window[1:] for window in windows)))
    num_bytes = sum(len(tokenizer.decode(window[1:]).encode()) for window in windows)
    exact = predict(model, windows)

    def show(name: str, log_q: Tensor, weights: float = 16, kv: float = 16) -> None:
        damage = compare(exact, log_q, text, num_bytes)
        print(
            f"{name:26}{memory_mib(model, weights, kv):7.1f}{damage.bits_per_byte:11.4f}"
            f"{damage.divergence:11.5f}{damage.same_token:13.1%}{damage.overlap:10.1%}"
        )

    print(f"{len(text)} tokens of unseen text")
    print(f"{'':26}{'MiB':>7}{'bits/byte':>11}{'KL, bits':>11}{'same token':>13}{'overlap':>10}")
    show("as published (bf16)", exact)
    for to in WEIGHTS:
        show(f"weights {to.name}", predict(quantized(to), windows), to.bits_each(ROW))
    show(f"weights {AWQ.name}, AWQ", predict(awq(AWQ, others), windows), AWQ.bits_each(ROW))
    for to in KV:
        show(f"KV {to.name}", predict(model, windows, attend_rounded(to)), kv=to.bits_each(model.size))
    int8, cache = WEIGHTS[0], KV[0]
    both = predict(quantized(int8), windows, attend_rounded(cache))
    show("weights and KV int8", both, int8.bits_each(ROW), cache.bits_each(model.size))
    show_speed(options.side, options.tries)


if __name__ == "__main__":
    main()
