"""EAGLE drafting in plain torch without a cache: each token recomputes all rows."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear, silu
from transformers import PreTrainedModel

from tests.speculation.eagle_files import FFN, HEAD_DIM, HEADS, KV_HEADS, Published


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
        query, key = self._rotate(query), self._rotate(key)
        value = self._project("self_attn.v_proj", joined).view(-1, KV_HEADS, HEAD_DIM)
        rows = torch.arange(len(tokens))
        seen = (rows[None] <= rows[:, None]) & (rows[None] >= first_row)
        seen |= torch.eye(len(tokens), dtype=torch.bool)  # unused rows before the first
        attended = torch.empty_like(query)
        for head in range(HEADS):
            group = head * KV_HEADS // HEADS
            scores = query[:, head] @ key[:, group].T / HEAD_DIM**0.5
            attended[:, head] = scores.masked_fill(~seen, -torch.inf).softmax(-1) @ value[:, group]
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
        scale = (x.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt()
        return x * scale * self.weights[f"{name}.weight"]

    def _rotate(self, x: Tensor) -> Tensor:
        half = HEAD_DIM // 2
        angles = torch.arange(len(x))[:, None] / self.theta ** (torch.arange(half) / half)
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        left, right = x[..., :half], x[..., half:]
        return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)
