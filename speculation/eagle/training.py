"""Trains EAGLE-3 heads with a training-time test (Li et al. 2025, section 3.2).

Serving feeds the head its own hidden states, so training does too: from every place of a window the drafting
of `depth` tokens is unrolled, with the text's tokens. The head learns the target's whole distribution.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from protocol.errors import ConfigError
from speculation.eagle.head import Head, HeadShape
from speculation.training.head import HeadOptions, Target

_DEPTH = 4
_DRAFT_VOCABULARY = 32_000
_STEP_WEIGHT = 0.8
"""What the loss of a drafting step counts for, relative to the step before: later ones are reached less."""


def build_eagle3(target: Target, options: HeadOptions) -> Eagle3Training:
    """A layer of the target's own shape, over the hidden states that EAGLE-3's authors take."""
    if options.num_layers not in (None, 1):
        raise ConfigError(f"--num-layers: an EAGLE-3 head has one, got {options.num_layers}")
    config = target.model.config.get_text_config(decoder=True)
    size = options.draft_vocab_size or min(_DRAFT_VOCABULARY, target.vocab_size)
    if size > target.vocab_size:
        raise ConfigError(f"--draft-vocab-size: the model has {target.vocab_size} tokens, got {size}")
    layers = target.num_layers
    captured = tuple(sorted({min(2, layers), layers // 2, max(layers - 3, 0)}))
    shape = HeadShape(
        is_eagle3=True,
        captured=captured,
        feature_size=len(captured) * target.hidden_size,
        hidden_size=target.hidden_size,
        intermediate_size=config.intermediate_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        head_dim=getattr(config, "head_dim", None) or target.hidden_size // config.num_attention_heads,
        max_positions=config.max_position_embeddings,
        rope=dict(config.rope_parameters),
        rms_norm_eps=config.rms_norm_eps,
        draft_vocab_size=size,
        norm_output=True,
    )
    return Eagle3Training(target, shape, options.depth or _DEPTH)


class Eagle3Training:
    """Implements `speculation.training.head.TrainableHead`.

    Place p of a window stands for the drafting that starts when token p + 1 is known, and the hidden states
    up to token p.
    """

    def __init__(self, target: Target, shape: HeadShape, depth: int, *, own_lm_head: bool = True) -> None:
        """Without an LM head of its own the target's serves, as far as `draft_vocab_size` goes."""
        assert shape.draft_vocab_size is not None
        self.depth = depth
        self.hidden_layers = (*shape.captured, target.num_layers)
        self._target = target
        self._shape = shape
        self._embedding = target.model.get_input_embeddings()
        self._target_lm_head = target.model.get_output_embeddings()
        most_frequent = target.token_counts.argsort(descending=True, stable=True)[: shape.draft_vocab_size]
        self.draft_ids = most_frequent.sort().values.to(target.device)
        head = Head(shape).to(target.device)
        for projection in (head.midlayer.self_attn.o_proj, head.midlayer.mlp.down_proj):
            nn.init.zeros_(projection.weight)
        self.module = nn.ModuleDict({"head": head})
        rows = self._target_lm_head.weight[self.draft_ids].detach()
        if own_lm_head:
            lm_head = nn.Linear(shape.hidden_size, shape.draft_vocab_size, bias=False, device=target.device)
            lm_head.weight.data.copy_(rows)
            self.module["lm_head"] = lm_head
        else:
            self._shared_rows = rows
        self._head = head

    def loss(self, token_ids: Tensor, hidden: Tensor) -> Tensor:
        """The cross-entropy with the target's distribution, in nats a token, over all steps. What the target
        gives to tokens outside the draft vocabulary counts for nothing.
        """
        features, last = hidden.split([self._shape.feature_size, self._target.hidden_size], dim=-1)
        with torch.no_grad():
            wanted = self._target_lm_head(last).float().softmax(dim=-1)[..., self.draft_ids]
        later = torch.nn.functional.pad(token_ids, (0, self.depth))
        length = token_ids.shape[1]
        total = hidden.new_zeros((), dtype=torch.float32)
        weights = 0.0
        steps = self._unroll(token_ids, features, lambda step, _: later[:, 1 + step : length + step])
        for step, logits in enumerate(steps):
            known = length - 1 - step  # places whose next tokens still lie within the window
            log_q = logits[:, :known].float().log_softmax(dim=-1)
            entropy = -(wanted[:, 1 + step :] * log_q).sum(dim=-1).mean()
            total = total + _STEP_WEIGHT**step * entropy
            weights += _STEP_WEIGHT**step
        return total / weights

    def draft(self, token_ids: Tensor, hidden: Tensor, places: Tensor) -> Tensor:
        """The greedy chains of `depth` tokens from each of `places`: int64 [windows, places, depth]."""
        features = hidden[..., : self._shape.feature_size]
        drafted: list[Tensor] = []

        def own(step: int, logits: Tensor | None) -> Tensor:
            return token_ids[:, 1:] if logits is None else self.draft_ids[logits.argmax(dim=-1)]

        for logits in self._unroll(token_ids, features, own):
            drafted.append(self.draft_ids[logits[:, places].argmax(dim=-1)])
        return torch.stack(drafted, dim=-1)

    def _unroll(
        self, token_ids: Tensor, features: Tensor, choose: Callable[[int, Tensor | None], Tensor]
    ) -> Iterator[Tensor]:
        """The logits [windows, length - 1, draft_vocab_size] of each drafting step, from all places at once.

        `choose` gives a step's tokens, from the logits of the step before if it likes.
        """
        head, count = self._head, token_ids.shape[1] - 1
        positions = torch.arange(count, device=token_ids.device)
        attention = _UnrolledAttention(count, token_ids.device)
        logits: Tensor | None = None
        with self._autocast():
            hidden = head.combine(features[:, :-1])
            for step in range(self.depth):
                embeddings = self._embedding(choose(step, logits))
                joined, residual = head.enter(embeddings, hidden)
                at = positions + step
                attended = attention(*head.project(joined, at))
                scored, hidden = head.normed(head.leave(attended, residual))
                logits = self._lm_head(scored)
                yield logits

    def _lm_head(self, scored: Tensor) -> Tensor:
        if "lm_head" in self.module:
            return self.module["lm_head"](scored)
        return scored.to(self._shared_rows.dtype) @ self._shared_rows.T

    def _autocast(self) -> contextlib.AbstractContextManager[object]:
        if self._target.dtype is torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(self._target.device.type, self._target.dtype)

    def save(self, folder: Path) -> None:
        """In the official EAGLE-3 layout."""
        folder.mkdir(parents=True, exist_ok=True)
        shape, dtype = self._shape, self._target.dtype
        tensors = {name: value.detach().to(dtype) for name, value in self._head.state_dict().items()}
        if "lm_head" in self.module:
            tensors["lm_head.weight"] = self.module["lm_head"].weight.detach().to(dtype)
        if len(self.draft_ids) < self._target.vocab_size:
            numbers = torch.arange(len(self.draft_ids), device=self.draft_ids.device)
            tensors["d2t"] = self.draft_ids - numbers
            tensors["t2d"] = torch.zeros(self._target.vocab_size, dtype=torch.bool)
            tensors["t2d"][self.draft_ids.cpu()] = True
        save_file(
            {name: value.contiguous().cpu() for name, value in tensors.items()}, folder / "model.safetensors"
        )
        config = {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "dtype": str(dtype).removeprefix("torch."),
            "vocab_size": self._target.vocab_size,
            "draft_vocab_size": len(self.draft_ids),
            "hidden_size": shape.hidden_size,
            "intermediate_size": shape.intermediate_size,
            "num_hidden_layers": 1,
            "num_attention_heads": shape.num_heads,
            "num_key_value_heads": shape.num_kv_heads,
            "head_dim": shape.head_dim,
            "hidden_act": shape.hidden_act,
            "rms_norm_eps": shape.rms_norm_eps,
            "max_position_embeddings": shape.max_positions,
            "rope_parameters": shape.rope,
            "tie_word_embeddings": False,
            "eagle_aux_hidden_state_layer_ids": list(shape.captured),
            "norm_output": shape.norm_output,
        }
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


class _UnrolledAttention:
    """Each call is a drafting step from `count` places: a place's row sees the first step's rows of all
    places up to its own, and of the later steps those that started from its own place.
    """

    def __init__(self, count: int, device: torch.device) -> None:
        self._unseen = torch.ones(count, count, dtype=torch.bool, device=device).triu(1)
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """query [windows, count, num_heads, head_dim], key and value with num_kv_heads; returns query's
        shape.
        """
        groups = query.shape[-2] // key.shape[-2]
        query = query.transpose(1, 2) * query.shape[-1] ** -0.5
        self._keys.append(key.repeat_interleave(groups, dim=-2).transpose(1, 2))
        self._values.append(value.repeat_interleave(groups, dim=-2).transpose(1, 2))
        scores = query @ self._keys[0].transpose(2, 3)
        scores = [scores.masked_fill(self._unseen, -torch.inf)]
        scores += [(query * later).sum(dim=-1, keepdim=True) for later in self._keys[1:]]
        weights = torch.cat(scores, dim=-1).float().softmax(dim=-1).to(value.dtype)
        count = len(self._unseen)
        attended = weights[..., :count] @ self._values[0]
        for step, later in enumerate(self._values[1:]):
            attended = attended + weights[..., count + step, None] * later
        return attended.transpose(1, 2)
