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
    assert of_target < 1.4
    assert of_target < of_draft < 2.0


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
    assert agreed / total > 0.5


def test_positions_up_to_the_context_are_trained(
    target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, held_out: list[dict[str, str]]
) -> None:
    ids = tokenizer("\n\n".join(entry["prompt"] for entry in held_out[:12])).input_ids[: CONTEXT + 1]
    assert len(ids) == CONTEXT + 1
    losses = torch.nn.functional.cross_entropy(
        logits(target, ids[:-1]), torch.tensor(ids[1:]), reduction="none"
    )
    assert losses[-256:].mean() < 1.2 * losses[256:512].mean()
