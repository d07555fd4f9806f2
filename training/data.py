"""Loads the model, texts and prompts of a training, encodes them, and cuts them into windows."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from jinja2 import TemplateError
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from engine.load.loader import choose_device, choose_dtype
from protocol.errors import ConfigError

_TEXTS_AT_ONCE = 256


def load(kind: Any, model: str, **options: Any) -> Any:
    """Call `kind.from_pretrained`. Raises `ConfigError`."""
    try:
        return kind.from_pretrained(model, **options)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--model: cannot load {model!r}: {error}") from error


def load_frozen(model: str, device_name: str) -> PreTrainedModel:
    """Load a model for reading only, in the dtype in which its device serves it. Raises `ConfigError`."""
    device = choose_device(device_name)
    found: PreTrainedModel = load(AutoModelForCausalLM, model, dtype="auto")
    return found.to(device, choose_dtype("auto", found.config, device)).eval().requires_grad_(False)


def fast_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the dtype to compute in: without bfloat16 instructions float32 is five times as fast."""
    return torch.float32 if device.type == "cpu" and not _cpu_has_bfloat16() else dtype


@functools.cache
def _cpu_has_bfloat16() -> bool:
    return "avx512_bf16" in Path("/proc/cpuinfo").read_text()


def read_texts(path: Path, option: str = "--data") -> list[str]:
    """Return the texts of a file, of all UTF-8 files in a folder, or of the field "text" in each line of
    JSONL.

    They are sorted by hash, so that any part of the list is a fair sample. Raises `ConfigError` that names
    `option`, the file and the problem.
    """
    if not path.exists():
        raise ConfigError(f"{option}: {path} does not exist")
    if path.is_dir():
        texts = [text for file in sorted(path.rglob("*")) if file.is_file() for text in _try_file(file)]
    else:
        texts = list(_file_texts(path, option))
    if not any(text.strip() for text in texts):
        raise ConfigError(f"{option}: {path} has no text")
    return sorted(filter(str.strip, texts), key=_hash)


def _hash(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def _try_file(path: Path) -> Iterator[str]:
    """Yield the file's text, or nothing if it is not UTF-8."""
    try:
        yield from _file_texts(path, str(path))
    except ConfigError:
        return


def _file_texts(path: Path, option: str) -> Iterator[str]:
    content = _read(path, option)
    if path.suffix != ".jsonl":
        yield content
        return
    for number, line in enumerate(content.split("\n"), start=1):
        if line.strip():
            where = f"{option}: {path}, line {number}"
            text = _json_object(line, where).get("text")
            if not isinstance(text, str):
                raise ConfigError(f'{where}: has no string "text"')
            yield text


def _read(path: Path, option: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{option}: {path} cannot be read as UTF-8: {error}") from error


def _json_object(line: str, where: str) -> dict[str, Any]:
    try:
        entry = json.loads(line)
        json.dumps(entry, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"{where}: has half of a character, {error.object[error.start]!a}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: not JSON: {error}") from error
    return entry if isinstance(entry, dict) else {}


def read_prompts(path: Path, option: str, tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Return the tokens of each prompt: a line of a text, or the field "prompt" or "messages" of a line of
    JSONL. A model's chat template is applied. Prompts are sorted by hash, like texts. Raises `ConfigError`
    that names `option`, the line and the problem.
    """
    is_json = path.suffix == ".jsonl"
    found: dict[bytes, list[int]] = {}
    for number, line in enumerate(_read(path, option).split("\n"), start=1):
        if line.strip():
            where = f"{option}: {path}, line {number}"
            prompt = _prompt_of(_json_object(line, where), where) if is_json else line
            found[_hash(line)] = _encode_prompt(prompt, tokenizer, where)
    if not found:
        raise ConfigError(f"{option}: {path} has no prompt")
    return [found[key] for key in sorted(found)]


def _prompt_of(entry: dict[str, Any], where: str) -> Any:
    prompt = entry.get("messages", entry.get("prompt"))
    if not prompt or not isinstance(prompt, str | list):
        raise ConfigError(f'{where}: has neither a string "prompt" nor a list "messages"')
    return prompt


def _encode_prompt(prompt: Any, tokenizer: PreTrainedTokenizerBase, where: str) -> list[int]:
    if tokenizer.chat_template is None:
        if not isinstance(prompt, str):
            raise ConfigError(f'{where}: has "messages", but the model has no chat template')
        return list(tokenizer(prompt, verbose=False).input_ids)
    chat = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    try:
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    except (TypeError, ValueError, KeyError, TemplateError) as error:
        raise ConfigError(f"{where}: the model's chat template refuses it: {error}") from error
    return list(tokenizer(text, add_special_tokens=False, verbose=False).input_ids)


def encode_texts(texts: list[str], tokenizer: PreTrainedTokenizerBase) -> Tensor:
    """Return all texts' tokens, int32, with the begin and end tokens that the model's tokenizer adds."""
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    pieces = []
    for start in range(0, len(texts), _TEXTS_AT_ONCE):
        encoded = tokenizer(texts[start : start + _TEXTS_AT_ONCE], verbose=False).input_ids
        pieces += [torch.tensor([*ids, *end], dtype=torch.int32) for ids in encoded]
    return torch.cat(pieces)


def cut_windows(tokens: Tensor, length: int) -> Tensor:
    """Return all complete windows of a token stream, int64 [windows, length]."""
    return tokens[: len(tokens) // length * length].view(-1, length).long()


def spread_windows(tokens: Tensor, length: int, most: int, name: str) -> Tensor:
    """Return up to `most` windows, spread evenly. Raises `ConfigError` with `name` if there are none."""
    windows = cut_windows(tokens, length)
    if not len(windows):
        raise ConfigError(
            f"--length: {length} exceeds the {len(tokens)} tokens of the {name}; give more text, or less"
        )
    return spread(windows, most)


def spread(windows: Tensor, most: int) -> Tensor:
    """Return at most `most` of the windows, spread evenly."""
    return windows[torch.linspace(0, len(windows) - 1, min(most, len(windows))).long()]


class Windows:
    """Batches of `batch` windows, each `length` consecutive places of a stream. Each epoch cuts the stream at
    another offset and shuffles the windows.

    Batch `step` depends only on the stream's size, the seed and the step, so a run can be resumed.
    """

    def __init__(self, size: int, length: int, batch: int, seed: int) -> None:
        self._length = length
        self._batch = batch
        self._seed = seed
        self._epoch = -1
        self._starts = torch.empty(0, dtype=torch.int64)
        self.batch_tokens = batch * length
        self.steps_per_epoch = (size - length) // length // batch
        if self.steps_per_epoch < 1:
            raise ConfigError(
                f"--data: has {size} tokens for training; a step takes {length * batch}, and "
                f"{length * (batch + 1)} are the least (see --length and --batch-tokens)"
            )

    def __getitem__(self, step: int) -> Tensor:
        """Return a step's batch of places in the stream, int64 [batch, length]."""
        epoch, number = divmod(step, self.steps_per_epoch)
        if epoch != self._epoch:
            random = torch.Generator().manual_seed(self._seed * 1_000_003 + epoch)
            offset = int(torch.randint(self._length, (), generator=random))
            count = self.steps_per_epoch * self._batch
            self._starts = offset + torch.randperm(count, generator=random) * self._length
            self._epoch = epoch
        starts = self._starts[number * self._batch : (number + 1) * self._batch]
        return starts.unsqueeze(1) + torch.arange(self._length)
