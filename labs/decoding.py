"""Decoding from scratch: a Llama in plain torch, a KV cache, and attention that never holds all its scores.

    python -m labs.decoding

`Llama` is the model, `Cache` keeps the keys and values of earlier tokens, `attend` is attention as in papers,
and `attend_in_tiles` computes the same in one pass over the keys.
"""

from __future__ import annotations

import argparse
import json
import math
import time
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor

MODELS = Path(__file__).resolve().parent.parent / "models"
TARGET, DRAFT = MODELS / "tandem-code-10m", MODELS / "tandem-code-1m"

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""A function of queries [rows, heads, size], keys and values [tokens, KV heads, size] that returns [rows,
heads, size]. The rows belong to the last tokens; each row sees its own token and all earlier ones.
"""
LayerAttention = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""A function for a layer's new rows: it stores their keys and values, and attends to earlier tokens, too."""


class Llama:
    """A Llama checkpoint of Transformers' format, in float32."""

    def __init__(self, folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        self.layers: int = config["num_hidden_layers"]
        self.heads: int = config["num_attention_heads"]
        self.kv_heads: int = config["num_key_value_heads"]
        self.size: int = config["head_dim"]
        self._eps: float = config["rms_norm_eps"]
        theta: float = config["rope_parameters"]["rope_theta"]
        self._frequencies = theta ** -(torch.arange(0, self.size, 2) / self.size)
        weights = load_file(folder / "model.safetensors")
        self.weights = {name.removeprefix("model."): tensor.float() for name, tensor in weights.items()}
        self.weights.setdefault("lm_head.weight", self.weights["embed_tokens.weight"])

    @torch.inference_mode()
    def __call__(self, tokens: Tensor, positions: Tensor, attention: LayerAttention) -> Tensor:
        """Return the logits [rows, vocabulary] of the token after each of `tokens`."""
        x = self.weights["embed_tokens.weight"][tokens]
        angles = positions[:, None] * self._frequencies
        for layer in range(self.layers):
            normed = self._norm(x, f"layers.{layer}.input_layernorm")
            q, k, v = (self._linear(normed, f"layers.{layer}.self_attn.{name}_proj") for name in "qkv")
            q, k = rotate(self._split(q), angles), rotate(self._split(k), angles)
            seen = attention(layer, q, k, self._split(v))
            x = x + self._linear(seen.flatten(1), f"layers.{layer}.self_attn.o_proj")
            normed = self._norm(x, f"layers.{layer}.post_attention_layernorm")
            gate, up = (self._linear(normed, f"layers.{layer}.mlp.{name}_proj") for name in ("gate", "up"))
            x = x + self._linear(F.silu(gate) * up, f"layers.{layer}.mlp.down_proj")
        return self._linear(self._norm(x, "norm"), "lm_head")

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.weights[f"{name}.weight"])

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weights[f"{name}.weight"], self._eps)

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.size))


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Apply rotary position embedding (Su et al., 2021): pairs of numbers turn with the position."""
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    left, right = x.chunk(2, dim=-1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)


def visible_scores(q: Tensor, keys: Tensor, first: int, last_row: int) -> Tensor:
    """Return the scores [heads, rows, keys] of keys from position `first` on; -inf for later keys."""
    keys = keys.repeat_interleave(q.shape[1] // keys.shape[1], dim=1)
    scores = torch.einsum("rhd,thd->hrt", q, keys) / math.sqrt(q.shape[-1])
    rows = torch.arange(last_row - len(q) + 1, last_row + 1)
    later = first + torch.arange(len(keys)) > rows[:, None]
    return scores.masked_fill(later, -math.inf)


def weighted(weights: Tensor, values: Tensor) -> Tensor:
    """Return the sums [heads, rows, size] of `values` by `weights` [heads, rows, values]."""
    values = values.repeat_interleave(len(weights) // values.shape[1], dim=1)
    return torch.einsum("hrt,thd->hrd", weights, values)


def attend(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Compute the softmax over all keys at once, with heads x rows x tokens scores in memory."""
    scores = visible_scores(q, keys, 0, len(keys) - 1)
    return weighted(scores.softmax(-1), values).transpose(0, 1)


def attend_in_tiles(q: Tensor, keys: Tensor, values: Tensor, tile: int = 64) -> Tensor:
    """Compute softmax attention one tile of keys at a time, with only that tile's scores in memory.

    This is the online softmax of FlashAttention (Dao et al., 2022, section 3.1). A softmax subtracts the
    highest score and divides by the sum, which are only known at the end. So sums are kept relative to the
    highest score so far, and are scaled down when a higher score comes.
    """
    highest = torch.full((q.shape[1], len(q), 1), -math.inf)
    total, output = torch.zeros_like(highest), torch.zeros(q.shape[1], len(q), q.shape[2])
    for first in range(0, len(keys), tile):
        scores = visible_scores(q, keys[first : first + tile], first, len(keys) - 1)
        higher = torch.maximum(highest, scores.amax(-1, keepdim=True))
        weights, scale = torch.exp(scores - higher), torch.exp(highest - higher)
        total = total * scale + weights.sum(-1, keepdim=True)
        output = output * scale + weighted(weights, values[first : first + tile])
        highest = higher
    return (output / total).transpose(0, 1)


class Cache:
    """The keys and values of a sequence's tokens so far."""

    def __init__(self, model: Llama, capacity: int, attend: Attend = attend) -> None:
        shape = (model.layers, capacity, model.kv_heads, model.size)
        self._keys, self._values = torch.zeros(shape), torch.zeros(shape)
        self._attend = attend
        self.length = 0

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        end = self.length + len(q)
        self._keys[layer, self.length : end], self._values[layer, self.length : end] = k, v
        return self._attend(q, self._keys[layer, :end], self._values[layer, :end])

    def compute(self, model: Llama, tokens: list[int]) -> Tensor:
        """Return the logits after each of these tokens, which follow the cached ones."""
        positions = torch.arange(self.length, self.length + len(tokens))
        logits = model(torch.tensor(tokens), positions, self)
        self.length += len(tokens)
        return logits


def decode(
    model: Llama, prompt: list[int], count: int, *, cached: bool, attend: Attend = attend
) -> list[int]:
    """Return the `count` most likely tokens after the prompt. Without a cache each token computes the whole
    text again.
    """
    tokens = list(prompt)
    cache = Cache(model, len(prompt) + count, attend)
    while len(tokens) < len(prompt) + count:
        if not cached:
            cache.length = 0
        logits = cache.compute(model, tokens[cache.length :])
        tokens.append(int(logits[-1].argmax()))
    return tokens[len(prompt) :]


def read_prompt(tokenizer: Tokenizer, length: int) -> list[int]:
    """Return the first tokens of a text that the bundled models have not seen."""
    with (MODELS / "heldout_prompts.jsonl").open() as lines:
        text = "".join(json.loads(next(lines))["prompt"] for _ in range(4))
    return tokenizer.encode(text).ids[:length]


def ask_server(url: str, prompt: list[int], count: int) -> tuple[str, float]:
    """Return a server's answer and the seconds that it took. Tandem is asked not to draft."""
    body = {"model": TARGET.name, "prompt": prompt, "max_tokens": count, "temperature": 0, "ignore_eos": True}
    body["speculative"] = {"enabled": False}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    start = time.perf_counter()
    with urllib.request.urlopen(request) as response:
        text = json.load(response)["choices"][0]["text"]
    return text, time.perf_counter() - start


def common_prefix(left: Sequence[object], right: Sequence[object]) -> int:
    """Return the length of the common prefix."""
    pairs = zip(left, right, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(left), len(right)))


def seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--lengths", type=int, nargs="+", default=[16, 64, 256], help="tokens to decode")
    parser.add_argument("--url", help="a server of the same model, e.g. http://127.0.0.1:8000")
    options = parser.parse_args()
    model, tokenizer = Llama(TARGET), Tokenizer.from_file(str(TARGET / "tokenizer.json"))
    prompt = read_prompt(tokenizer, options.prompt_tokens)

    print(f"Decoding after {len(prompt)} tokens, ms per token")
    print(f"{'tokens':>8}{'no cache':>12}{'cache':>12}{'ratio':>8}   same tokens")
    for count in options.lengths:
        start = time.perf_counter()
        plain = decode(model, prompt, count, cached=False)
        middle = time.perf_counter()
        cached = decode(model, prompt, count, cached=True)
        without, with_cache = middle - start, time.perf_counter() - middle
        costs = f"{without / count * 1e3:12.2f}{with_cache / count * 1e3:12.2f}{without / with_cache:8.1f}"
        print(f"{count:8}{costs}   {plain == cached}")

    print("\nAttention of 64 rows, 6 heads of 64, 2 KV heads")
    print(f"{'keys':>8}{'all scores':>12}{'one tile':>12}   largest difference")
    for length in (256, 1024, 4096):
        q, k, v = torch.randn(64, 6, 64), torch.randn(length, 2, 64), torch.randn(length, 2, 64)
        difference = (attend(q, k, v) - attend_in_tiles(q, k, v)).abs().max()
        print(f"{length:8}{6 * 64 * length * 4:10} B{6 * 64 * 64 * 4:10} B   {difference:.1e}")

    if options.url:
        count = options.lengths[-1]
        ours = tokenizer.decode(decode(model, prompt, count, cached=True))
        own = seconds(lambda: decode(model, prompt, count, cached=True))
        text, theirs = ask_server(options.url, prompt, count)
        same = common_prefix(text, ours)
        print(f"\n{count} tokens: here {own:.2f} s, the server {theirs:.2f} s")
        print(f"{same} of {len(ours)} characters are the same")


if __name__ == "__main__":
    main()
