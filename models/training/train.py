"""Trains one of the models, from scratch or from given weights: to predict the corpus's next token, or with
`--teacher` another model's whole distribution of it.

The loss is then KL(teacher || model) at temperature 1 (Hinton et al., 2015). A draft has to predict the
target, not the text; and a distribution has more information per token than a single next token.
"""

import argparse
from functools import partial
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, LlamaForCausalLM, PreTrainedModel, Qwen3_5ForCausalLM

from models.training.loop import Loss, add_arguments, run
from models.training.shapes import draft_config, export, hybrid_config, target_config
from native.build import own_inductor_cache

SHAPES = {"target": target_config, "draft": draft_config, "hybrid": hybrid_config}
_NORMS = ("input_layernorm", "post_attention_layernorm")


def next_token_loss(model: PreTrainedModel, tokens: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy (nats) of `tokens` `[windows, length + 1]` under the model."""
    logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def distillation_loss(model: PreTrainedModel, target_logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return the mean KL divergence (nats) of the model from the target over `ids` `[windows, length]`."""
    log_probs = model(input_ids=ids, use_cache=False).logits.float().log_softmax(-1)
    target_log = target_logits.float().log_softmax(-1)
    return (target_log.exp() * (target_log - log_probs)).sum(-1).mean()


@torch.no_grad()
def begin(target: LlamaForCausalLM, hybrid: Qwen3_5ForCausalLM) -> None:
    """Copy the target's weights into `hybrid`, a model of the same width and depth.

    New parameters are the gated delta nets, which initially add nothing to the hidden states, and in the
    attention the query and key norms and the gate, which is initially half open.
    """
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


def _copy_attention(ours: torch.nn.Module, theirs: torch.nn.Module) -> None:
    for name in ("k_proj", "v_proj"):
        getattr(ours, name).weight.copy_(getattr(theirs, name).weight)
    query = theirs.q_proj.weight.unflatten(0, (-1, theirs.head_dim))
    ours.q_proj.weight.copy_(torch.cat([query, torch.zeros_like(query)], 1).flatten(0, 1))
    ours.o_proj.weight.copy_(2 * theirs.o_proj.weight)


def _model(shape: str, init: Path | None, dtype: torch.dtype) -> PreTrainedModel:
    if init is None:
        return AutoModelForCausalLM.from_config(SHAPES[shape](), dtype=dtype)
    model = AutoModelForCausalLM.from_pretrained(init, dtype=dtype).train()
    if shape != "hybrid" or not isinstance(model, LlamaForCausalLM):
        return model
    hybrid = AutoModelForCausalLM.from_config(hybrid_config(), dtype=dtype)
    begin(model, hybrid)
    return hybrid


def _distillation(model: PreTrainedModel, teacher: Path) -> Loss:
    target = LlamaForCausalLM.from_pretrained(teacher, dtype=torch.bfloat16)
    teach = torch.compile(lambda ids: target(input_ids=ids, use_cache=False).logits, dynamic=False)
    learn = torch.compile(distillation_loss, dynamic=False)

    def loss(tokens: torch.Tensor) -> torch.Tensor:
        ids = tokens[:, :-1].contiguous()
        with torch.no_grad():
            logits = teach(ids)
        return learn(model, logits, ids)

    return loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("folder", type=Path, help="model folder: holds the tokenizer, receives the weights")
    parser.add_argument("--init", type=Path, help="model folder with the weights to start from")
    parser.add_argument("--teacher", type=Path, help="folder of the model to learn from instead of the text")
    parser.add_argument(
        "--dtype",
        choices=("bfloat16", "float32"),
        default="bfloat16",
        help="of a pass: what the CPU has units for",
    )
    add_arguments(parser)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    tokenizer = Tokenizer.from_file(str(arguments.folder / "tokenizer.json"))
    model = _model(arguments.shape, arguments.init, getattr(torch, arguments.dtype))
    own_inductor_cache()
    if arguments.teacher:
        loss = _distillation(model, arguments.teacher)
    else:
        compiled = torch.compile(next_token_loss, dynamic=False)
        loss = partial(compiled, model)
    run(model, loss, tokenizer, arguments)
    export(model, arguments.folder)


if __name__ == "__main__":
    main()
