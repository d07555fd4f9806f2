"""Trains one of the models to predict the corpus's next token, from scratch or from given weights."""

import argparse
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, PreTrainedModel

from models.training.loop import add_arguments, run
from models.training.shapes import draft_config, export, hybrid_config, target_config
from native.build import own_inductor_cache

SHAPES = {"target": target_config, "draft": draft_config, "hybrid": hybrid_config}


def next_token_loss(model: PreTrainedModel, tokens: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy (nats) of `tokens` `[windows, length + 1]` under the model."""
    logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("folder", type=Path, help="model folder: holds the tokenizer, receives the weights")
    parser.add_argument("--init", type=Path, help="model folder with the weights to start from")
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
    dtype = getattr(torch, arguments.dtype)
    if arguments.init:
        model = AutoModelForCausalLM.from_pretrained(arguments.init, dtype=dtype).train()
    else:
        model = AutoModelForCausalLM.from_config(SHAPES[arguments.shape](), dtype=dtype)
    own_inductor_cache()
    compiled = torch.compile(next_token_loss, dynamic=False)
    run(model, lambda tokens: compiled(model, tokens), tokenizer, arguments)
    export(model, arguments.folder)


if __name__ == "__main__":
    main()
