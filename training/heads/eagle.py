"""Trains EAGLE-3 heads with a training-time test (Li et al. 2025, section 3.2).

In serving the head reads its own hidden states, so training does too: from every place of a window the
drafting of `depth` tokens is unrolled, with the text's tokens. The head learns the target's whole
distribution.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from engine.devices.torch.program import TorchProgram
from protocol.errors import ConfigError
from speculation.eagle.head import Head, HeadShape, head_program
from training.heads.contract import HeadOptions, Target, TrainableHead, write_head

DEFAULT_DEPTH = 4
DRAFT_VOCABULARY = 32_000
LARGEST_SHARE = 0.1
"""The largest share of the target's parameters that a head may have: more would cost more time than it
saves.
"""
_STEP_WEIGHT = 0.8
"""The weight of a drafting step's loss relative to the step before."""


def build_eagle3(target: Target, options: HeadOptions) -> Eagle3Training:
    """Build a head with a layer like the target's and an LM head of its own, each only if it is not too
    large.

    Raises `ConfigError` that names the option.
    """
    if options.num_layers not in (None, 1):
        raise ConfigError(f"--num-layers: an EAGLE-3 head has one, got {options.num_layers}")
    size = options.draft_vocab_size or min(DRAFT_VOCABULARY, target.vocab_size)
    room = target.model.num_parameters() * LARGEST_SHARE
    own_lm_head = size * target.hidden_size <= room / 2
    if own_lm_head:
        room -= size * target.hidden_size
    return Eagle3Training(target, _shape(target, size, room), options.depth or DEFAULT_DEPTH, own_lm_head)


def _shape(target: Target, draft_vocab_size: int, room: float) -> HeadShape:
    """Return the head's shape. `room` is how many parameters the layer and the mixing of hidden states may
    have.
    """
    config = target.model.config.get_text_config(decoder=True)
    width, heads = target.hidden_size, config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or width // heads
    captured = _captured(target.num_layers)
    inner = getattr(config, "intermediate_size", None) or 4 * width
    layer = width * head_dim * (3 * heads + 4 * kv_heads) + 3 * width * inner
    share = max(0.0, min(1.0, (room - len(captured) * width**2) / layer))
    num_heads = max(1, round(heads * share))
    most = max(1, round(kv_heads * share))
    return HeadShape(
        is_eagle3=True,
        captured=captured,
        feature_size=len(captured) * width,
        hidden_size=width,
        intermediate_size=max(1, int(inner * share / 32)) * 32,
        num_heads=num_heads,
        num_kv_heads=max(count for count in range(1, most + 1) if num_heads % count == 0),
        head_dim=head_dim,
        max_positions=config.max_position_embeddings,
        rope=_rope(getattr(config, "rope_parameters", None)),
        rms_norm_eps=getattr(config, "rms_norm_eps", 1e-6),
        draft_vocab_size=draft_vocab_size,
        norm_output=True,
    )


def _rope(theirs: dict[str, Any] | None) -> dict[str, Any]:
    """Return the target's rope parameters; plain ones if it has none, or several kinds."""
    return dict(theirs) if theirs and "rope_theta" in theirs else {"rope_type": "default", "rope_theta": 1e4}


def _captured(num_layers: int) -> tuple[int, ...]:
    """Return a low, a middle and a high layer, as EAGLE-3's authors choose them. For a shallow model return
    the layers just before the last, so that the last layer need not compute every row of a prompt.
    """
    if num_layers < 8:
        high = min(num_layers, max(2, num_layers - 1))
        return tuple(range(max(0, high - 2), high + 1))
    return 2, num_layers // 2, num_layers - 3


class Eagle3Training(TrainableHead):
    """An EAGLE-3 head in training. Place p of a window stands for the drafting that starts when token p + 1
    and the hidden states up to token p are known.
    """

    def __init__(self, target: Target, shape: HeadShape, depth: int, own_lm_head: bool) -> None:
        """Make a head. Without its own LM head it uses the target's, limited to `draft_vocab_size`."""
        assert shape.draft_vocab_size is not None
        self.depth = depth
        self.hidden_layers: tuple[int, ...] = (*shape.captured, target.num_layers)
        self._target = target
        self._shape = shape
        self._embedding = target.model.get_input_embeddings()
        self.draft_ids = target.frequent_tokens(shape.draft_vocab_size)
        rows = target.model.get_output_embeddings().weight.detach()[self.draft_ids] * target.logit_scale
        self._head = Head(shape).to(target.device)
        for projection in (self._head.midlayer.self_attn.o_proj, self._head.midlayer.mlp.down_proj):
            nn.init.zeros_(projection.weight)
        self._lm_head = nn.Linear(*reversed(rows.shape), bias=False, device="meta")
        self._lm_head.weight = nn.Parameter(rows.float() if own_lm_head else rows, requires_grad=own_lm_head)
        self._owns_lm_head = own_lm_head
        learned = {"head": self._head, "lm_head": self._lm_head} if own_lm_head else {"head": self._head}
        self.module: nn.Module = nn.ModuleDict(learned)

    def loss(self, token_ids: Tensor, hidden: Tensor) -> Tensor:
        """Return the cross-entropy with the target's distribution, in nats per token.

        A drafting step learns only at places where the target itself would say the text's tokens before it,
        since only there is the draft ever verified. Probability that the target gives to tokens outside the
        draft vocabulary is ignored.
        """
        features, last = hidden.split([self._shape.feature_size, self._target.hidden_size], dim=-1)
        with torch.no_grad():
            teacher = self._target.logits(last)
            said = teacher[:, :-1].argmax(dim=-1) == token_ids[:, 1:]
        later = torch.nn.functional.pad(token_ids, (0, self.depth))
        length = token_ids.shape[1]
        reached = torch.ones_like(said)
        total = torch.zeros((), device=token_ids.device)
        steps = self._unroll(features, lambda step, _: later[:, 1 + step : length + step])
        for step, scored in enumerate(steps):
            if step:
                reached = reached[:, :-1] & said[:, step:]
            wanted = teacher[:, 1 + step :][reached].float().softmax(dim=-1)[:, self.draft_ids]
            log_q = self._logits(scored[:, : length - 1 - step][reached]).float().log_softmax(dim=-1)
            total = total - _STEP_WEIGHT**step * (wanted * log_q).sum() / max(1, len(wanted))
        return total / sum(_STEP_WEIGHT**step for step in range(self.depth))

    def draft(self, token_ids: Tensor, hidden: Tensor, places: Tensor) -> Tensor:
        """Return the greedy chains of `depth` tokens from each of `places`: int64 [windows, places,
        depth].
        """

        def choose(step: int, scored: Tensor | None) -> Tensor:
            return token_ids[:, 1:] if scored is None else self._best(scored)

        steps = self._unroll(hidden[..., : self._shape.feature_size], choose)
        return torch.stack([self._best(scored[:, places]) for scored in steps], dim=-1)

    def _best(self, scored: Tensor) -> Tensor:
        return self.draft_ids[self._logits(scored).argmax(dim=-1)]

    def _logits(self, scored: Tensor) -> Tensor:
        with self._autocast():
            return self._lm_head(scored)

    def _unroll(self, features: Tensor, choose: Callable[[int, Tensor | None], Tensor]) -> Iterator[Tensor]:
        """Yield the LM head's input in each drafting step, for all places of a window but the last:
        [windows, length - 1, hidden_size].

        `choose` returns a step's tokens, and may use the LM head's input of the step before.
        """
        count = features.shape[1] - 1
        positions = 1 + torch.arange(count, device=features.device)
        described = head_program(self._head, self._embedding, self._lm_head)
        attention = _UnrolledAttention(count, features.device)
        program = TorchProgram(described, count + self.depth, attend=attention)
        scored: Tensor | None = None
        with self._autocast():
            hidden = self._head.combine(features[:, :-1])
        for step in range(self.depth):
            token_ids = choose(step, scored)
            with self._autocast():
                scored, output, _ = program.states(token_ids, positions + step, None, hidden)
            hidden = scored if self._shape.norm_output else output
            yield scored

    def _autocast(self) -> contextlib.AbstractContextManager[object]:
        if self._target.dtype is torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(self._target.device.type, self._target.dtype)

    def save(self, folder: Path) -> None:
        """Save in the official EAGLE-3 layout."""
        shape, dtype = self._shape, self._target.dtype
        tensors = {name: value.detach().to(dtype) for name, value in self._head.state_dict().items()}
        if self._owns_lm_head:
            tensors["lm_head.weight"] = self._lm_head.weight.detach().to(dtype)
        if len(self.draft_ids) < self._target.vocab_size:
            numbers = torch.arange(len(self.draft_ids), device=self.draft_ids.device)
            tensors["d2t"] = self.draft_ids - numbers
            tensors["t2d"] = torch.zeros(self._target.vocab_size, dtype=torch.bool)
            tensors["t2d"][self.draft_ids.cpu()] = True
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
            "logit_scale": 1.0 if self._owns_lm_head else self._target.logit_scale,
            "eagle_aux_hidden_state_layer_ids": list(shape.captured),
            "norm_output": shape.norm_output,
        }
        write_head(folder, config, tensors)


class _UnrolledAttention:
    """Attention of the unrolled drafting. Each call is one drafting step from `count` places: a place's row
    sees the first step's rows of all places up to its own, and the later steps' rows that started from its
    own place.
    """

    def __init__(self, count: int, device: torch.device) -> None:
        self._unseen = torch.ones(count, count, dtype=torch.bool, device=device).triu(1)
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, *_: object) -> Tensor:
        """Attend with query [windows, count, num_heads, head_dim], key and value with num_kv_heads; return
        query's shape.
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
