"""The bundled pair: ordinary local models, small, with one lossless tokenizer, and they know Python."""

import json
import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

MODELS = Path(__file__).parents[2] / "models"
TARGET, DRAFT = MODELS / "tandem-code-10m", MODELS / "tandem-code-1m"
LIMIT_BYTES = 30_000_000
CONTEXT = 1024

TRICKY = [
    "",
    " ",
    "\n\n\t \r\n",
    "naïve café, Ελληνικά, русский, עברית, 日本語, 한국어",
    "👩‍👩‍👧‍👦 🏳️‍🌈 e\u0301 \u202e\ufeff\u2028",
    "\x00\x01\x7f\x80\xff\ufffd\U0010ffff",
    "".join(map(chr, range(0x300))),
    "def  f( a,b ) :\n\treturn  a  \n\n\n    #  trailing   \n",
    "1234567890 0xdeadbeef 3.14e-10",
    "x <|endoftext|> y <|pad|>",
]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(TARGET)


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def draft() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(DRAFT, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def held_out() -> list[dict[str, str]]:
    return [json.loads(line) for line in (MODELS / "heldout_prompts.jsonl").read_text("utf-8").splitlines()]


@torch.no_grad()
def logits(model: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    return model(input_ids=torch.tensor([ids])).logits[0]


def bits_per_byte(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> float:
    nats = size = 0.0
    for text in texts:
        ids = [tokenizer.bos_token_id, *tokenizer(text).input_ids]
        losses = torch.nn.functional.cross_entropy(
            logits(model, ids[:-1]), torch.tensor(ids[1:]), reduction="sum"
        )
        nats += losses.item()
        size += len(text.encode())
    return nats / math.log(2) / size


def test_both_fit_in_the_repository_and_are_bf16() -> None:
    weights = [*TARGET.glob("*.safetensors"), *DRAFT.glob("*.safetensors")]
    assert len(weights) == 2
    assert sum(path.stat().st_size for path in weights) < LIMIT_BYTES
    assert [json.loads((folder / "config.json").read_text())["dtype"] for folder in (TARGET, DRAFT)] == [
        "bfloat16",
        "bfloat16",
    ]


def test_shapes(target: PreTrainedModel, draft: PreTrainedModel) -> None:
    assert 8e6 < target.num_parameters() < 12e6
    assert 0.8e6 < draft.num_parameters() < 1.2e6
    for model in (target, draft):
        assert model.config.vocab_size == 4096
        assert model.config.max_position_embeddings == CONTEXT
        assert model.config.head_dim % 16 == 0
        assert model.config.num_key_value_heads < model.config.num_attention_heads


def test_the_tokenizers_are_one(tokenizer: PreTrainedTokenizerBase) -> None:
    assert (TARGET / "tokenizer.json").read_bytes() == (DRAFT / "tokenizer.json").read_bytes()
    assert len(tokenizer) == 4096
    assert tokenizer.eos_token == tokenizer.bos_token == "<|endoftext|>"
    assert tokenizer.pad_token == "<|pad|>"


@pytest.mark.parametrize("text", TRICKY)
def test_tokenizer_round_trip(tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_the_target_completes_python(target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    inputs = tokenizer("class Point:\n    def __init__(self", return_tensors="pt")
    output = target.generate(**inputs, max_new_tokens=24, do_sample=False)
    completion = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :])
    signature, _, body = completion.partition("):\n")
    assert signature.startswith(",") or not signature
    assert body.startswith("        self.")


def test_held_out_bits_per_byte(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    held_out: list[dict[str, str]],
) -> None:
    texts = [entry["prompt"] + entry["continuation"] for entry in held_out[::8]]
    of_target, of_draft = (bits_per_byte(model, tokenizer, texts) for model in (target, draft))
    # 12 bits for each token of 3.5 bytes is what a model that knows nothing would need.
    assert of_target < 1.5
    assert of_target < of_draft < 1.7


def test_the_draft_agrees_with_the_target(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    held_out: list[dict[str, str]],
) -> None:
    agreed = total = 0
    for entry in held_out[::8]:
        ids = tokenizer(entry["prompt"] + entry["continuation"]).input_ids
        same = logits(target, ids).argmax(-1) == logits(draft, ids).argmax(-1)
        agreed += int(same.sum())
        total += len(same)
    assert agreed / total > 0.55


def last_losses(model: PreTrainedModel, ids: list[int], count: int) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(
        logits(model, ids[:-1])[-count:], torch.tensor(ids[-count:]), reduction="none"
    )


def test_the_end_of_the_context_is_as_good_as_its_start(
    target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, held_out: list[dict[str, str]]
) -> None:
    ids = tokenizer("\n\n".join(entry["prompt"] for entry in held_out)).input_ids
    windows = [ids[start : start + CONTEXT + 1] for start in range(0, 4 * CONTEXT, CONTEXT)]
    late = torch.cat([last_losses(target, window, 256) for window in windows])
    early = torch.cat([last_losses(target, window[-321:], 256) for window in windows])
    assert late.mean() < 1.05 * early.mean(), (late.mean(), early.mean())
