"""The roofline of a step (Williams et al. 2009), and the tokens gained by drafts of a given acceptance."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedModel

from bench.gpu.roofs import Roofs


@dataclass(frozen=True)
class Costs:
    """Costs of a dense model. A row is multiplied with `layer_weights` numbers, and with `head_weights` more
    if its logits are needed. `kv_bytes` is the size of a token's KV. `attended` counts a row's products with
    one key and its value, in all layers.
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

    def step(self, sequences: int, rows_each: int, context: int, logits_each: int) -> StepCost:
        """Return the work of a step of `sequences` sequences. Each one's last row sees `context` keys."""
        rows, logits = sequences * rows_each, sequences * logits_each
        seen = rows * (2 * context - rows_each + 1) // 2
        products = rows * self.layer_weights + logits * self.head_weights + seen * self.attended
        read = (self.layer_weights + self.head_weights) * self.weight_bytes
        return StepCost(read + sequences * context * self.kv_bytes, 2 * products)


@dataclass(frozen=True)
class StepCost:
    """The bytes of weights and KV that a step reads, and its operations."""

    nbytes: int
    operations: int

    def least_s(self, roofs: Roofs) -> float:
        return max(self.nbytes / roofs.bytes_per_s, self.operations / roofs.flops)

    def bound(self, roofs: Roofs) -> str:
        reads = self.nbytes / roofs.bytes_per_s >= self.operations / roofs.flops
        return "memory" if reads else "products"


def tokens_of(num_drafted: int, acceptance: float) -> float:
    """Return the tokens per request and step if each draft token is accepted with probability `acceptance`,
    given that all earlier ones are (Leviathan et al. 2023).
    """
    return sum(acceptance**place for place in range(num_drafted + 1))
