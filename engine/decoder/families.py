"""How the models that the native decoder runs are put together: where their layers keep their parts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import nn

ATTENTION, DELTA, SHORT_CONV, STATE_SPACE, NOTHING = range(5)
"""What mixes a layer's rows; `structs.h` has the same."""

PLAIN, CENTRED, EXACT = range(3)
"""How norms multiply by their weights; `row_math.h` has the same."""


class Paths(NamedTuple):
    """Of a layer's linear layers, in the order of the products that they are computed in; those of one
    product have one input.
    """

    inputs: tuple[str, ...]
    """Of the mixer."""
    gates: tuple[str, ...]
    output: tuple[str, ...]
    gate_up: tuple[str, ...]
    down: tuple[str, ...]


@dataclass(frozen=True)
class Mixer:
    """A layer's module that mixes rows, and what it calls its linear layers and its convolution. Where all
    layers have their modules at one path, `block` is the type of those that have this one.
    """

    kind: int
    path: str
    inputs: tuple[str, ...]
    output: str
    gates: tuple[str, ...] = ()
    conv: str = "conv1d"
    block: str | None = None


def _attention(output: str = "o_proj") -> Mixer:
    return Mixer(ATTENTION, "self_attn", ("q_proj", "k_proj", "v_proj"), output)


@dataclass(frozen=True)
class Family:
    """Paths in a layer, but for the `final_norm`, which is the decoder's, and `epsilon`, the configuration's.
    With `multipliers` the configuration has those of Granite. Where each layer is a `block` of one norm, it
    mixes rows or is an MLP, which has no gate, but squares what is above 0.
    """

    mixers: tuple[Mixer, ...] = (_attention(),)
    input_norm: str = "input_layernorm"
    mlp_norm: str = "post_attention_layernorm"
    query_norm: str = "self_attn.q_norm"
    key_norm: str = "self_attn.k_norm"
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"
    final_norm: str = "norm"
    epsilon: str = "rms_norm_eps"
    norms: int = PLAIN
    multipliers: bool = False
    blocks: bool = False

    def mixer(self, layer: nn.Module) -> Mixer | None:
        """None: it is an MLP."""
        block = getattr(layer, "block_type", None)
        found = (mixer for mixer in self.mixers if getattr(layer, mixer.path, None) is not None)
        return next((mixer for mixer in found if mixer.block in (None, block)), None)

    def paths(self, layer: nn.Module) -> Paths:
        mixer = self.mixer(layer)
        if mixer is None:
            return Paths((), (), (), self.gate_up, (self.down,))
        inputs, gates, output = (
            tuple(f"{mixer.path}.{name}" for name in names)
            for names in (mixer.inputs, mixer.gates, (mixer.output,))
        )
        mlp = ((), ()) if self.blocks else (self.gate_up, (self.down,))
        return Paths(inputs, gates, output, *mlp)

    def products(self, layer: nn.Module) -> Iterator[tuple[Any, ...]]:
        """The linear layers of each of `paths`."""
        return (tuple(map(layer.get_submodule, names)) for names in self.paths(layer))


LLAMA = Family()
FAMILIES = {
    "LlamaForCausalLM": LLAMA,
    "MistralForCausalLM": LLAMA,
    "Qwen2ForCausalLM": LLAMA,
    "Qwen3ForCausalLM": LLAMA,
    "Qwen3_5ForCausalLM": Family(
        mixers=(
            _attention(),
            Mixer(
                DELTA,
                "linear_attn",
                inputs=("in_proj_qkv", "in_proj_z"),
                gates=("in_proj_b", "in_proj_a"),
                output="out_proj",
            ),
        ),
        norms=CENTRED,
    ),
    "Lfm2ForCausalLM": Family(
        mixers=(
            _attention("out_proj"),
            Mixer(SHORT_CONV, "conv", inputs=("in_proj",), output="out_proj", conv="conv"),
        ),
        input_norm="operator_norm",
        mlp_norm="ffn_norm",
        query_norm="self_attn.q_layernorm",
        key_norm="self_attn.k_layernorm",
        gate_up=("feed_forward.w1", "feed_forward.w3"),
        down="feed_forward.w2",
        final_norm="embedding_norm",
        epsilon="norm_eps",
    ),
    "BambaForCausalLM": Family(
        mixers=(_attention(), Mixer(STATE_SPACE, "mamba", inputs=("in_proj",), output="out_proj")),
        mlp_norm="pre_ff_layernorm",
        gate_up=("feed_forward.gate_proj", "feed_forward.up_proj"),
        down="feed_forward.down_proj",
        final_norm="final_layernorm",
    ),
    "GraniteForCausalLM": Family(multipliers=True),
    "GraniteMoeHybridForCausalLM": Family(
        mixers=(_attention(), Mixer(STATE_SPACE, "mamba", inputs=("in_proj",), output="out_proj")),
        gate_up=("shared_mlp.input_linear",),
        down="shared_mlp.output_linear",
        multipliers=True,
    ),
    "NemotronHForCausalLM": Family(
        mixers=(
            replace(_attention(), path="mixer", block="full_attention"),
            Mixer(STATE_SPACE, "mixer", ("in_proj",), "out_proj", block="linear_attention"),
        ),
        input_norm="norm",
        mlp_norm="norm",
        gate_up=("mixer.up_proj",),
        down="mixer.down_proj",
        final_norm="norm_f",
        epsilon="layer_norm_epsilon",
        norms=EXACT,
        blocks=True,
    ),
}
"""By the model's class."""
