"""The tensor names of published checkpoints' MTP heads.

All heads share the formula of DeepSeek-V3 (2024), section 2.2. A head's row has the embedding of a token and
the previous position's hidden state. Both are normed, `joint` makes one vector of the two, and a decoder
layer of the target's own kind and a final norm follow. The LM head scores the output.

The first head's hidden states are the target's, after its final norm. Each further head has its own layer and
reads the previous head's output.

Some servers zero the first row's token embedding, others do not. Here the first row is like any other.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

NUMBER = "{number}"
"""Placeholder for the number of a decoder layer within a head that has several."""
_HEAD, _LAYER = "{head}", "{layer}"
"""Placeholders for a head's number, and for its layer number, counted on after the target's layers."""


@dataclass(frozen=True)
class HeadLayout:
    """The names of a head's parts. `block` is the prefix of its decoder layer's tensors; `renamed` maps some
    of them to the target layers' names. The input of `joint` is the token's half, then the hidden state's;
    the reverse with `hidden_first`. `lm_head` is None where the target's LM head scores.
    """

    block: str
    joint: str
    token_norm: str
    hidden_norm: str
    final_norm: str | None
    lm_head: str | None = None
    hidden_first: bool = False
    reads_target: bool = False
    """Whether further heads also read the target's hidden states."""
    before_norm: bool = False
    """Whether the head reads the target's hidden states from before the final norm."""
    renamed: Mapping[str, str] = field(default_factory=dict)

    def of(self, num_layers: int, head: int = 0) -> HeadLayout:
        """Return the layout of head `head` of a target with `num_layers` layers."""
        filled = {
            name: value.replace(_HEAD, str(head)).replace(_LAYER, str(num_layers + head))
            for name, value in vars(self).items()
            if isinstance(value, str)
        }
        return replace(self, **filled)  # type: ignore[arg-type]

    @property
    def parts(self) -> dict[str, str]:
        """The checkpoint's names of the parts outside the decoder layer, by field of this class."""
        names = ("joint", "token_norm", "hidden_norm", "final_norm", "lm_head")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

    def fits(self, names: Collection[str]) -> bool:
        return all(f"{part}.weight" in names for part in self.parts.values())


def _beside(block: str, final_norm: str, **changed: str) -> HeadLayout:
    """Return a layout in which all parts have the decoder layer's prefix."""
    names = {"joint": "eh_proj", "token_norm": "enorm", "hidden_norm": "hnorm"} | changed
    joint, token_norm, hidden_norm = (block + names[part] for part in ("joint", "token_norm", "hidden_norm"))
    return HeadLayout(block, joint, token_norm, hidden_norm, block + final_norm)


_LONG_NAMES = {"joint": "input_proj", "token_norm": "token_layernorm", "hidden_norm": "hidden_layernorm"}
_BEHIND = "model.layers.{layer}."

LAYOUTS = {
    "Qwen3-Next, Qwen3.5": HeadLayout(
        "mtp.layers.{head}.", "mtp.fc", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm"
    ),
    "DeepSeek V3, GLM-4.5": _beside(_BEHIND, "shared_head.norm"),
    "Step 3.5": replace(
        _beside(_BEHIND, "transformer.shared_head.norm"),
        lm_head=f"{_BEHIND}transformer.shared_head.output",
        before_norm=True,
    ),
    "Hy 3": _beside(_BEHIND, "final_layernorm"),
    "MiMo": replace(_beside("model.mtp_layers.{head}.", "final_layernorm", **_LONG_NAMES), hidden_first=True),
    "MiMo V2": replace(
        _beside("model.mtp.layers.{head}.", "final_layernorm"),
        reads_target=True,
        before_norm=True,
        renamed={
            "pre_mlp_layernorm": "post_attention_layernorm",
            "self_attn.attention_sink_bias": "self_attn.sinks",
        },
    ),
    "Ernie 4.5": HeadLayout(
        "model.mtp_block.{head}.",
        "model.mtp_linear_proj.{head}",
        "model.mtp_emb_norm.{head}",
        "model.mtp_hidden_norm.{head}",
        final_norm=None,
    ),
    "Nemotron 3": HeadLayout(
        "mtp.layers.{number}.",
        "mtp.layers.0.eh_proj",
        "mtp.layers.0.enorm",
        "mtp.layers.0.hnorm",
        "mtp.layers.1.final_layernorm",
    ),
    "Speculators": _beside("mtp_layers.{head}.", "final_layernorm", **_LONG_NAMES),
}
"""The layouts by family. A checkpoint's layout is the first that fits its tensor names."""


def find_layouts(names: Collection[str], num_layers: int) -> list[HeadLayout]:
    """Return the layouts of a checkpoint's heads, found by its tensor `names`, in drafting order. Raises
    LookupError with the reason.
    """
    for layout in LAYOUTS.values():
        found = [layout.of(num_layers)]
        if not found[0].fits(names):
            continue
        while (head := layout.of(num_layers, len(found))).block != found[-1].block:
            if not head.fits(names) or not any(name.startswith(head.block) for name in names):
                break
            found.append(head)
        return found
    looked = ", ".join(dict.fromkeys(f"{layout.of(num_layers).joint}.weight" for layout in LAYOUTS.values()))
    raise LookupError(f"its checkpoint has no MTP head: none of {looked}")
