"""Training of heads: checkpoints and held-out acceptance; Medusa heads from the command line to serving."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from typer.testing import CliRunner

from deploy.cli import app
from engine.engine import Engine
from protocol.errors import ConfigError, TandemError
from protocol.speculation import Method
from speculation.medusa import read_heads
from tests.full_disk import full_disk
from tests.speculation.small_engine import ask, drafted_and_accepted, drafting, run, small_config, tokens
from tests.speculation.tiny_trained import VOCAB_SIZE, write_text
from tests.training.recorded import continued, hidden_states
from training.data import Windows
from training.heads.command import head_schedule
from training.heads.contract import HeadLearner, HeadOptions, Target, acceptance
from training.heads.medusa import MedusaTraining, build_medusa
from training.loop import Schedule, Trainer
from training.recording import Recorded, Recording

LENGTH, BATCH, STEPS = 24, 4, 8


@pytest.fixture(scope="module")
def model(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder).eval().requires_grad_(False)


@pytest.fixture(scope="module")
def target(model: PreTrainedModel) -> Target:
    return Target("tiny", model, torch.arange(VOCAB_SIZE))


@pytest.fixture(scope="module")
def recording(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Recording:
    """Return a recording of random text with the last layer's hidden states."""
    generator = torch.Generator().manual_seed(0)
    texts = torch.randint(0, VOCAB_SIZE, (10, 200), generator=generator)
    made = Recording(tmp_path_factory.mktemp("recording"), target.hidden_size, 2**20, {})
    hidden = hidden_states(target, texts, (2,)).bfloat16()
    made.add(((n, Recorded(texts[n], hidden[n], 0)) for n in range(10)), lambda *_: None)
    return made


SETTINGS = {"data": "x", "steps": STEPS, "options": {}}


def trainer_of(recording: Recording, head: Any, target: Target, checkpoint: Path, **changes: Any) -> Trainer:
    windows = Windows(recording.num_tokens, LENGTH, BATCH, 0)
    learner = HeadLearner(head, target, recording, windows, learning_rate=0.01)
    schedule = Schedule(STEPS, warm_up=1, decay=STEPS)
    return Trainer(learner, schedule, SETTINGS | changes, checkpoint, save_every_s=0.0)


# --- the loop ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", [{"steps": 9}, {"data": "y"}, {"options": {"depth": 3}}])
def test_a_checkpoint_of_another_run_is_refused(
    tmp_path: Path, target: Target, recording: Recording, change: dict[str, Any]
) -> None:
    seen: list[bool] = []
    head, checkpoint = build_medusa(target, HeadOptions(depth=1)), tmp_path / "c"
    trainer_of(recording, head, target, checkpoint).run(lambda _: seen.append(checkpoint.exists()))
    assert seen == [False] + [True] * (STEPS - 1)
    with pytest.raises(ConfigError, match=f"--output: .* is of a run with {next(iter(change))}"):
        trainer_of(recording, head, target, checkpoint, **change)


def test_the_learning_rate_rises_and_falls_to_0() -> None:
    schedule = head_schedule(100)
    scales = [schedule.scale(step) for step in range(100)]
    assert scales[4] == max(scales) == 1.0
    assert scales[0] == pytest.approx(0.2)
    assert scales[4:] == sorted(scales[4:], reverse=True)
    assert 0 < scales[-1] < 0.02


# --- held-out acceptance ----------------------------------------------------------------------------


class Foresight:
    """Drafts the target's own tokens except at `wrong`, from the tokens that a drafter may know."""

    hidden_layers = (2,)

    def __init__(self, target: Target, depth: int, wrong: int | None) -> None:
        self.module: nn.Module = nn.Linear(1, 1)
        self.depth = depth
        self._target = target
        self._wrong = wrong
        self.calibrated: list[int] = []

    def draft(self, token_ids: Tensor, hidden: Tensor, places: Tensor) -> Tensor:
        chains = [continued(self._target, token_ids[:, : p + 2], self.depth) for p in places.tolist()]
        drafts = torch.stack([chain[:, -self.depth :] for chain in chains], dim=1)
        if self._wrong is not None:
            drafts[..., self._wrong] += 1
        return drafts

    def calibrate(self, token_ids: Tensor, hidden: Tensor, places: Tensor) -> None:
        self.calibrated = places.tolist()


@pytest.fixture(scope="module")
def answers(target: Target) -> Tensor:
    """Return the target's greedy answers of 12 tokens to prompts of 10."""
    prompts = torch.randint(0, VOCAB_SIZE, (3, 10), generator=torch.Generator().manual_seed(4))
    return continued(target, prompts, 12)


@pytest.mark.parametrize(("wrong", "expected"), [(None, [1, 1, 1]), (0, [0, 0, 0]), (1, [1, 0, 0])])
def test_acceptance(target: Target, answers: Tensor, wrong: int | None, expected: list[float]) -> None:
    head = Foresight(target, 3, wrong)
    texts = [Recorded(text, torch.zeros(len(text), 1), 10) for text in answers]
    assert acceptance(head, texts) == expected
    assert head.calibrated == list(range(9, 18))
    short = Recorded(answers[0, :12], torch.zeros(12, 1), 10)
    with pytest.raises(ConfigError, match="--held-out: no answer has the 5 tokens"):
        acceptance(head, [short])


# --- Medusa -------------------------------------------------------------------------------------------


def plain_loss(head: MedusaTraining, target: Target, token_ids: Tensor, kept: Tensor) -> float:
    """Compute each head's cross-entropy with the target place by place, where the text is the target's."""
    logits = target.model(input_ids=token_ids).logits
    logits_kept = logits[..., kept]
    hidden = target.model(input_ids=token_ids, output_hidden_states=True).hidden_states[-1]
    blocks, lm_head = head.module.blocks, head.module.lm_heads[0].weight
    total = 0.0
    for number in range(head.depth):
        losses = []
        for window in range(len(token_ids)):
            for place in range(token_ids.shape[1] - 1 - number):
                between = range(place, place + number + 1)
                said = [kept[logits_kept[window, at].argmax()] for at in between]
                if any(said[i] != token_ids[window, at + 1] for i, at in enumerate(between)):
                    continue
                state = hidden[window, place]
                for layer in blocks[number].layers:
                    state = state + F.silu(layer.weight @ state)
                wanted = logits_kept[window, place + 1 + number].softmax(dim=-1)
                losses.append(-(wanted * (lm_head @ state).log_softmax(dim=-1)).sum().item())
        total += sum(losses) / max(1, len(losses))
    return total / head.depth


@pytest.mark.parametrize("draft_vocab_size", [None, 100])
def test_the_loss_counts_only_places_that_the_target_would_reach(
    target: Target, answers: Tensor, draft_vocab_size: int | None
) -> None:
    head = build_medusa(target, HeadOptions(depth=3, num_layers=2, draft_vocab_size=draft_vocab_size))
    for parameter in head.module.parameters():
        parameter.data.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(5)) * 0.1)
    token_ids = answers.clone()
    token_ids[:, 14] += 1  # the text sometimes differs from the target's choice
    hidden = hidden_states(target, token_ids, head.hidden_layers)
    kept = torch.arange(VOCAB_SIZE - (draft_vocab_size or VOCAB_SIZE), VOCAB_SIZE)  # counts ascend
    assert head.loss(token_ids, hidden).item() == pytest.approx(
        plain_loss(head, target, token_ids, kept), rel=1e-4
    )


def test_untrained_heads_repeat_the_targets_next_token(target: Target, answers: Tensor) -> None:
    head = build_medusa(target, HeadOptions(depth=2))
    hidden = hidden_states(target, answers, head.hidden_layers)
    places = torch.arange(9, 19)
    drafted = head.draft(answers, hidden, places)
    assert torch.equal(drafted, answers[:, places + 1].unsqueeze(-1).expand(-1, -1, 2))


def test_impossible_shapes_are_refused(target: Target) -> None:
    with pytest.raises(ConfigError, match="--draft-vocab-size: 258 exceeds the model's 257"):
        build_medusa(target, HeadOptions(draft_vocab_size=258))


@pytest.fixture(scope="module")
def trained(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Return heads trained by the command line, and the command's output."""
    root = tmp_path_factory.mktemp("trained")
    write_text(root / "texts")
    output = root / "heads"
    printed = CliRunner().invoke(app, command(folder, root / "texts", output))
    assert printed.exit_code == 0, printed.output
    return output, printed.output


def command(model: Path, data: Path, output: Path, *more: str) -> list[str]:
    fixed = ["speculate", "train", "--method", "medusa", "--depth", "3", "--device", "cpu"]
    where = ["--model", str(model), "--data", str(data), "--output", str(output)]
    size = ["--length", "128", "--batch-tokens", "512", "--steps", "12", "--learning-rate", "0.02"]
    return [*fixed, *where, *size, *more]


def test_the_command_reports_and_writes_a_card(trained: tuple[Path, str]) -> None:
    output, printed = trained
    rates = re.findall(r"\d+\.\d%", printed)
    assert len(rates) == 3
    card = (output / "README.md").read_text()
    assert all(f"| {number} | {rate} |" in card for number, rate in enumerate(rates, start=1))
    assert '"method": "medusa"' in card
    assert sorted(path.name for path in output.iterdir()) == ["README.md", "config.json", "model.safetensors"]


def test_trained_heads_are_in_vllms_layout_and_serve(trained: tuple[Path, str], folder: Path) -> None:
    output, _ = trained
    tensors = load_file(output / "model.safetensors")
    assert set(tensors) == {f"blocks.{head}.layers.0.weight" for head in range(3)} | {"lm_heads.0.weight"}
    config = json.loads((output / "config.json").read_text())
    assert (config["num_heads"], config["num_hidden_layers"], config["original_lm_head"]) == (3, 1, True)
    assert read_heads(str(output), 32, VOCAB_SIZE).rank_acceptance is not None
    assert_serve(folder, output, "medusa", tree=True)


def assert_serve(folder: Path, heads: Path, method: Method, **options: Any) -> None:
    """Check that these heads draft and change no token."""
    requests = [
        ask("r", list(range(30, 60)), 30, ignore_eos=True),
        ask("s", [9, 8, 7], 30, ignore_eos=True, temperature=0.7, seed=1),
    ]
    plain = run(Engine(small_config(folder)), requests)
    asked = {"method": method, "model": str(heads), "num_speculative_tokens": 3}
    found = run(drafting(small_config(folder), **asked, **options), requests)
    assert tokens(found) == tokens(plain)
    assert drafted_and_accepted(found)[0] > 0


def test_eagle3_heads_from_the_same_command_serve(folder: Path, tmp_path: Path) -> None:
    write_text(tmp_path / "texts")
    options = ["--method", "eagle3", "--draft-vocab-size", "100"]
    printed = CliRunner().invoke(app, command(folder, tmp_path / "texts", tmp_path / "heads", *options))
    assert printed.exit_code == 0, printed.output
    assert '"method": "eagle"' in (tmp_path / "heads" / "README.md").read_text()
    assert_serve(folder, tmp_path / "heads", "eagle")


def test_finished_heads_are_not_overwritten(trained: tuple[Path, str], folder: Path, tmp_path: Path) -> None:
    printed = CliRunner().invoke(app, command(folder, tmp_path, trained[0]))
    assert printed.exit_code == 2
    assert "has finished heads already" in printed.output


def test_other_files_are_not_overwritten(folder: Path, tmp_path: Path) -> None:
    """The command would write a README.md."""
    (tmp_path / "README.md").write_text("mine")
    printed = CliRunner().invoke(app, command(folder, tmp_path, tmp_path))
    assert printed.exit_code == 2
    assert "has other files already (README.md); choose another folder" in " ".join(printed.output.split())
    printed = CliRunner().invoke(app, command(folder, tmp_path, tmp_path / "README.md"))
    assert printed.exit_code == 2 and "README.md is a file" in " ".join(printed.output.split())


def test_a_recording_in_the_output_is_no_other_file(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "heads" / "rec").mkdir(parents=True)
    more = "--recording", str(tmp_path / "heads" / "rec")
    printed = CliRunner().invoke(app, command(folder, tmp_path / "nowhere", tmp_path / "heads", *more))
    assert printed.exit_code == 2 and "nowhere does not exist" in " ".join(printed.output.split())


def test_a_prompt_alone_is_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("one\n")
    given = ["--method", "medusa", "--model", str(folder), "--output", str(tmp_path / "heads")]
    printed = CliRunner().invoke(app, ["speculate", "train", *given, "--prompts", str(tmp_path / "one.txt")])
    assert printed.exit_code == 2
    assert "--prompts: has one prompt, and one is held out" in " ".join(printed.output.split())


def test_a_full_disk_is_named_and_its_training_resumes(
    trained: tuple[Path, str], folder: Path, tmp_path: Path
) -> None:
    texts, output = trained[0].parent / "texts", tmp_path / "heads"
    recording = ["--recording", str(tmp_path / "recording")]
    assert CliRunner().invoke(app, command(folder, texts, tmp_path / "other", *recording)).exit_code == 0
    with full_disk(50_000):
        stopped = CliRunner().invoke(app, command(folder, texts, output, *recording))
    assert stopped.exit_code == 1
    assert "checkpoint.safetensors cannot be written" in " ".join(stopped.output.split())
    printed = CliRunner().invoke(app, command(folder, texts, output, *recording))
    assert printed.exit_code == 0, printed.output
    whole, resumed = (load_file(path / "model.safetensors") for path in (trained[0], output))
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_the_command_resumes_from_a_checkpoint(
    trained: tuple[Path, str], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts, output = trained[0].parent / "texts", tmp_path / "heads"
    run_all = Trainer.run
    monkeypatch.setattr(Trainer, "run", lambda self, report: stop_after_five(run_all, self, report))
    stopped = CliRunner().invoke(app, command(folder, texts, output))
    assert isinstance(stopped.exception, Stopped)
    monkeypatch.undo()
    printed = CliRunner().invoke(app, command(folder, texts, output))
    assert printed.exit_code == 0, printed.output
    assert "going on from step 5" in printed.output
    whole, resumed = (load_file(path / "model.safetensors") for path in (trained[0], output))
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


@pytest.mark.parametrize("write", ["training.heads.command.write_text", "training.heads.contract.write_json"])
def test_a_run_that_ends_while_it_saves_is_resumed(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: str
) -> None:
    def full(path: Path, _: object) -> None:
        raise TandemError(f"{path} cannot be written")

    write_text(tmp_path / "texts")
    monkeypatch.setattr(write, full)
    stopped = CliRunner().invoke(app, command(folder, tmp_path / "texts", tmp_path / "heads"))
    assert stopped.exit_code == 1 and "cannot be written" in stopped.output
    monkeypatch.undo()
    printed = CliRunner().invoke(app, command(folder, tmp_path / "texts", tmp_path / "heads"))
    assert printed.exit_code == 0, printed.output
    names = {path.name for path in (tmp_path / "heads").iterdir()}
    assert names == {"README.md", "config.json", "model.safetensors"}


class Stopped(Exception):  # noqa: N818
    pass


def stop_after_five(run_all: Any, trainer: Trainer, report: Any) -> None:
    run_all(trainer, report, until=5)
    raise Stopped


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--data", "/nowhere"], "--data: /nowhere does not exist"),
        (["--model", "/nowhere"], "--model: there is no folder /nowhere"),
        (["--length", "100000"], "--length: 100000 exceeds the"),
        (["--depth", "17"], "--depth: at most 16 for medusa heads, got 17"),
        (["--method", "eagle3", "--depth", "33"], "--depth: at most 32 for eagle3 heads, got 33"),
        (["--method", "mtp", "--num-layers", "2"], "--num-layers: at most 1 for mtp heads, got 2"),
        (["--draft-vocab-size", "258"], "--draft-vocab-size: 258 exceeds the model's 257 tokens"),
        (["--length", "32", "--batch-tokens", "99999999"], "for training; a step takes 99999968, and"),
    ],
)
def test_bad_options_are_refused_before_texts_are_recorded(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: list[str], said: str
) -> None:
    monkeypatch.setattr("training.heads.command._record", lambda *_: pytest.fail("recorded"))
    write_text(tmp_path / "texts")
    printed = CliRunner().invoke(app, command(folder, tmp_path / "texts", tmp_path / "heads", *more))
    assert printed.exit_code == 2
    assert said in " ".join(printed.output.split())
