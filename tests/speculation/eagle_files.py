"""Writes small EAGLE heads in the published formats, with random weights, for `write_target`'s model, and
drafts with them in plain torch without a cache: each token recomputes all rows.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import linear, silu
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.worker.tiny_model import write_tiny_llama

VOCAB, WIDTH, LAYERS, THETA = 160, 32, 8, 5_000.0
HEADS, KV_HEADS, HEAD_DIM, FFN, DRAFT_VOCAB = 4, 2, 8, 48, 60
MAX_POSITIONS = 512


def write_target(folder: Path) -> None:
    shape = {"vocab_size": VOCAB, "hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": LAYERS}
    turns = {"max_position_embeddings": MAX_POSITIONS, "head_dim": 8}
    turns["rope_parameters"] = {"rope_type": "default", "rope_theta": THETA}
    write_tiny_llama(folder, seed=3, **shape, **turns)


@dataclass
class Published:
    """A checkpoint's content and its expected reading. `captured` uses Transformers' numbering."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    captured: tuple[int, ...]
    is_eagle3: bool
    flags: dict[str, Any] = field(default_factory=dict)
    file: str = "model.safetensors"

    def write(self, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        if self.file.endswith(".bin"):
            torch.save(self.tensors, folder / self.file)
        else:
            save_file(self.tensors, folder / self.file)
        return folder


def weights_of(random: torch.Generator) -> Callable[..., Tensor]:
    """Return a function that draws a weight of some shape."""
    return lambda *shape: torch.randn(shape, generator=random) * 0.3


def _layer(prefix: str, width: int, joined: int, weight: Callable[..., Tensor]) -> dict[str, Tensor]:
    queries, keys = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    return {
        f"{prefix}.self_attn.q_proj.weight": weight(queries, joined),
        f"{prefix}.self_attn.k_proj.weight": weight(keys, joined),
        f"{prefix}.self_attn.v_proj.weight": weight(keys, joined),
        f"{prefix}.self_attn.o_proj.weight": weight(width, queries),
        f"{prefix}.mlp.gate_proj.weight": weight(FFN, width),
        f"{prefix}.mlp.up_proj.weight": weight(FFN, width),
        f"{prefix}.mlp.down_proj.weight": weight(width, FFN),
        f"{prefix}.post_attention_layernorm.weight": 1 + weight(width),
    }


def layer_config(width: int = WIDTH, **fields: Any) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "hidden_size": width,
        "intermediate_size": FFN,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "vocab_size": VOCAB,
        "max_position_embeddings": 64,
    } | fields


def _embedding(target: Path) -> Tensor:
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    return model.get_input_embeddings().weight.detach().clone()


def eagle1(target: Path, *, bias: bool = True, file: str = "pytorch_model.bin") -> Published:
    random = torch.Generator().manual_seed(1)
    weight = weights_of(random)
    tensors = _layer("layers.0", WIDTH, WIDTH, weight)
    tensors["fc.weight"] = weight(WIDTH, 2 * WIDTH)
    if bias:
        tensors["fc.bias"] = torch.randn(WIDTH, generator=random)
    tensors["embed_tokens.weight"] = _embedding(target)
    config = layer_config(architectures=["LlamaForCausalLM"], rope_theta=THETA) | (
        {} if bias else {"bias": False}
    )
    return Published(config, tensors, (LAYERS,), is_eagle3=False, file=file)


def eagle3(
    prefix: str = "midlayer",
    *,
    width: int = WIDTH,
    captured: tuple[int, ...] = (2, LAYERS // 2, LAYERS - 3),
    fc_norm: bool = False,
    norm_before_fc: bool = False,
    norm_before_residual: bool = False,
    norm_output: bool = False,
    mixes: bool = True,
    head_norms: bool = False,
    reduced: bool = True,
    theta: float | None = THETA,
    **fields: Any,
) -> Published:
    """Write the official layout. The head has its own embedding if its width differs from the target's."""
    random = torch.Generator().manual_seed(2)
    weight = weights_of(random)
    tensors = _layer(prefix, width, 2 * width, weight)
    for norm in ("hidden_norm", "input_layernorm"):
        tensors[f"{prefix}.{norm}.weight"] = 1 + weight(width)
    if head_norms:
        tensors |= {f"{prefix}.self_attn.{name}_norm.weight": 1 + weight(HEAD_DIM) for name in "qk"}
    if mixes:
        tensors["fc.weight"] = weight(width, len(captured) * WIDTH)
    if fc_norm:
        tensors |= {f"fc_norm.{i}.weight": 1 + weight(WIDTH) for i in range(len(captured))}
    if norm_before_fc:
        tensors["input_norm.weight"] = 1 + weight(len(captured) * WIDTH)
    tensors["norm.weight"] = 1 + weight(width)
    size = DRAFT_VOCAB if reduced else VOCAB
    tensors["lm_head.weight"] = weight(size, width)
    config = layer_config(width, architectures=["LlamaForCausalLM"], draft_vocab_size=size)
    if theta is not None:
        config["rope_theta"] = theta
    if width != WIDTH:
        tensors["embed_tokens.weight"] = weight(VOCAB, width)
        config["target_hidden_size"] = WIDTH
    if reduced:
        ids = torch.randperm(VOCAB, generator=random)[:size].sort().values
        tensors["d2t"] = ids - torch.arange(size)
        tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, ids, True)
    flags = {
        "fc_norm": fc_norm,
        "norm_before_fc": norm_before_fc,
        "norm_before_residual": norm_before_residual,
        "norm_output": norm_output,
    }
    config |= {name: True for name, on in flags.items() if on}
    return Published(config | fields, tensors, captured, is_eagle3=True, flags=flags)


def specforge(**options: Any) -> Published:
    """Write SpecForge's layout. Its layer ids are one less than Transformers' numbers."""
    published = eagle3(captured=(2, 4, 6), **options)
    published.config |= {
        "architectures": ["LlamaForCausalLMEagle3"],
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 5], "use_aux_hidden_state": True},
    }
    return published


def speculators(**options: Any) -> Published:
    """Write speculators' layout: a nested layer config, and Transformers' layer numbers."""
    published = eagle3("layers.0", captured=(1, 4, 6), norm_before_residual=True, **options)
    layer = {name: published.config[name] for name in (*layer_config(), "rope_theta")}
    published.config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.3.0",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 5}],
            "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": "some/model"},
        },
        "transformer_layer_config": layer,
        "draft_vocab_size": published.config["draft_vocab_size"],
        "norm_before_residual": True,
        "eagle_aux_hidden_state_layer_ids": [1, 4, 6],
    } | {name: True for name, on in published.flags.items() if on}
    return published


def without_aux() -> Published:
    """Write a head that reads only the last hidden state and has no fc."""
    published = eagle3(captured=(LAYERS,), mixes=False)
    published.config["eagle_config"] = {"use_aux_hidden_state": False}
    return published


class PlainHead:
    """A head whose row r combines token r + 1 with the hidden state after token r, at position r."""

    def __init__(self, published: Published, target: PreTrainedModel, theta: float) -> None:
        self.published = published
        self.target = target
        self.theta = theta
        self.weights = {
            name.removeprefix("midlayer.").removeprefix("layers.0."): tensor
            for name, tensor in published.tensors.items()
        }
        assert self.weights["mlp.up_proj.weight"].shape[0] == FFN
        embedding = self.weights.get("embed_tokens.weight")
        self.embedding = target.get_input_embeddings().weight if embedding is None else embedding
        self._features: dict[tuple[int, ...], Tensor] = {}

    @torch.no_grad()
    def features(self, token_ids: list[int]) -> Tensor:
        """Return the layer's input features after each of the tokens: [tokens, hidden_size]."""
        output = self.target(torch.tensor([token_ids]), output_hidden_states=True)
        states = [output.hidden_states[layer][0] for layer in self.published.captured]
        if "fc_norm.0.weight" in self.weights:
            states = [self._norm(f"fc_norm.{i}", state) for i, state in enumerate(states)]
        joined = torch.cat(states, dim=-1)
        if not self.published.is_eagle3:
            return joined
        if "input_norm.weight" in self.weights:
            joined = self._norm("input_norm", joined)
        return linear(joined, self.weights["fc.weight"]) if "fc.weight" in self.weights else joined

    @torch.no_grad()
    def logits(
        self, token_ids: list[int], drafted: list[int], first_row: int = 0, lost: int | None = None
    ) -> Tensor:
        """Return the logits after the last of `drafted`, in the target's vocabulary: [vocab_size].

        Rows before `first_row` are ignored, and the hidden state before the place `lost` is zeros.
        """
        known = tuple(token_ids[:-1])
        if known not in self._features:
            self._features[known] = self.features(token_ids[:-1])
        hidden = self._features[known]
        if lost is not None:
            hidden = hidden.index_fill(0, torch.tensor(lost - 1), 0)
        everything = token_ids + drafted
        while True:
            output = self._layer(everything[1 : len(hidden) + 1], hidden, first_row)
            scored, fed_back = self._normed(output[-1])
            if len(hidden) + 1 == len(everything):
                return self._score(scored)
            hidden = torch.cat([hidden, fed_back[None]])

    def draft(self, token_ids: list[int], count: int) -> list[int]:
        drafted: list[int] = []
        while len(drafted) < count:
            drafted.append(int(self.logits(token_ids, drafted).argmax()))
        return drafted

    def _layer(self, tokens: list[int], hidden: Tensor, first_row: int) -> Tensor:
        embeddings = self.embedding[tokens]
        if self.published.is_eagle3:
            normed = self._norm("hidden_norm", hidden)
            joined = torch.cat([self._norm("input_layernorm", embeddings), normed], dim=-1)
            residual = normed if self.published.flags["norm_before_residual"] else hidden
        else:
            both = torch.cat([embeddings, hidden], dim=-1)
            joined = residual = linear(both, self.weights["fc.weight"], self.weights.get("fc.bias"))
        query = self._project("self_attn.q_proj", joined).view(-1, HEADS, HEAD_DIM)
        key = self._project("self_attn.k_proj", joined).view(-1, KV_HEADS, HEAD_DIM)
        if "self_attn.q_norm.weight" in self.weights:
            query, key = self._norm("self_attn.q_norm", query), self._norm("self_attn.k_norm", key)
        query, key = (rotated(each, 0, self.theta) for each in (query, key))
        value = self._project("self_attn.v_proj", joined).view(-1, KV_HEADS, HEAD_DIM)
        rows = torch.arange(len(tokens))
        seen = (rows[None] <= rows[:, None]) & (rows[None] >= first_row)
        seen |= torch.eye(len(tokens), dtype=torch.bool)  # unused rows before the first
        attended = attend(query, key, value, seen)
        hidden = residual + self._project("self_attn.o_proj", attended.flatten(1))
        x = self._norm("post_attention_layernorm", hidden)
        gated = silu(self._project("mlp.gate_proj", x)) * self._project("mlp.up_proj", x)
        return hidden + self._project("mlp.down_proj", gated)

    def _normed(self, output: Tensor) -> tuple[Tensor, Tensor]:
        if not self.published.is_eagle3:
            return output, output
        normed = self._norm("norm", output)
        return normed, normed if self.published.flags["norm_output"] else output

    def _score(self, scored: Tensor) -> Tensor:
        if not self.published.is_eagle3:
            return self.target.get_output_embeddings()(scored)
        logits = linear(scored, self.weights["lm_head.weight"])
        if "d2t" not in self.weights:
            return logits
        whole = torch.full((len(self.weights["t2d"]),), -torch.inf)
        for draft_id, offset in enumerate(self.weights["d2t"].tolist()):
            whole[draft_id + offset] = logits[draft_id]
        return whole

    def _project(self, name: str, x: Tensor) -> Tensor:
        return linear(x, self.weights[f"{name}.weight"])

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return normed(x, self.weights[f"{name}.weight"])


def normed(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt() * weight


def attend(query: Tensor, key: Tensor, value: Tensor, seen: Tensor) -> Tensor:
    """Attend with rows [rows, heads, head_dim] to the keys that they have `seen` [rows, keys]."""
    groups = query.shape[1] // key.shape[1]
    key, value = (each.repeat_interleave(groups, 1) for each in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) / query.shape[-1] ** 0.5
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), value)


def rotated(x: Tensor, first: int, theta: float = THETA) -> Tensor:
    """Rotate rows [rows, heads, head_dim] from the position `first` on."""
    half = x.shape[-1] // 2
    angles = (first + torch.arange(len(x)))[:, None, None] / theta ** (torch.arange(half) / half)
    low, high = x[..., :half], x[..., half:]
    cosines, sines = angles.cos(), angles.sin()
    return torch.cat([low * cosines - high * sines, high * cosines + low * sines], dim=-1)
