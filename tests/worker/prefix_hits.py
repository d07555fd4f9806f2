"""A chat of several turns with drafts of one method: tokens that turns find cached, and accepted drafts.

`python -m tests.worker.prefix_hits` prints the table of docs/speculation.md.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import forkserver
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from protocol.requests import EngineRequest
from protocol.sampling import SamplingParams
from protocol.speculation import RequestSpeculation, SpeculativeConfig
from tests.e2e.architectures import VOCAB_SIZE, write_model
from tests.speculation.dflash_files import dflash
from tests.speculation.methods import ALLOWED
from tests.speculation.mtp_files import write_head
from tests.speculation.small_engine import prompt_of, write_noisy
from tests.worker.harness import Cluster, RunningWorker, tiny_config
from tests.worker.tiny_model import load
from training.heads.contract import HeadOptions, Target
from training.heads.eagle import build_eagle3
from training.heads.medusa import build_medusa

FAMILIES = {
    "Llama": ("llama", {}),
    "hybrid (Qwen3.5)": ("qwen3_5_text", {}),
    "windows (Gemma 3)": ("gemma3_text", {"num_hidden_layers": 4}),
}
DRAFTERS = ("draft_model", "eagle", "medusa", "mtp", "dflash", "self_speculative")
WEIGHTLESS = ("ngram", "suffix", "lookahead")
"""Methods that a request may ask for on any server; here on that of self-speculation."""
COMPILED = ("eagle", "mtp", "dflash")
"""Methods whose heads would be compiled for Gemma."""
PLACES = ("colocated", "split", "moved")
"""On the decode worker; prefilled by the other one; from the third turn on with KV from the other."""
TURNS, SAID, ANSWERED = 5, 37, 24
NUM_DRAFTED = 3


@dataclass
class Chat:
    """The tokens that turns found cached, the answers, and how many drafts had how many tokens accepted."""

    cached: list[int] = field(default_factory=list)
    answers: list[list[int]] = field(default_factory=list)
    accepted: Counter[int] = field(default_factory=Counter)

    def acceptance(self) -> list[float]:
        """Return the share of drafts whose token at each position was accepted, with all before it."""
        drafts = sum(self.accepted.values()) or 1
        return [
            sum(count for length, count in self.accepted.items() if length > position) / drafts
            for position in range(NUM_DRAFTED)
        ]


def write_family(name: str, folder: Path) -> dict[str, Path]:
    """Write a tiny model and what drafts for it, by method. Heads draft some of the few allowed tokens."""
    model_type, changes = FAMILIES[name]
    target = folder / "target"
    write_model(model_type, target, **changes)
    write_noisy(target, folder / "draft_model")
    model, all_tokens = load(target), torch.ones(VOCAB_SIZE)
    few = torch.zeros(VOCAB_SIZE).index_fill(0, torch.tensor(ALLOWED), 1)
    torch.manual_seed(0)
    options = HeadOptions(draft_vocab_size=len(ALLOWED))
    build_eagle3(Target("tiny", model, few), options).save(folder / "eagle")
    build_medusa(Target("tiny", model, all_tokens), HeadOptions(depth=NUM_DRAFTED)).save(folder / "medusa")
    dflash("f", width=model.config.hidden_size, captured=(1,), ids=torch.tensor(ALLOWED)).write(
        folder / "dflash"
    )
    write_head(target, folder / "mtp")
    return {name: folder / name for name in ("target", *DRAFTERS[:-1])}


@contextmanager
def workers(
    family: dict[str, Path], method: Any, **options: Any
) -> Iterator[tuple[Cluster, list[RunningWorker]]]:
    """Start a prefill worker and a decode worker that draft by a method."""
    options |= {"model": str(family[method])} if method in family else {"skip_layers": [1]}
    speculative = SpeculativeConfig(method=method, num_speculative_tokens=NUM_DRAFTED, **options)
    compile = "off" if method in COMPILED else "auto"
    limits = {"block_size": 16, "max_num_seqs": 4, "compile": compile}
    config = tiny_config(family["target"], speculative_config=speculative, **limits)
    with Cluster() as cluster:
        yield cluster, list(cluster.start_pair(config))


def chat(cluster: Cluster, running: list[RunningWorker], method: Any, place: str, turns: int) -> Chat:
    """Have a chat with drafts by `method`, or "none"; a salt of its own lets it share no KV with others."""
    prefill, decode = running
    speculation = RequestSpeculation(enabled=method != "none", method=None if method == "none" else method)
    found, history = Chat(), list[int]()
    for turn in range(turns):
        history += prompt_of(SAID, turn, VOCAB_SIZE)
        params = SamplingParams(
            max_tokens=ANSWERED, temperature=0.0, ignore_eos=True, allowed_token_ids=ALLOWED
        )
        name = f"{method}/{place}/{turn}"
        asked = EngineRequest(
            request_id=name,
            prompt_token_ids=list(history),
            sampling=params,
            cache_salt=f"{method}/{place}",
            speculation=speculation,
        )
        if place == "split":
            cluster.generate(prefill, asked, decode.address)
        elif place == "moved" and turn < 2:
            cluster.generate(prefill, asked)
        else:
            cluster.generate(decode, asked, prefix=prefill.address if place == "moved" else None)
        cluster.run(name)
        outputs = [output for _, output in cluster.outputs[name]]
        found.cached.append(next(each.cached_tokens for each in outputs if each.cached_tokens is not None))
        found.accepted.update(each.accepted_tokens for each in outputs if each.drafted_tokens)
        found.answers.append(cluster.tokens(name))
        history += found.answers[-1]
    return found


def chats(
    family: dict[str, Path], method: str, turns: int = TURNS, **options: Any
) -> dict[str, dict[str, Chat]]:
    """Return chats without drafts, by the method and (the last one) by those without weights."""
    methods = ["none", method, *(WEIGHTLESS if method == DRAFTERS[-1] else ())]
    with workers(family, method, **options) as (cluster, running):
        return {
            name: {place: chat(cluster, running, name, place, turns) for place in PLACES} for name in methods
        }


def main() -> None:
    forkserver.set_forkserver_preload(["tests.forked"])
    rows: dict[str, list[str]] = {}
    for name in FAMILIES:
        with TemporaryDirectory() as folder:
            family = write_family(name, Path(folder))
            for method in DRAFTERS:
                for drafter, by_place in chats(family, method).items():
                    cached = ", ".join(f"{sum(by_place[place].cached)} {place}" for place in PLACES)
                    print(f"{name}, {drafter}: {cached} tokens cached", flush=True)
                    if drafter != "none":
                        rows.setdefault(drafter, []).append(_rates(by_place))
    print(f"| method | {' | '.join(FAMILIES)} |")
    print(f"|---|{'---|' * len(FAMILIES)}")
    for drafter, cells in rows.items():
        print(f"| `{drafter}` | {' | '.join(cells)} |")


def _rates(by_place: dict[str, Chat]) -> str:
    """Return the acceptance by position: once, or for each place where they differ."""
    rates = {place: " ".join(f"{rate:.0%}" for rate in chat.acceptance()) for place, chat in by_place.items()}
    if len({*rates.values()}) == 1:
        return rates["colocated"]
    return ", ".join(f"{place} {rate}" for place, rate in rates.items())


if __name__ == "__main__":
    main()
