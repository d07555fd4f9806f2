"""Distills the target into the draft: the draft learns the target's whole next-token distribution on the
corpus.

The loss is KL(target || draft) at temperature 1 (Hinton et al., 2015). A draft has to predict the target,
not the text, and a distribution carries more information per token than one next token does.
"""

import argparse
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

from models.training.loop import add_arguments, run
from models.training.shapes import export
from native.build import own_inductor_cache


def distillation_loss(
    draft: LlamaForCausalLM, target_logits: torch.Tensor, ids: torch.Tensor
) -> torch.Tensor:
    """Mean KL divergence (nats) of the draft from the target over `ids` `[windows, length]`."""
    draft_log = draft(input_ids=ids, use_cache=False).logits.float().log_softmax(-1)
    target_log = target_logits.float().log_softmax(-1)
    return (target_log.exp() * (target_log - draft_log)).sum(-1).mean()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", type=Path, help="the trained target's folder")
    parser.add_argument("draft", type=Path, help="the draft's folder, trained on text; receives the weights")
    add_arguments(parser)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    tokenizer = Tokenizer.from_file(str(arguments.draft / "tokenizer.json"))
    target = LlamaForCausalLM.from_pretrained(arguments.target, dtype=torch.bfloat16)
    draft = LlamaForCausalLM.from_pretrained(arguments.draft, dtype=torch.bfloat16).train()
    own_inductor_cache()
    teach = torch.compile(lambda ids: target(input_ids=ids, use_cache=False).logits, dynamic=False)
    learn = torch.compile(distillation_loss, dynamic=False)

    def loss(tokens: torch.Tensor) -> torch.Tensor:
        ids = tokens[:, :-1].contiguous()
        with torch.no_grad():
            logits = teach(ids)
        return learn(draft, logits, ids)

    run(draft, loss, tokenizer, arguments)
    export(draft, arguments.draft)


if __name__ == "__main__":
    main()
