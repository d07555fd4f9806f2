"""The router's tokenizer: the library `tokenizers` alone, with the settings that Transformers would apply."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as FastTokenizer

from checkpoints.tokenizer import TokenizerSource, load_files, special_tokens, whole_tokenizer
from protocol.config import ServeConfig
from protocol.errors import ConfigError
from router.errors import too_long
from router.text.chat_template import ChatTemplate
from router.text.choice import Echo
from router.text.detokenizer import (
    BytesDetokenizer,
    Detokenizer,
    TokenBytes,
    TokenTexts,
    WindowDetokenizer,
    piece_decoding,
)
from router.text.fast_encoder import UNSURE, component, fast_encode

SAFE_CHARACTERS_PER_TOKEN = 8
PIECE_CHARACTERS = 64 * 1024

_TRIM = re.compile(r'("trim_offsets"\s*:\s*)true\b')
"""Matches `trim_offsets`: trimmed offsets leave a token's spaces out. No token id depends on them."""


class Tokenizer:
    """Encodes, decodes, and renders chats."""

    def __init__(
        self, tokenizer_json: str, settings: Mapping[str, Any], chat_template: str | None = None
    ) -> None:
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        whole = whole_tokenizer(tokenizer_json, settings)
        self._json = whole.encode()
        try:
            self._fast = FastTokenizer.from_str(_TRIM.sub(r"\1false", whole))
        except Exception as error:  # tokenizers raises no narrower type
            raise ConfigError(f"--tokenizer: tokenizer.json is not usable: {error}") from error
        self.special_tokens = special_tokens(settings)
        self._fast_encode = fast_encode(self._fast)
        added = self._fast.get_added_tokens_decoder()
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.special_ids = {each.content: token for token, each in added.items() if _is_special(each)}
        """Ids, by text, of the tokens that llguidance treats as special."""
        self._decoding = piece_decoding(component(self._fast.decoder))
        if self._decoding is not None:
            self._all_bytes = TokenBytes(self._fast, self._decoding, frozenset())
            self._texts: dict[frozenset[int], TokenTexts] = {frozenset(): TokenTexts(self._all_bytes)}
            """Token texts by the set of token ids that are skipped."""
        source, source_for_tools = (chat_template, None) if chat_template else _templates_of(settings)
        self.chat_template = None if source is None else ChatTemplate(source, self.special_tokens)
        self.tool_template = self.chat_template
        """Chat template for chats with tools: some models have a separate one."""
        if source_for_tools is not None:
            self.tool_template = ChatTemplate(source_for_tools, self.special_tokens)
        self._longest_token = max((len(token) for token in self._fast.get_vocab()), default=1)

    @classmethod
    def load(cls, config: ServeConfig) -> Tokenizer:
        """Load the tokenizer from the configured folder or hub id. Raises `ConfigError`."""
        chat_template = None
        if config.chat_template is not None:
            chat_template = _read_template(Path(config.chat_template))
        return cls(*load_files(TokenizerSource.of(config)), chat_template)

    @property
    def vocab_size(self) -> int:
        return self._fast.get_vocab_size()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        if self._fast_encode is not None and UNSURE not in text:
            return self._fast_encode(text, add_special_tokens)
        # the batch call releases the GIL, the single one doesn't
        return self._fast.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def encode_end(self, text: str, add_special_tokens: bool, num_tokens: int) -> list[int]:
        """Return the last `num_tokens` tokens of a text. Tokenize only as much text as these can cover."""
        end = text[-num_tokens * self._longest_token :]
        return self.encode(end, add_special_tokens)[-num_tokens:]

    def encode_prompt(self, text: str, add_special_tokens: bool, max_tokens: int, field: str) -> list[int]:
        """Tokenize a prompt. Raises `ApiError` if the text cannot fit in `max_tokens`.

        A token takes a few hundred bytes of memory, so the tokens of a long text are first counted by pieces.
        """
        if len(text) > max_tokens * self._longest_token:
            limit = f"the model's maximum context length of {max_tokens} tokens"
            raise too_long(field, f"{len(text)} characters exceed {limit}")
        if len(text) > max_tokens * SAFE_CHARACTERS_PER_TOKEN:
            self._check_pieces(text, max_tokens, field)
        return self.encode(text, add_special_tokens)

    def _check_pieces(self, text: str, max_tokens: int, field: str) -> None:
        num_tokens = 0
        for start in range(0, len(text), PIECE_CHARACTERS):
            piece = text[start : start + PIECE_CHARACTERS]
            # a token cut in two counts as several
            num_tokens += max(0, len(self.encode(piece, False)) - 2 * self._longest_token)
            if num_tokens > max_tokens:
                raise too_long(field, f"it exceeds the model's maximum context length of {max_tokens} tokens")

    @property
    def is_fast(self) -> bool:
        """Whether `fastokens` encodes prompts, with the same ids as the tokenizer."""
        return self._fast_encode is not None

    def as_json(self) -> bytes:
        """Return `tokenizer.json` as it applies, see `whole_tokenizer`."""
        return self._json

    def settings(self) -> dict[str, Any]:
        """Return the settings of `tokenizer_config.json` that are not in the tokenizer's own file."""
        templates = {"default": self.chat_template, "tool_use": self.tool_template}
        named = [{"name": name, "template": each.source} for name, each in templates.items() if each]
        return {**self.special_tokens, "chat_template": named}

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return self._fast.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def echo(self, text: str, add_special_tokens: bool) -> Echo:
        """Return the text with the offset of each of its tokens. Added tokens have no text."""
        encoding = self._fast.encode_batch([text], add_special_tokens=add_special_tokens)[0]
        offsets, end = [], 0
        for start, stop in encoding.offsets:
            offsets.append(start if stop > start else end)
            end = max(end, stop)
        return Echo(text, offsets)

    def echo_tokens(self, token_ids: Sequence[int], skip_special_tokens: bool) -> Echo:
        """Return the tokens' text and offsets. An incomplete last character is left to later tokens."""
        detokenizer = self.detokenizer([], skip_special_tokens)
        pieces = [detokenizer.push(token_id) for token_id in token_ids]
        return Echo("".join(pieces), list(accumulate(map(len, pieces), initial=0))[:-1])

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one token, special or not."""
        if self._decoding is not None:
            return self._all_bytes[token_id]
        return self._fast.decode([token_id], skip_special_tokens=False).encode()

    def token_id(self, text: str) -> int | None:
        """Return the id of the token that the vocabulary spells `text`."""
        return self._fast.token_to_id(text)

    def token_string(self, token_id: int) -> str | None:
        """Return the token as the vocabulary spells it."""
        return self._fast.id_to_token(token_id)

    def detokenizer(
        self,
        prompt_token_ids: Sequence[int],
        skip_special_tokens: bool = True,
        keep: frozenset[str] = frozenset(),
    ) -> Detokenizer:
        """Return a new detokenizer for the tokens after the prompt. It never skips the tokens in `keep`."""
        context = prompt_token_ids[-8:]
        skip = self._special_ids if skip_special_tokens else frozenset()
        if keep:
            skip -= {token_id for text in keep if (token_id := self._fast.token_to_id(text)) is not None}
        if self._decoding is None:
            return WindowDetokenizer(self._fast, context, skip)
        texts = self._texts.get(skip)
        if texts is None:
            texts = self._texts[skip] = TokenTexts(TokenBytes(self._fast, self._decoding, skip))
        at_start = not any(texts.table[token_id] for token_id in context)
        return BytesDetokenizer(texts, context, self._decoding.leading_spaces if at_start else 0)


def _read_template(path: Path) -> str:
    """Read and check a chat template. Raises `ConfigError`, also if it does not compile."""
    try:
        if path.exists() and not path.is_file():
            raise ConfigError(f"--chat-template: {path} is no file")
        source = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--chat-template: cannot read {path}: {error}") from error
    try:
        ChatTemplate(source, {})
    except ConfigError as error:
        raise ConfigError(f"--chat-template: {path}: {error}") from error
    return source


def _is_special(token: AddedToken) -> bool:
    return token.special or (token.content.startswith("<") and token.content.endswith(">"))


def _templates_of(settings: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """Return the default chat template, and the one for tools if the settings list templates by name."""
    template = settings.get("chat_template")
    if isinstance(template, list):
        by_name = {entry.get("name"): entry.get("template") for entry in template}
        default = by_name.get("default") or next(iter(by_name.values()), None)
        return default, by_name.get("tool_use")
    return (template if isinstance(template, str) else None), None
