"""Initializes the hybrid from the target's weights, for further training.

New parameters are the gated delta nets, which add nothing to the hidden states at first, and the norms of
queries and keys and the gate of the hybrid's attention; the gate is half open at first.
"""

import argparse
from pathlib import Path

import torch
from transformers import LlamaForCausalLM, Qwen3_5ForCausalLM

from models.training.shapes import export, hybrid_config


@torch.no_grad()
def begin(target: LlamaForCausalLM, hybrid: Qwen3_5ForCausalLM) -> None:
    """Copy the target's weights into `hybrid`, a model of the same width and depth."""
    hybrid.get_input_embeddings().weight.copy_(target.get_input_embeddings().weight)
    hybrid.lm_head.weight.copy_(target.lm_head.weight)
    norms = [(hybrid.model.norm, target.model.norm)]
    for ours, theirs in zip(hybrid.model.layers, target.model.layers, strict=True):
        ours.mlp.load_state_dict(theirs.mlp.state_dict())
        norms += [(getattr(ours, name), getattr(theirs, name)) for name in _NORMS]
        if hasattr(ours, "self_attn"):
            _copy_attention(ours.self_attn, theirs.self_attn)
        else:
            ours.linear_attn.out_proj.weight.zero_()
    for norm, known in norms:
        norm.weight.copy_(known.weight - 1)  # the hybrid multiplies by 1 plus this weight


_NORMS = ("input_layernorm", "post_attention_layernorm")


def _copy_attention(ours: torch.nn.Module, theirs: torch.nn.Module) -> None:
    for name in ("k_proj", "v_proj"):
        getattr(ours, name).weight.copy_(getattr(theirs, name).weight)
    query = theirs.q_proj.weight.unflatten(0, (-1, theirs.head_dim))
    ours.q_proj.weight.copy_(torch.cat([query, torch.zeros_like(query)], 1).flatten(0, 1))
    ours.o_proj.weight.copy_(2 * theirs.o_proj.weight)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", type=Path, help="the trained target's folder")
    parser.add_argument("hybrid", type=Path, help="the hybrid's folder: receives the weights")
    parser.add_argument("--seed", type=int, default=0, help="of the new weights")
    arguments = parser.parse_args()
    torch.manual_seed(arguments.seed)
    hybrid = Qwen3_5ForCausalLM(hybrid_config())
    begin(LlamaForCausalLM.from_pretrained(arguments.target, dtype=torch.float32), hybrid)
    export(hybrid, arguments.hybrid)


if __name__ == "__main__":
    main()
