"""The training loop that both models share: warm-up, stable rate, linear decay; checkpoints; resuming.

The forward and backward passes run in bf16, the optimizers on fp32 master weights. The learning rate is
constant after the warm-up and falls linearly to zero over the last `--decay-steps`, in which windows grow to
the model's whole context. Until the decay starts a run doesn't depend on its length, so `--resume` may change
`--steps`.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

from models.training.corpus import Windows, encode, training_texts
from models.training.optimizer import MasterWeights
from models.training.shapes import CONTEXT, END_OF_TEXT_ID
from models.training.texts import read_texts

Loss = Callable[[torch.Tensor], torch.Tensor]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `run`."""
    parser.add_argument("--texts", type=Path, help="JSONL of texts to learn from, if not the corpus's files")
    parser.add_argument("--state", type=Path, required=True, help="file for checkpoints (safetensors)")
    parser.add_argument("--resume", action="store_true", help="continue from --state")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--decay-steps", type=int, required=True, help="last steps, of falling learning rate")
    parser.add_argument("--warmup-steps", type=int, default=40)
    parser.add_argument("--batch-tokens", type=int, default=4096, help="tokens in a step")
    parser.add_argument("--micro-tokens", type=int, default=4096, help="tokens in a forward")
    parser.add_argument("--length", type=int, default=256, help="tokens in a window before the decay")
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--save-every", type=int, default=100, help="steps between checkpoints")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)


def window_shape(step: int, arguments: argparse.Namespace) -> tuple[int, int]:
    """Return (windows, length) of a step: the same number of tokens in every step."""
    length = CONTEXT if step >= arguments.steps - arguments.decay_steps else arguments.length
    return arguments.batch_tokens // length, length


def learning_rate_scale(step: int, arguments: argparse.Namespace) -> float:
    """Warm-up, stable, linear decay: the factor in (0, 1] on the learning rate at `step`."""
    warm = (step + 1) / arguments.warmup_steps
    cool = (arguments.steps - step) / max(1, arguments.decay_steps)
    return min(1.0, warm, cool)


def run(
    model: LlamaForCausalLM, loss_function: Loss, tokenizer: Tokenizer, arguments: argparse.Namespace
) -> None:
    """Train the bf16 `model` in place on `loss_function(tokens [windows, length + 1])`, a mean in nats."""
    documents = encode(tokenizer, read_texts(arguments.texts) if arguments.texts else training_texts())
    windows = Windows(documents, END_OF_TEXT_ID, arguments.seed)
    masters = MasterWeights(model, arguments.learning_rate)
    first = masters.load(arguments.state, model) if arguments.resume else 0
    for step in range(first):
        windows.next(*window_shape(step, arguments))

    started = time.monotonic()
    for step in range(first, arguments.steps):
        tokens = torch.from_numpy(windows.next(*window_shape(step, arguments)))
        micros = tokens.split(max(1, arguments.micro_tokens // (tokens.shape[1] - 1)))
        total = 0.0
        for micro in micros:
            loss = loss_function(micro) / len(micros)
            loss.backward()  # type: ignore[no-untyped-call]
            masters.take_gradients(model)
            total += loss.item()
        masters.step(model, learning_rate_scale(step, arguments))
        done = step + 1
        if done % 10 == 0:
            rate = (done - first) * arguments.batch_tokens / (time.monotonic() - started)
            print(f"step {done} epoch {windows.epoch} loss {total:.4f} {rate:.0f} tokens/s", flush=True)
        if done % arguments.save_every == 0 or done == arguments.steps:
            masters.save(arguments.state, done)
