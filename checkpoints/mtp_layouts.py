"""How published checkpoints name the tensors of their MTP heads.

All share the formula of DeepSeek-V3 (2024), section 2.2. A row has the embedding of a token and the target's
hidden state before it, taken after the target's final norm. Both are normed, `joint` makes one vector of the
two, and a decoder layer of the target's own kind and a final norm follow. The target's LM head scores the
output, which is also the hidden state before the next row.

Some servers put zeros for the first row's token, others do not. Here it is as any other's.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

NUMBER = "{number}"
"""Stands for the numbers of a head's decoder layers, where it has several."""
_LAYERS = "{layers}"
"""Stands for the target's number of layers."""


@dataclass(frozen=True)
class Layout:
    """The names of a head's parts. `block` is the prefix of its decoder layer's tensors, of which some are
    `renamed` to what the target's layers call them. `joint` multiplies the token's half of its input first,
    or last with `hidden_first`.
    """

    block: str
    joint: str
    token_norm: str
    hidden_norm: str
    final_norm: str | None
    hidden_first: bool = False
    renamed: Mapping[str, str] = field(default_factory=dict)

    def of(self, num_layers: int) -> Layout:
        """Return the layout for a target of so many layers."""
        filled = {
            name: value.replace(_LAYERS, str(num_layers))
            for name, value in vars(self).items()
            if isinstance(value, str)
        }
        return replace(self, **filled)  # type: ignore[arg-type]

    @property
    def parts(self) -> dict[str, str]:
        """The names of the parts that are not of the decoder layer, by those that they get here."""
        names = {"joint": self.joint, "token_norm": self.token_norm, "hidden_norm": self.hidden_norm}
        return names if self.final_norm is None else names | {"final_norm": self.final_norm}

    def fits(self, names: Collection[str]) -> bool:
        return all(f"{part}.weight" in names for part in self.parts.values())


def _beside(block: str, final_norm: str, **changed: str) -> Layout:
    """Return a layout whose parts lie beside those of the decoder layer."""
    names = {"joint": "eh_proj", "token_norm": "enorm", "hidden_norm": "hnorm"} | changed
    joint, token_norm, hidden_norm = (block + names[part] for part in ("joint", "token_norm", "hidden_norm"))
    return Layout(block, joint, token_norm, hidden_norm, block + final_norm)


_LONG_NAMES = {"joint": "input_proj", "token_norm": "token_layernorm", "hidden_norm": "hidden_layernorm"}

LAYOUTS = {
    "Qwen3-Next, Qwen3.5": Layout(
        "mtp.layers.0.", "mtp.fc", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm"
    ),
    "DeepSeek V3, GLM-4.5": _beside("model.layers.{layers}.", "shared_head.norm"),
    "Hy 3": _beside("model.layers.{layers}.", "final_layernorm"),
    "MiMo": replace(_beside("model.mtp_layers.0.", "final_layernorm", **_LONG_NAMES), hidden_first=True),
    "MiMo V2": replace(
        _beside("model.mtp.layers.0.", "final_layernorm"),
        renamed={
            "pre_mlp_layernorm": "post_attention_layernorm",
            "self_attn.attention_sink_bias": "self_attn.sinks",
        },
    ),
    "Ernie 4.5": Layout(
        "model.mtp_block.0.",
        "model.mtp_linear_proj.0",
        "model.mtp_emb_norm.0",
        "model.mtp_hidden_norm.0",
        final_norm=None,
    ),
    "Nemotron 3": Layout(
        "mtp.layers.{number}.",
        "mtp.layers.0.eh_proj",
        "mtp.layers.0.enorm",
        "mtp.layers.0.hnorm",
        "mtp.layers.1.final_layernorm",
    ),
    "Speculators": _beside("mtp_layers.0.", "final_layernorm", **_LONG_NAMES),
}
"""By the families that have published them. A checkpoint has the first that fits its tensors' names."""


def find_layout(names: Collection[str], num_layers: int) -> Layout:
    """Return the layout of a checkpoint with tensors of these names. Raises LookupError with the reason."""
    layouts = [layout.of(num_layers) for layout in LAYOUTS.values()]
    for layout in layouts:
        if layout.fits(names):
            return layout
    looked = ", ".join(dict.fromkeys(f"{layout.joint}.weight" for layout in layouts))
    raise LookupError(f"its checkpoint has no MTP head: none of {looked}")
