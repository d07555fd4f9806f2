"""Measures the pair on held-out files: bits per byte of both, and how often their argmax agrees."""

import argparse
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from models.training.corpus import SourceFile, held_out_files
from models.training.shapes import CONTEXT


@dataclass
class Tally:
    """Sums over predicted tokens. The models' losses are in nats."""

    tokens: int = 0
    bytes: int = 0
    target_nats: float = 0.0
    draft_nats: float = 0.0
    target_right: int = 0
    draft_right: int = 0
    agreed: int = 0
    overlap: float = 0.0

    def report(self) -> dict[str, float]:
        """Return the figures for the model card."""
        nats = self.bytes * math.log(2)
        return {
            "held_out_tokens": self.tokens,
            "held_out_bytes": self.bytes,
            "target_bits_per_byte": round(self.target_nats / nats, 4),
            "draft_bits_per_byte": round(self.draft_nats / nats, 4),
            "target_top1_accuracy": round(self.target_right / self.tokens, 4),
            "draft_top1_accuracy": round(self.draft_right / self.tokens, 4),
            "argmax_agreement": round(self.agreed / self.tokens, 4),
            "distribution_overlap": round(self.overlap / self.tokens, 4),
        }


def windows(files: list[SourceFile], tokenizer: PreTrainedTokenizerBase) -> Iterator[torch.Tensor]:
    """Cut each file, end-of-text first, into `[1, n]` windows of up to CONTEXT + 1 that overlap by one."""
    for file in files:
        ids = [tokenizer.bos_token_id, *tokenizer(file.text, verbose=False).input_ids]
        for start in range(0, len(ids) - 1, CONTEXT):
            yield torch.tensor([ids[start : start + CONTEXT + 1]])


@torch.no_grad()
def measure(target: PreTrainedModel, draft: PreTrainedModel, tokens: torch.Tensor, tally: Tally) -> None:
    """Add the figures of one window, `[1, n + 1]`, to the tally, except for its bytes."""
    ids, labels = tokens[:, :-1], tokens[0, 1:]
    target_log = target(input_ids=ids, use_cache=False).logits[0].float().log_softmax(-1)
    draft_log = draft(input_ids=ids, use_cache=False).logits[0].float().log_softmax(-1)
    tally.tokens += len(labels)
    tally.target_nats -= target_log.gather(1, labels[:, None]).sum().item()
    tally.draft_nats -= draft_log.gather(1, labels[:, None]).sum().item()
    target_best, draft_best = target_log.argmax(-1), draft_log.argmax(-1)
    tally.target_right += int((target_best == labels).sum())
    tally.draft_right += int((draft_best == labels).sum())
    tally.agreed += int((target_best == draft_best).sum())
    tally.overlap += torch.minimum(target_log.exp(), draft_log.exp()).sum().item()


def sample(
    target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: str, temperature: float
) -> str:
    """Complete `prompt` with up to 96 tokens."""
    inputs = tokenizer(prompt, return_tensors="pt")
    kind = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
    output = target.generate(**inputs, max_new_tokens=96, **kind)
    return str(tokenizer.decode(output[0]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", type=Path)
    parser.add_argument("draft", type=Path)
    parser.add_argument("--files", type=int, help="only that many held-out files, evenly spaced")
    parser.add_argument("--prompt", action="append", default=[], help="also print completions of this")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(arguments.target)
    target = AutoModelForCausalLM.from_pretrained(arguments.target, dtype=torch.bfloat16).eval()
    draft = AutoModelForCausalLM.from_pretrained(arguments.draft, dtype=torch.bfloat16).eval()
    files = held_out_files()
    if arguments.files:
        files = files[:: max(1, len(files) // arguments.files)]
    tally = Tally(bytes=sum(len(file.text.encode()) for file in files))
    for tokens in windows(files, tokenizer):
        measure(target, draft, tokens, tally)
    counts = {"target_parameters": target.num_parameters(), "draft_parameters": draft.num_parameters()}
    print(json.dumps(counts | {"held_out_files": len(files)} | tally.report(), indent=2))
    for prompt in arguments.prompt:
        for temperature in (0.0, 0.7):
            print(f"--- temperature {temperature}\n{sample(target, tokenizer, prompt, temperature)}")


if __name__ == "__main__":
    main()
