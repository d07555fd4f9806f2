"""How the models that the native decoder runs are put together: where their layers keep their parts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from torch import nn

ATTENTION, DELTA, SHORT_CONV, STATE_SPACE, NOTHING, CHANNEL_DELTA, LATENT = range(7)
"""What mixes a layer's rows; `structs.h` has the same."""

PLAIN, CENTRED, EXACT = range(3)
"""How norms multiply by their weights; `row_math.h` has the same."""

SOFTMAX, SIGMOID = range(2)
"""What makes scores of a router's logits; `routing.h` has the same."""


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
    opener: tuple[str, ...] = ()
    """Of the MLP beside experts."""


NumberedPaths = tuple[int, Paths]
"""With the number of the layer."""


@dataclass(frozen=True)
class Mixer:
    """A layer's module that mixes rows, and what it calls its linear layers and its convolution. Where all
    layers have their modules at one path, `block` is the type of those that have this one. Of the `inputs`
    those that are None are left out. `low_rank` are what goes on from the last of the gates, for decays and
    for what opens outputs; `decays` has what decays are made with, if that is a module of its own. The layer
    has an `input_multiplier` of what it reads.
    """

    kind: int
    path: str
    inputs: tuple[str, ...]
    output: str
    gates: tuple[str, ...] = ()
    conv: str = "conv1d"
    norm: str = "norm"
    block: str | None = None
    low_rank: tuple[str, ...] = ()
    decays: str = ""
    interleaved: bool = False
    """Whether linear layers' outputs lie key head by key head."""
    input_multiplier: str | None = None

    def paths(self, layer: nn.Module) -> Paths:
        """Without an MLP."""
        module = getattr(layer, self.path)
        present = tuple(name for name in self.inputs if getattr(module, name) is not None)
        inputs, gates, output = (
            tuple(f"{self.path}.{name}" for name in names) for names in (present, self.gates, (self.output,))
        )
        return Paths(inputs, gates, output, (), ())


@dataclass(frozen=True)
class Routing:
    """Where a layer with experts has them and their router, namely in `block`, and how this makes scores.
    `shared` is the path of the MLP beside them, whose linear layers are called as in other layers.
    """

    block: str = "mlp"
    router: str = "gate"
    shared: str | None = None
    opener: str | None = None
    score: int = SOFTMAX
    preferences: str | None = None
    """Added to scores only to find the highest."""
    exact: bool = False
    """Whether scores are made and used in float32, else rounded to bfloat16."""
    rounds: bool = True
    """Whether the chosen scores are."""
    least_sum: float = 0.0
    """Added to the chosen scores' sum, by which they are divided."""


def _attention(output: str = "o_proj") -> Mixer:
    return Mixer(ATTENTION, "self_attn", ("q_proj", "k_proj", "v_proj"), output)


@dataclass(frozen=True)
class Family:
    """Paths in a layer, but for the `final_norm` and the `rotary` embedding, which are the decoder's, and
    `epsilon`, the configuration's. Without the embedding attention does not know positions. The configuration
    has the `multipliers`, and `head_multiplier`, that of logits; the layer has the `output_multipliers`, by
    the paths of the linear layers whose outputs they are of. Where each layer is a `block` of one norm, it
    mixes rows or is an MLP, which has no gate, but squares what is above 0.
    """

    mixers: tuple[Mixer, ...] = (_attention(),)
    beside: Mixer | None = None
    """A second one, of all layers: it reads the same rows, and the outputs of both are added."""
    input_norm: str = "input_layernorm"
    mlp_norm: str = "post_attention_layernorm"
    query_norm: str = "self_attn.q_norm"
    key_norm: str = "self_attn.k_norm"
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"
    final_norm: str = "norm"
    rotary: str = "rotary_emb"
    epsilon: str = "rms_norm_eps"
    norms: int = PLAIN
    multipliers: tuple[str, ...] = ()
    output_multipliers: Mapping[str, str] = field(default_factory=dict)
    head_multiplier: str | None = None
    blocks: bool = False
    routing: Routing | None = None

    def mixer(self, layer: nn.Module) -> Mixer | None:
        """None: it is an MLP."""
        block = getattr(layer, "block_type", None)
        found = (mixer for mixer in self.mixers if getattr(layer, mixer.path, None) is not None)
        return next((mixer for mixer in found if mixer.block in (None, block)), None)

    def routing_of(self, layer: nn.Module) -> Routing | None:
        """None where the layer has no experts."""
        block = None if self.routing is None else getattr(layer, self.routing.block, None)
        return self.routing if hasattr(block, "experts") else None

    def paths(self, layer: nn.Module) -> Paths:
        mixer = self.mixer(layer)
        if mixer is None:
            return Paths((), (), (), *self._mlp(layer))
        if self.blocks:
            return mixer.paths(layer)
        gate_up, down, opener = self._mlp(layer)
        return mixer.paths(layer)._replace(gate_up=gate_up, down=down, opener=opener)

    def _mlp(self, layer: nn.Module) -> tuple[tuple[str, ...], ...]:
        """The last three of `Paths`."""
        routing = self.routing_of(layer)
        if routing is None:
            return self.gate_up, (self.down,), ()
        if routing.shared is None:
            return (), (), ()
        gate_up, down = (
            tuple(f"{routing.shared}.{name.rpartition('.')[2]}" for name in names)
            for names in (self.gate_up, (self.down,))
        )
        return gate_up, down, () if routing.opener is None else (f"{routing.block}.{routing.opener}",)

    def branches(self, layer: nn.Module) -> list[tuple[Mixer | None, Paths]]:
        """The mixer and the paths of each of the decoder's layers that run it."""
        beside = [] if self.beside is None else [(self.beside, self.beside.paths(layer))]
        return [(self.mixer(layer), self.paths(layer)), *beside]

    def products(self, layer: nn.Module) -> Iterator[tuple[Any, ...]]:
        """The linear layers of each of the paths of `branches`."""
        return (linears(layer, names) for _, paths in self.branches(layer) for names in paths)


def linears(layer: nn.Module, names: Sequence[str]) -> tuple[Any, ...]:
    """Those of one product."""
    return tuple(map(layer.get_submodule, names))


LLAMA = Family()
GRANITE_MULTIPLIERS = ("embedding_multiplier", "residual_multiplier", "logits_scaling")
QWEN_ROUTING = Routing(shared="mlp.shared_expert", opener="shared_expert_gate")
DEEPSEEK_ROUTING = Routing(
    shared="mlp.shared_experts",
    score=SIGMOID,
    preferences="gate.e_score_correction_bias",
    exact=True,
    rounds=False,
    least_sum=1e-20,
)
QWEN3_5 = Family(
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
)
QWEN3_NEXT = Family(
    mixers=(
        _attention(),
        Mixer(DELTA, "linear_attn", ("in_proj_qkvz",), "out_proj", ("in_proj_ba",), interleaved=True),
    ),
    norms=CENTRED,
    routing=QWEN_ROUTING,
)
LFM2 = Family(
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
)
FAMILIES = {
    "LlamaForCausalLM": LLAMA,
    "MistralForCausalLM": LLAMA,
    "Qwen2ForCausalLM": LLAMA,
    "Qwen3ForCausalLM": LLAMA,
    "MixtralForCausalLM": Family(routing=Routing(rounds=False)),
    "Qwen2MoeForCausalLM": Family(routing=QWEN_ROUTING),
    "Qwen3MoeForCausalLM": Family(routing=Routing()),
    "Qwen3NextForCausalLM": QWEN3_NEXT,
    "Qwen3_5ForCausalLM": QWEN3_5,
    "Qwen3_5MoeForCausalLM": replace(QWEN3_5, routing=QWEN_ROUTING),
    "Lfm2ForCausalLM": LFM2,
    "Lfm2MoeForCausalLM": replace(
        LFM2,
        rotary="pos_emb",
        routing=Routing("feed_forward", score=SIGMOID, preferences="expert_bias", least_sum=1e-6),
    ),
    "BambaForCausalLM": Family(
        mixers=(_attention(), Mixer(STATE_SPACE, "mamba", inputs=("in_proj",), output="out_proj")),
        mlp_norm="pre_ff_layernorm",
        gate_up=("feed_forward.gate_proj", "feed_forward.up_proj"),
        down="feed_forward.down_proj",
        final_norm="final_layernorm",
    ),
    "FalconH1ForCausalLM": Family(
        mixers=(replace(_attention(), input_multiplier="attention_in_multiplier"),),
        beside=Mixer(
            STATE_SPACE,
            "mamba",
            inputs=("in_proj",),
            output="out_proj",
            input_multiplier="mamba.ssm_in_multiplier",
        ),
        mlp_norm="pre_ff_layernorm",
        gate_up=("feed_forward.gate_proj", "feed_forward.up_proj"),
        down="feed_forward.down_proj",
        final_norm="final_layernorm",
        multipliers=("embedding_multiplier",),
        output_multipliers={
            "self_attn.k_proj": "self_attn.key_multiplier",
            "self_attn.o_proj": "attn_out_multiplier",
            "mamba.in_proj": "mamba.mup_vector",
            "mamba.out_proj": "ssm_out_multiplier",
            "feed_forward.gate_proj": "feed_forward.gate_multiplier",
            "feed_forward.down_proj": "feed_forward.down_multiplier",
        },
        head_multiplier="lm_head_multiplier",
    ),
    "GraniteForCausalLM": Family(multipliers=GRANITE_MULTIPLIERS),
    "GraniteMoeHybridForCausalLM": Family(
        mixers=(_attention(), Mixer(STATE_SPACE, "mamba", inputs=("in_proj",), output="out_proj")),
        gate_up=("shared_mlp.input_linear",),
        down="shared_mlp.output_linear",
        multipliers=GRANITE_MULTIPLIERS,
        routing=Routing("block_sparse_moe", "router", shared="shared_mlp"),
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
        routing=replace(DEEPSEEK_ROUTING, block="mixer", shared="mixer.shared_experts"),
    ),
    "KimiLinearForCausalLM": Family(
        mixers=(
            Mixer(
                CHANNEL_DELTA,
                "self_attn",
                inputs=("q_proj", "k_proj", "v_proj"),
                gates=("b_proj", "forget_gate.f_a_proj", "g_a_proj"),
                output="o_proj",
                norm="o_norm",
                block="linear_attention",
                low_rank=("forget_gate.f_b_proj", "g_b_proj"),
                decays="forget_gate",
            ),
            Mixer(
                LATENT,
                "self_attn",
                inputs=("q_proj", "q_a_proj", "kv_a_proj_with_mqa"),
                output="o_proj",
                block="full_attention",
            ),
        ),
        routing=DEEPSEEK_ROUTING,
    ),
}
"""By the model's class."""


def has_experts(model: nn.Module) -> bool:
    """Of a model that is of one of the `FAMILIES`."""
    family = FAMILIES[type(model).__name__]
    layers: Any = model.get_submodule("model.layers")
    return any(family.routing_of(layer) is not None for layer in layers)
