"""The table of model families: the names under which each family's layers keep their parts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from engine.model.program import MixerKind, NormKind, Score


@dataclass(frozen=True)
class MixerNames:
    """The path of a mixer's module in a layer, and its parts' names. `inputs` that are None are left out."""

    kind: MixerKind
    path: str
    inputs: tuple[str, ...]
    output: str
    gates: tuple[str, ...] = ()
    conv: str = "conv1d"
    norm: str = "norm"
    block: str | None = None
    """The `block_type` of layers with this mixer, if all layers keep their mixer at one path."""
    low_rank: tuple[str, ...] = ()
    """Second layers of low-rank products, for decays and for output gates."""
    decays: str = ""
    """The module with the decay parameters, if not the mixer itself."""
    is_interleaved: bool = False
    input_multiplier: str | None = None
    """The layer's attribute with the factor of the mixer's input."""


@dataclass(frozen=True)
class ExpertNormNames:
    """The layer's norms of experts (`engine.model.program.ExpertNorms`)."""

    router: str
    read: str
    made: str
    beside: str


@dataclass(frozen=True)
class RoutingNames:
    """The module with a layer's experts and router, and the way the router scores
    (`engine.model.program.Experts`).
    """

    block: str = "mlp"
    router: str = "gate"
    shared: str | None = None
    """The MLP next to the experts; its linear layers are named like other layers' MLPs."""
    shared_gate: str | None = None
    score: Score = Score.SOFTMAX
    preferences: str | None = None
    is_exact: bool = False
    rounds: bool = True
    least_sum: float = 0.0
    factors: str | None = None
    norms: ExpertNormNames | None = None


def _attention(output: str = "o_proj", **names: Any) -> MixerNames:
    return MixerNames(MixerKind.ATTENTION, "self_attn", ("q_proj", "k_proj", "v_proj"), output, **names)


@dataclass(frozen=True)
class Family:
    """The names of a family's parts. Paths are relative to a layer, `final_norm` and `rotary` to the decoder;
    `epsilon`, `activation` and multipliers are configuration fields. No `rotary` means no rotation.
    """

    mixers: tuple[MixerNames, ...] = (_attention(),)
    beside: MixerNames | None = None
    """A second mixer of all layers. It reads the same rows, and both mixers' outputs are added."""
    input_norm: str = "input_layernorm"
    mlp_norm: str = "post_attention_layernorm"
    mixed_norm: str | None = None
    made_norm: str | None = None
    multiplier: str | None = None
    """The layer's buffer with the factor of its output."""
    query_norm: str = "self_attn.q_norm"
    key_norm: str = "self_attn.k_norm"
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"
    final_norm: str = "norm"
    rotary: str = "rotary_emb"
    is_half_rotary: bool = False
    """Whether the rotary embedding makes angles for half of the rotated dims."""
    epsilon: str = "rms_norm_eps"
    norms: NormKind = NormKind.PLAIN
    activation: str = "hidden_act"
    is_gated: bool = True
    """Whether MLPs and experts have gates."""
    embedding_multiplier: str | None = None
    residual_multiplier: str | None = None
    head_multiplier: str | None = None
    logits_divisor: str | None = None
    output_multipliers: Mapping[str, str] = field(default_factory=dict)
    """The layer's attributes with factors of linear layers' outputs, by the linear layers' paths."""
    is_blocks: bool = False
    """Whether a layer is either one mixer or one MLP, with one norm."""
    routing: RoutingNames | None = None

    def mixers_of(self, layer: nn.Module) -> list[MixerNames]:
        block = getattr(layer, "block_type", None)
        found = (mixer for mixer in self.mixers if getattr(layer, mixer.path, None) is not None)
        main = next((mixer for mixer in found if mixer.block in (None, block)), None)
        return [mixer for mixer in (main, self.beside) if mixer is not None]

    def routing_of(self, layer: nn.Module) -> RoutingNames | None:
        """Return the layer's routing, or None for a layer without experts."""
        if self.routing is None:
            return None
        block = getattr(layer, self.routing.block, None) if self.routing.block else layer
        return self.routing if hasattr(block, "experts") else None


LLAMA = Family()
GRANITE = Family(
    embedding_multiplier="embedding_multiplier",
    residual_multiplier="residual_multiplier",
    logits_divisor="logits_scaling",
)
MAMBA = MixerNames(MixerKind.STATE_SPACE, "mamba", ("in_proj",), "out_proj")
LATENTS = MixerNames(
    MixerKind.LATENT, "self_attn", ("q_proj", "q_a_proj", "kv_a_proj_with_mqa"), output="o_proj"
)
QWEN_ROUTING = RoutingNames(shared="mlp.shared_expert", shared_gate="shared_expert_gate")
DEEPSEEK_ROUTING = RoutingNames(
    shared="mlp.shared_experts",
    score=Score.SIGMOID,
    preferences="gate.e_score_correction_bias",
    is_exact=True,
    rounds=False,
    least_sum=1e-20,
)
QWEN3_5 = Family(
    mixers=(
        _attention(),
        MixerNames(
            MixerKind.DELTA,
            "linear_attn",
            inputs=("in_proj_qkv", "in_proj_z"),
            gates=("in_proj_b", "in_proj_a"),
            output="out_proj",
        ),
    ),
    norms=NormKind.CENTRED,
)
QWEN3_NEXT = Family(
    mixers=(
        _attention(),
        MixerNames(
            MixerKind.DELTA,
            "linear_attn",
            inputs=("in_proj_qkvz",),
            gates=("in_proj_ba",),
            output="out_proj",
            is_interleaved=True,
        ),
    ),
    norms=NormKind.CENTRED,
    routing=QWEN_ROUTING,
)
LFM2 = Family(
    mixers=(
        _attention("out_proj"),
        MixerNames(MixerKind.SHORT_CONV, "conv", ("in_proj",), "out_proj", conv="conv"),
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
BAMBA = Family(
    mixers=(_attention(), MAMBA),
    mlp_norm="pre_ff_layernorm",
    gate_up=("feed_forward.gate_proj", "feed_forward.up_proj"),
    down="feed_forward.down_proj",
    final_norm="final_layernorm",
)
GEMMA4 = Family(
    mlp_norm="pre_feedforward_layernorm",
    mixed_norm="post_attention_layernorm",
    made_norm="post_feedforward_layernorm",
    multiplier="layer_scalar",
    norms=NormKind.EXACT,
    activation="hidden_activation",
    routing=RoutingNames(
        block="",
        router="router.proj",
        shared="mlp",
        rounds=False,
        factors="router.per_expert_scale",
        norms=ExpertNormNames(
            router="router.scale",
            read="pre_feedforward_layernorm_2",
            made="post_feedforward_layernorm_2",
            beside="post_feedforward_layernorm_1",
        ),
    ),
)
FAMILIES = {
    "Gemma3ForCausalLM": Family(
        mlp_norm="pre_feedforward_layernorm",
        mixed_norm="post_attention_layernorm",
        made_norm="post_feedforward_layernorm",
        norms=NormKind.CENTRED,
        activation="hidden_activation",
    ),
    "LlamaForCausalLM": LLAMA,
    "MistralForCausalLM": LLAMA,
    "Qwen2ForCausalLM": LLAMA,
    "Qwen3ForCausalLM": LLAMA,
    "MixtralForCausalLM": Family(routing=RoutingNames(rounds=False)),
    "Qwen2MoeForCausalLM": Family(routing=QWEN_ROUTING),
    "Qwen3MoeForCausalLM": Family(routing=RoutingNames()),
    "Qwen3NextForCausalLM": QWEN3_NEXT,
    "Qwen3_5ForCausalLM": QWEN3_5,
    "Qwen3_5MoeForCausalLM": replace(QWEN3_5, routing=QWEN_ROUTING),
    "Lfm2ForCausalLM": LFM2,
    "Lfm2MoeForCausalLM": replace(
        LFM2,
        rotary="pos_emb",
        routing=RoutingNames("feed_forward", score=Score.SIGMOID, preferences="expert_bias", least_sum=1e-6),
    ),
    "BambaForCausalLM": BAMBA,
    "FalconH1ForCausalLM": replace(
        BAMBA,
        mixers=(_attention(input_multiplier="attention_in_multiplier"),),
        beside=replace(MAMBA, input_multiplier="mamba.ssm_in_multiplier"),
        embedding_multiplier="embedding_multiplier",
        head_multiplier="lm_head_multiplier",
        output_multipliers={
            "self_attn.k_proj": "self_attn.key_multiplier",
            "self_attn.o_proj": "attn_out_multiplier",
            "mamba.in_proj": "mamba.mup_vector",
            "mamba.out_proj": "ssm_out_multiplier",
            "feed_forward.gate_proj": "feed_forward.gate_multiplier",
            "feed_forward.down_proj": "feed_forward.down_multiplier",
        },
    ),
    "Gemma4ForCausalLM": GEMMA4,
    "Gemma4UnifiedForCausalLM": GEMMA4,
    "GptOssForCausalLM": Family(
        is_half_rotary=True,
        norms=NormKind.EXACT,
        routing=RoutingNames(router="router", score=Score.CHOSEN_SOFTMAX),
    ),
    "GraniteForCausalLM": GRANITE,
    "GraniteMoeHybridForCausalLM": replace(
        GRANITE,
        mixers=(_attention(), MAMBA),
        gate_up=("shared_mlp.input_linear",),
        down="shared_mlp.output_linear",
        routing=RoutingNames("block_sparse_moe", "router", shared="shared_mlp"),
    ),
    "NemotronHForCausalLM": Family(
        mixers=(
            replace(_attention(), path="mixer", block="full_attention"),
            replace(MAMBA, path="mixer", block="linear_attention"),
        ),
        input_norm="norm",
        mlp_norm="norm",
        gate_up=("mixer.up_proj",),
        down="mixer.down_proj",
        final_norm="norm_f",
        epsilon="layer_norm_epsilon",
        norms=NormKind.EXACT,
        activation="mlp_hidden_act",
        is_gated=False,
        is_blocks=True,
        routing=replace(DEEPSEEK_ROUTING, block="mixer", shared="mixer.shared_experts"),
    ),
    "DeepseekV3ForCausalLM": Family(mixers=(LATENTS,), routing=DEEPSEEK_ROUTING),
    "KimiLinearForCausalLM": Family(
        mixers=(
            MixerNames(
                MixerKind.CHANNEL_DELTA,
                "self_attn",
                inputs=("q_proj", "k_proj", "v_proj"),
                gates=("b_proj", "forget_gate.f_a_proj", "g_a_proj"),
                output="o_proj",
                norm="o_norm",
                block="linear_attention",
                low_rank=("forget_gate.f_b_proj", "g_b_proj"),
                decays="forget_gate",
            ),
            replace(LATENTS, block="full_attention"),
        ),
        routing=DEEPSEEK_ROUTING,
    ),
}
"""The families by the model's class."""
_ROUTERS = {
    family.routing.router.partition(".")[0] for family in FAMILIES.values() if family.routing is not None
}
"""The names that modules which choose experts have in any family."""


def is_never_rounded(path: str) -> bool:
    """Return whether the linear layer at this path belongs to a router, whose rounding would choose other
    experts. Its name tells, in models that the table lacks, too.
    """
    return not _ROUTERS.isdisjoint(path.split("."))
