"""Training of EAGLE-3 and MTP heads: they learn, and serving drafts what training unrolled."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from protocol.errors import ConfigError
from speculation.eagle import MidLayer
from tests.e2e.architectures import VOCAB_SIZE, write_model
from tests.speculation import eagle_files as files
from tests.speculation.eagle_engine import Watched
from tests.training.recorded import assert_drafts_as_trained, continued, hidden_states, learned
from training.heads.contract import HeadOptions, Target
from training.heads.eagle import LARGEST_SHARE, Eagle3Training, _shape, build_eagle3, captured_layers
from training.heads.mtp import build_mtp

OFFICIAL = {
    "fc.weight",
    "norm.weight",
    "d2t",
    "t2d",
    *(f"midlayer.{norm}.weight" for norm in ("hidden_norm", "input_layernorm", "post_attention_layernorm")),
    *(f"midlayer.self_attn.{name}_proj.weight" for name in "qkvo"),
    *(f"midlayer.mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    files.write_target(folder)
    return folder


@pytest.fixture(scope="module")
def target(folder: Path) -> Target:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval().requires_grad_(False)
    return Target("tiny", model, torch.arange(files.VOCAB).flip(0))


def small(target: Target, own_lm_head: bool = False, depth: int = 3) -> Eagle3Training:
    torch.manual_seed(0)
    built = build_eagle3(target, HeadOptions(draft_vocab_size=100))
    head = Eagle3Training(target, built._shape, depth, own_lm_head)
    for parameter in head.module.parameters():
        if parameter.ndim == 2 and parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.3)
    return head


def windows(target: Target, count: int = 4, length: int = 24) -> tuple[Tensor, Tensor]:
    """Return windows of the target's own greedy text."""
    starts = torch.randint(1, files.VOCAB, (count, 4), generator=torch.Generator().manual_seed(1))
    token_ids = continued(target, starts, length - 4)
    return token_ids, hidden_states(target, token_ids, small(target).hidden_layers)


@pytest.mark.parametrize("own_lm_head", [False, True])
def test_serving_drafts_the_same_as_training(
    own_lm_head: bool, folder: Path, target: Target, tmp_path: Path
) -> None:
    head = small(target, own_lm_head)
    head.save(tmp_path)
    assert set(load_file(tmp_path / "model.safetensors")) == OFFICIAL | (
        {"lm_head.weight"} if own_lm_head else set()
    )
    watched = Watched(folder, tmp_path, num_tokens=3)
    watched.ask("a", [5, 17, 99, 3, 42, 8, 120, 33, 7, 61, 2], 12)
    watched.run()
    assert_drafts_as_trained(watched, head, target)


def test_draft_does_not_look_at_later_tokens(target: Target) -> None:
    head = small(target)
    token_ids, hidden = windows(target)
    whole = head.draft(token_ids, hidden, torch.arange(22))
    for place in range(22):
        cut = slice(place + 2)
        alone = head.draft(token_ids[:, cut], hidden[:, cut], torch.tensor([place]))
        assert torch.equal(whole[:, place], alone[:, 0])


def test_loss_is_the_cross_entropy_where_the_target_agrees_with_the_text(target: Target) -> None:
    """Compares with chains that are unrolled one by one, for text that the target only partly predicts."""
    head = small(target, depth=3)
    token_ids, _ = windows(target, count=2, length=12)
    token_ids[0, 6] = (token_ids[0, 6] + 1) % files.VOCAB
    hidden = hidden_states(target, token_ids, head.hidden_layers)
    teacher = target.logits(hidden[..., -files.WIDTH :], target.lm_head(head.draft_ids))
    said = head.draft_ids[teacher.argmax(-1)]
    sums, counts = [0.0] * 3, [0] * 3
    for window in range(2):
        for place in range(11):
            chain = _forced_logits(head, token_ids[window], hidden[window], place)
            for step, logits in enumerate(chain):
                at = place + 1 + step
                if at >= 12 or place % 2**step:
                    continue
                if all(said[window, n] == token_ids[window, n + 1] for n in range(place + 1, at)):
                    sums[step] -= float((teacher[window, at].softmax(-1) * logits.log_softmax(-1)).sum())
                    counts[step] += 1
    assert 0 < counts[2] < counts[1] < counts[0] - 2
    steps = [total / count * 0.8**step for step, (total, count) in enumerate(zip(sums, counts, strict=True))]
    expected = sum(steps) / (1 + 0.8 + 0.8**2)
    assert head.loss(token_ids, hidden).item() == pytest.approx(expected, rel=1e-4)


@torch.no_grad()
def _forced_logits(head: Eagle3Training, token_ids: Tensor, hidden: Tensor, place: int) -> list[Tensor]:
    """Return each step's logits from one place, with the text's tokens and only the rows up to that place."""
    features = hidden[None, : place + 2, : head._shape.feature_size]
    later = torch.cat([token_ids, token_ids.new_zeros(4)])
    steps = head._unroll(features, lambda _, step, __: later[None, 1 + step : place + 2 + step], stride=1)
    return [head._logits(scored[0, place]) for _, scored in steps]


def test_training_makes_the_head_agree_with_the_target(target: Target) -> None:
    torch.manual_seed(0)
    head = build_eagle3(target, HeadOptions(draft_vocab_size=files.VOCAB))
    token_ids, hidden = windows(target, count=8)
    places = torch.arange(4, 20)

    def agreement() -> float:
        drafted = head.draft(token_ids, hidden, places)[..., 0]
        return (drafted == token_ids[:, places + 2]).float().mean().item()

    before = agreement()
    learned(head, token_ids, hidden, 80)
    assert agreement() > before + 0.3


def test_saved_token_maps_have_the_official_layout(target: Target, tmp_path: Path) -> None:
    head = small(target)
    head.save(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    most_frequent = target.token_counts.argsort(descending=True)[:100].sort().values
    assert torch.equal(torch.arange(100) + tensors["d2t"], most_frequent)
    assert torch.equal(tensors["t2d"].nonzero()[:, 0], most_frequent)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (
            LlamaConfig(num_key_value_heads=8, vocab_size=128_256),
            (32, 8, 11008),
        ),  # 7B: a layer of its own size
        (
            LlamaConfig(
                vocab_size=4096,
                hidden_size=384,
                intermediate_size=1024,
                num_hidden_layers=4,
                num_attention_heads=6,
                num_key_value_heads=2,
            ),
            (2, 1, 256),
        ),
    ],
)
def test_a_head_is_a_small_part_of_its_target(config: LlamaConfig, expected: tuple[int, int, int]) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    room = model.num_parameters() * LARGEST_SHARE
    shape = _shape(Target("a", model, torch.ones(config.vocab_size)), 4000, room)
    assert (shape.num_heads, shape.num_kv_heads, shape.intermediate_size) == expected
    with torch.device("meta"):
        layer = MidLayer(shape)
    size = sum(p.numel() for part in (layer.self_attn, layer.mlp) for p in part.parameters())
    assert size + shape.feature_size * shape.hidden_size <= 1.05 * room


@pytest.mark.parametrize(
    ("num_layers", "captured"),
    [(1, (0, 1)), (2, (0, 1, 2)), (3, (0, 1, 2)), (4, (1, 2, 3)), (8, (2, 4, 5)), (32, (2, 16, 29))],
)
def test_the_last_layer_is_not_captured_where_others_are_there(
    num_layers: int, captured: tuple[int, ...]
) -> None:
    """Capturing it would compute more rows of the last layer than the logits need."""
    assert captured_layers(num_layers) == captured


def test_a_vocabulary_that_does_not_fit(target: Target) -> None:
    with pytest.raises(ConfigError, match=r"--draft-vocab-size: 200 exceeds the model's 160 tokens"):
        build_eagle3(target, HeadOptions(draft_vocab_size=200))


def target_of(folder: Path) -> Target:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval().requires_grad_(False)
    return Target("tiny", model, torch.arange(VOCAB_SIZE))


@pytest.mark.parametrize(
    ("model_type", "name"), [("qwen3_5_text", "mtp.fc"), ("llama", "mtp_layers.0.input_proj")]
)
def test_serving_drafts_by_mtp_heads_the_same_as_training(model_type: str, name: str, tmp_path: Path) -> None:
    write_model(model_type, tmp_path / "target")
    target = target_of(tmp_path / "target")
    torch.manual_seed(0)
    head = build_mtp(target, HeadOptions(depth=3))
    for parameter in head.module.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    head.save(tmp_path / "head")
    with safe_open(tmp_path / "head" / "model.safetensors", "pt") as file:
        assert f"{name}.weight" in file.keys()  # noqa: SIM118
    watched = Watched(tmp_path / "target", tmp_path / "head", num_tokens=3, method="mtp")
    watched.ask("a", [5, 17, 99, 3, 42, 8, 20, 33, 7, 61, 2], 10)
    watched.run()
    assert_drafts_as_trained(watched, head, target)


def test_an_mtp_head_learns(tmp_path: Path) -> None:
    write_model("qwen3_5_text", tmp_path)
    target = target_of(tmp_path)
    torch.manual_seed(0)
    head = build_mtp(target, HeadOptions(depth=2))
    prompts = torch.randint(1, VOCAB_SIZE, (4, 4), generator=torch.Generator().manual_seed(1))
    token_ids = continued(target, prompts, 20)
    hidden = hidden_states(target, token_ids, head.hidden_layers)
    losses = learned(head, token_ids, hidden, 20)
    assert losses[-1] < losses[0] - 0.5
