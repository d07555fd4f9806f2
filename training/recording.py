"""Recordings of a frozen model's tokens and hidden states on disk, from one run over texts, for training.

The engine computes them with its own kernels, and appends the model's greedy answers to prompts.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

import torch
from torch import Tensor

from engine.engine import Engine
from engine.step.scheduler import ScheduledStep
from engine.step.speculation_interface import Speculator
from protocol.config import ServeConfig
from protocol.errors import ConfigError, TandemError
from protocol.requests import EngineRequest
from protocol.sampling import SamplingParams
from training.loop import check_same_run
from training.output import make_folder, only_run, write_json

Device = Literal["auto", "cpu", "cuda"]
AT_ONCE = 32
"""Number of texts in a batch."""
LONGEST_PIECE = 1024
"""The most tokens of a text that are recorded as one sequence; longer texts are cut."""


@dataclass(frozen=True)
class SourceText:
    """A text to record. The model continues it by up to `answer_tokens` tokens."""

    token_ids: list[int]
    answer_tokens: int = 0
    ignores_end: bool = False
    """Whether the answer has `answer_tokens` even if the model would end it."""


@dataclass(frozen=True)
class Recorded:
    """A recorded text: tokens int64 [length], hidden states bfloat16 [length, width]. The first
    `prompt_length` tokens were given, the others are the model's answer.
    """

    token_ids: Tensor
    hidden: Tensor
    prompt_length: int


class Recording:
    """Texts in a folder: `tokens` (int32), `hidden` (bfloat16, one row for each token), and `index.jsonl`,
    which names each complete text's number, prompt length and length.
    """

    def __init__(self, folder: Path, width: int, most_bytes: int, settings: Mapping[str, Any]) -> None:
        """Open or begin a recording. Raises `ConfigError` if the folder has one with other settings."""
        self.width = width
        self._folder = folder
        self._most = most_bytes
        make_folder(folder)
        path = folder / "settings.json"
        if path.exists():
            check_same_run(folder, json.loads(path.read_text()), settings)
        else:
            write_json(path, settings)
        self._index = folder / "index.jsonl"
        lines = self._index.read_text().split("\n")[:-1] if self._index.exists() else []
        self._index_bytes = sum(len(line) + 1 for line in lines)
        self._entries: list[tuple[int, int, int]] = [tuple(json.loads(line)) for line in lines]
        self.num_tokens = sum(length for _, _, length in self._entries)

    @property
    def num_texts(self) -> int:
        return len(self._entries)

    @property
    def numbers(self) -> set[int]:
        """The numbers of the complete texts."""
        return {number for number, _, _ in self._entries}

    @property
    def is_full(self) -> bool:
        return self.num_tokens * self.width * 2 >= self._most

    def add(self, texts: Iterator[tuple[int, Recorded]], report: Callable[[int, int], None]) -> None:
        """Append texts until the recording is full. Call `report` with the numbers of texts and tokens.

        Raises `TandemError` if the disk is full, or if another run adds to it. The next call cuts off what is
        there of an incomplete text.
        """
        names = "tokens", "hidden", self._index.name
        sizes = 4 * self.num_tokens, 2 * self.width * self.num_tokens, self._index_bytes
        try:
            with ExitStack() as opened:
                opened.enter_context(only_run(self._folder, "--recording"))
                files = [opened.enter_context((self._folder / name).open("ab")) for name in names]
                for file, size in zip(files, sizes, strict=True):
                    file.truncate(size)
                while not self.is_full and (entry := next(texts, None)) is not None:
                    self._append(*entry, files)
                    report(self.num_texts, self.num_tokens)
        except OSError as error:
            raise TandemError(f"{self._folder} cannot be written: {error.strerror}") from error

    def _append(self, number: int, text: Recorded, files: Sequence[BinaryIO]) -> None:
        entry = (number, text.prompt_length, len(text.token_ids))
        hidden = text.hidden.view(torch.uint8).numpy().tobytes()
        line = json.dumps(entry).encode() + b"\n"
        for file, content in zip(files, (text.token_ids.int().numpy().tobytes(), hidden, line), strict=True):
            file.write(content)
            file.flush()
        self._index_bytes += len(line)
        self._entries.append(entry)
        self.num_tokens += len(text.token_ids)

    @property
    def tokens(self) -> Tensor:
        """Return the tokens of all texts, int32, memory-mapped."""
        return self._map("tokens", torch.int32, self.num_tokens)

    @property
    def hidden(self) -> Tensor:
        """Return the hidden states of all texts, bfloat16 [tokens, width], memory-mapped."""
        return self._map("hidden", torch.bfloat16, self.num_tokens * self.width).view(-1, self.width)

    def _map(self, name: str, dtype: torch.dtype, size: int) -> Tensor:
        path = str(self._folder / name)
        return torch.from_file(path, shared=False, size=size, dtype=dtype)

    def __iter__(self) -> Iterator[Recorded]:
        start, tokens, hidden = 0, self.tokens, self.hidden
        for _, prompt_length, length in self._entries:
            part = slice(start, start + length)
            yield Recorded(tokens[part].long(), hidden[part], prompt_length)
            start += length

    def token_counts(self, vocab_size: int) -> Tensor:
        """Count the tokens that heads will draft: all tokens of answers, or of texts without answers."""
        answers = [text.token_ids[text.prompt_length :] for text in self]
        drafted = torch.cat(answers)
        return torch.bincount(drafted if len(drafted) else self.tokens.long(), minlength=vocab_size)


def digest(pieces: Sequence[SourceText]) -> str:
    """Return a hash of the pieces to record."""
    content = json.dumps([[piece.token_ids, piece.answer_tokens, piece.ignores_end] for piece in pieces])
    return hashlib.blake2b(content.encode(), digest_size=8).hexdigest()


def check_room(folder: Path, pieces: Sequence[SourceText], width: int, most_bytes: int) -> None:
    """Raise `ConfigError` if the disk cannot hold the recording."""
    tokens = sum(len(piece.token_ids) + piece.answer_tokens for piece in pieces)
    needed = min(tokens * (4 + 2 * width), most_bytes)
    make_folder(folder)
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise ConfigError(
            f"--recording: {tokens:,} tokens' hidden states take up to {needed / 2**30:.1f} GiB; {folder} "
            f"has {free / 2**30:.1f} GiB free. Give less data, another folder, or a lower --recording-gib"
        )


def answer(
    model: str, device: Device, layers: tuple[int, ...], pieces: Sequence[tuple[int, SourceText]]
) -> Iterator[tuple[int, Recorded]]:
    """Yield each piece's number with its recording, which has the model's greedy answer and the hidden states
    of `layers`, as they finish. An answer's last token has no hidden state, so it is left out.
    """
    recorder = Recorder(layers)
    engine = Engine(_engine_config(model, device, pieces), speculate=lambda config, loaded: recorder)
    running: dict[str, tuple[SourceText, list[int]]] = {}
    waiting = iter(pieces)
    while True:
        while len(running) < AT_ONCE and (entry := next(waiting, None)):
            engine.add(_request(*entry))
            running[str(entry[0])] = entry[1], [*entry[1].token_ids]
        if not running:
            return
        for output in engine.step().outputs:
            piece, token_ids = running[output.request_id]
            token_ids += output.token_ids
            if output.error is not None:
                raise RuntimeError(f"{model}: text {output.request_id}: {output.error}")
            if output.finish_reason is not None:
                del running[output.request_id]
                hidden = recorder.take(output.request_id, len(token_ids) - 1)
                text = Recorded(torch.tensor(token_ids[:-1]), hidden, len(piece.token_ids))
                yield int(output.request_id), text


def _engine_config(model: str, device: Device, pieces: Sequence[tuple[int, SourceText]]) -> ServeConfig:
    """Return a configuration without a prefix cache, since the hidden states of all tokens are recorded."""
    longest = max(len(piece.token_ids) + max(1, piece.answer_tokens) for _, piece in pieces)
    return ServeConfig(
        model=model,
        device=device,
        max_model_len=longest,
        max_num_seqs=AT_ONCE,
        enable_prefix_caching=False,
    )


def _request(number: int, piece: SourceText) -> EngineRequest:
    sampling = SamplingParams(
        max_tokens=max(1, piece.answer_tokens), temperature=0.0, ignore_eos=piece.ignores_end
    )
    return EngineRequest(
        request_id=str(number), prompt_token_ids=piece.token_ids, sampling=sampling, timeout_s=math.inf
    )


class Recorder(Speculator):
    """A speculator that drafts nothing and keeps the hidden states of all computed tokens."""

    def __init__(self, hidden_layers: tuple[int, ...]) -> None:
        self.hidden_layers = hidden_layers
        self._rows: dict[str, list[tuple[int, Tensor]]] = {}

    def take(self, request_id: str, count: int) -> Tensor:
        """Return the hidden states of the first `count` tokens of a finished request, bfloat16."""
        parts = self._rows.pop(request_id)
        hidden = parts[0][1].new_empty((count, parts[0][1].shape[1]))
        for start, rows in parts:
            hidden[start : start + len(rows)] = rows
        return hidden

    def finish(self, step: ScheduledStep, hidden: Tensor | None) -> None:
        assert hidden is not None
        rows = hidden.to("cpu", torch.bfloat16)
        first = 0
        for sequence, outcome in zip(step.sequences, step.outcomes, strict=True):
            parts = self._rows.setdefault(sequence.request_id, [])
            parts.append((outcome.start, rows[first : first + outcome.num_tokens]))
            first += outcome.num_rows

    def prepare(self, *_: object) -> bool:
        return True

    def may_go_ahead(self, *_: object) -> bool:
        return False
