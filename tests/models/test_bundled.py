"""The bundled models: target, draft model, draft heads and hybrid."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen3_5ForCausalLM,
)

from deploy.config import load_config
from engine.engine import Engine
from models.training.shapes import hybrid_config
from models.training.train import begin
from protocol.config import ServeConfig
from protocol.errors import ConfigError
from protocol.requests import EngineRequest
from protocol.sampling import SamplingParams
from protocol.speculation import SpeculativeConfig
from speculation.speculator import BatchSpeculator

MODELS = Path(__file__).parents[2] / "models"
TARGET, DRAFT = MODELS / "tandem-code-10m", MODELS / "tandem-code-1m"
HYBRID, MEDUSA = MODELS / "tandem-code-10m-hybrid", MODELS / "tandem-code-10m-medusa"
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
def held_out() -> list[dict[str, str]]:
    return [json.loads(line) for line in (MODELS / "heldout_prompts.jsonl").read_text("utf-8").splitlines()]


@torch.no_grad()
def logits(model: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    return model(input_ids=torch.tensor([ids])).logits[0]


def bits_per_byte(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> float:
    nats = size = 0.0
    for text in texts:
        ids = [tokenizer.bos_token_id, *tokenizer(text).input_ids]
        nats += float(last_losses(model, ids, len(ids) - 1).sum())
        size += len(text.encode())
    return nats / math.log(2) / size


def last_losses(model: PreTrainedModel, ids: list[int], count: int) -> torch.Tensor:
    found = logits(model, ids[:-1])[-count:]
    return torch.nn.functional.cross_entropy(found, torch.tensor(ids[-count:]), reduction="none")


def config_of(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


def test_files_fit_in_the_repository(tokenizer: PreTrainedTokenizerBase) -> None:
    folders = (TARGET, DRAFT, HYBRID, MEDUSA)
    target, draft, hybrid, medusa = ((folder / "model.safetensors").stat().st_size for folder in folders)
    assert target + draft < 30_000_000 and hybrid < 21_000_000 and medusa < 2 << 20
    assert {config_of(folder)["dtype"] for folder in (TARGET, DRAFT)} == {"bfloat16"}
    assert len({(folder / "tokenizer.json").read_bytes() for folder in (TARGET, DRAFT, HYBRID)}) == 1
    assert (len(tokenizer), tokenizer.eos_token, tokenizer.bos_token) == (4096, *["<|endoftext|>"] * 2)
    assert tokenizer.pad_token == "<|pad|>"


def test_shapes(target: PreTrainedModel) -> None:
    config = target.config
    assert 8e6 < target.num_parameters() < 12e6
    assert (config.vocab_size, config.max_position_embeddings, config.head_dim % 16) == (4096, CONTEXT, 0)
    assert config.num_key_value_heads < config.num_attention_heads
    assert config_of(HYBRID)["layer_types"] == ["linear_attention"] * 3 + ["full_attention"]
    heads = config_of(MEDUSA)
    assert len(heads["rank_acceptance"]) == heads["num_heads"] >= 3


@pytest.mark.parametrize("text", TRICKY)
def test_tokenizer_round_trip(tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_held_out_bits_per_byte_and_agreement(
    target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, held_out: list[dict[str, str]]
) -> None:
    draft, hybrid = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval() for folder in (DRAFT, HYBRID)
    )
    texts = [entry["prompt"] + entry["continuation"] for entry in held_out[::12]]
    of_target, of_draft, of_hybrid = (
        bits_per_byte(model, tokenizer, texts) for model in (target, draft, hybrid)
    )
    # A model that knows nothing would need 12 bits for each token of 3.5 bytes.
    assert of_target < 1.5 and of_hybrid < 1.5
    assert of_target < of_draft < 1.7
    same = [
        logits(target, ids).argmax(-1) == logits(draft, ids).argmax(-1) for ids in tokenizer(texts).input_ids
    ]
    assert torch.cat(same).float().mean() > 0.55


def test_the_end_of_the_context_is_as_good_as_its_start(
    target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, held_out: list[dict[str, str]]
) -> None:
    ids = tokenizer("\n\n".join(entry["prompt"] for entry in held_out)).input_ids
    windows = [ids[start : start + CONTEXT + 1] for start in range(0, 4 * CONTEXT, CONTEXT)]
    late = torch.cat([last_losses(target, window, 256) for window in windows])
    early = torch.cat([last_losses(target, window[-321:], 256) for window in windows])
    assert late.mean() < 1.05 * early.mean(), (late.mean(), early.mean())


NUM_PROMPTS = 4
NUM_TOKENS = 48


@pytest.fixture(scope="module")
def requests() -> list[EngineRequest]:
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    lines = (MODELS / "heldout_prompts.jsonl").read_text("utf-8").splitlines()[:NUM_PROMPTS]
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
    prompts = [tokenizer(json.loads(line)["prompt"])["input_ids"] for line in lines]
    return [
        EngineRequest(request_id=str(number), prompt_token_ids=prompt, sampling=params)
        for number, prompt in enumerate(prompts)
    ]


def generate(
    requests: list[EngineRequest], speculative: SpeculativeConfig | None, model: Path = TARGET
) -> tuple[list[list[int]], float]:
    """Return the outputs, and the mean number of tokens per step."""
    config = ServeConfig(model=str(model), dtype="float32", device="cpu")
    config = replace(config, max_num_seqs=NUM_PROMPTS, kv_cache_memory_bytes=32 << 20)
    config = replace(config, speculative_config=speculative)
    engine = Engine(config, speculate=BatchSpeculator if speculative is not None else None)
    tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
    steps = 0
    for request in requests:
        engine.add(request)
    while engine.has_work():
        for output in engine.step().outputs:
            tokens[output.request_id] += output.token_ids
            steps += 1
    return list(tokens.values()), sum(map(len, tokens.values())) / steps


HEADS: dict[str, tuple[Path, dict[str, Any], float]] = {
    "medusa": (TARGET, {"model": str(MEDUSA), "tree": False, "num_speculative_tokens": 3}, 1.2),
    "medusa's trees": (TARGET, {"model": str(MEDUSA), "tree": True, "num_speculative_tokens": 16}, 1.3),
    "mtp": (HYBRID, {"model": str(HYBRID) + "-mtp", "num_speculative_tokens": 3}, 2.0),
}
"""The model, the options of its heads, and the least tokens per step."""


@pytest.mark.parametrize("name", HEADS)
def test_heads_speed_up_decoding_and_change_no_token(requests: list[EngineRequest], name: str) -> None:
    model, options, least = HEADS[name]
    plain, _ = generate(requests, None, model)
    method: Any = name.partition("'")[0]
    speculated, per_step = generate(requests, SpeculativeConfig(method=method, **options), model)
    assert speculated == plain
    assert per_step > least


def test_the_pairs_draft_drafts_for_the_hybrid() -> None:
    flags = {"model": HYBRID.name, "speculative_config": '{"method": "draft_model"}'}
    config = load_config(flags, {}).speculative_config
    assert config is not None
    assert config.model == str(MODELS / "tandem-code-1m")
    config = load_config(flags | {"speculative_config": '{"method": "mtp"}'}, {}).speculative_config
    assert config is not None
    assert config.model == str(MODELS / "tandem-code-10m-hybrid-mtp")
    assert (Path(config.model) / "model.safetensors").stat().st_size < 2_200_000
    with pytest.raises(ConfigError, match="model: the method eagle needs one"):
        load_config(flags | {"speculative_config": '{"method": "eagle"}'}, {})


def test_the_hybrid_begins_with_the_targets_weights() -> None:
    """Compares the logits of one token, whose attention does not depend on the norms of queries and keys."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    torch.manual_seed(0)
    target = LlamaForCausalLM(LlamaConfig(**sizes, **heads)).eval()
    for parameter in target.parameters():
        torch.nn.init.normal_(parameter, 1.0 if parameter.ndim == 1 else 0.0, 0.3)
    config = hybrid_config()
    config.update(sizes | heads | {"layer_types": ["linear_attention", "full_attention"], "dtype": "float32"})
    hybrid = Qwen3_5ForCausalLM(config).eval()
    begin(target, hybrid)
    target.model.layers[0].self_attn.o_proj.weight.data.zero_()  # the delta net in its place adds nothing
    token = torch.tensor([[7]])
    with torch.no_grad():
        expected, found = (model(input_ids=token).logits for model in (target, hybrid))
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
