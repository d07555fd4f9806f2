"""The least that a step can take (Williams et al. 2009), and what drafts of a set acceptance bring."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedModel

from bench.gpu.roofs import Roofs


@dataclass(frozen=True)
class Costs:
    """Of a dense model. `layer_weights` and `head_weights` are how many numbers a row is multiplied with, the
    latter if its logits are wanted; `kv_bytes` those of a token's KV, `attended` the products of a row with
    a key and its value, in all layers.
    """

    layer_weights: int
    head_weights: int
    weight_bytes: int
    kv_bytes: int
    attended: int

    @classmethod
    def of(cls, model: PreTrainedModel, kv_bytes: int) -> Costs:
        config = model.config
        head = model.get_output_embeddings().weight
        body = sum(parameter.numel() for parameter in model.model.parameters())
        return cls(
            layer_weights=body - model.get_input_embeddings().weight.numel(),
            head_weights=head.numel(),
            weight_bytes=head.itemsize,
            kv_bytes=kv_bytes,
            attended=2 * config.num_hidden_layers * config.num_attention_heads * config.head_dim,
        )

    def step(self, sequences: int, rows_each: int, context: int, logits_each: int) -> Step:
        """Of so many sequences, whose last row sees `context` keys."""
        rows, logits = sequences * rows_each, sequences * logits_each
        seen = rows * (2 * context - rows_each + 1) // 2
        products = rows * self.layer_weights + logits * self.head_weights + seen * self.attended
        read = (self.layer_weights + self.head_weights) * self.weight_bytes
        return Step(read + sequences * context * self.kv_bytes, 2 * products)


@dataclass(frozen=True)
class Step:
    """What has to be read, weights and KV, and the operations."""

    nbytes: int
    operations: int

    def least_s(self, roofs: Roofs) -> float:
        return max(self.nbytes / roofs.bytes_per_s, self.operations / roofs.flops)

    def bound(self, roofs: Roofs) -> str:
        reads = self.nbytes / roofs.bytes_per_s >= self.operations / roofs.flops
        return "memory" if reads else "products"


def tokens_of(num_drafted: int, acceptance: float) -> float:
    """That a step brings to a request, where each drafted token is accepted with this chance if those before
    it were (Leviathan et al. 2023).
    """
    return sum(acceptance**place for place in range(num_drafted + 1))
