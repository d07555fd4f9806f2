"""A `tokenizers.Tokenizer` and the `tokenizer_config.json` settings from a GGUF file's metadata."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from checkpoints.gguf.reader import GgufFile

_SPACE = "\u2581"
"""SentencePiece's mark for a space."""


class Kind(IntEnum):
    """The values of `tokenizer.ggml.token_type` that the tokenizer uses."""

    NORMAL = 1
    CONTROL = 3
    USER_DEFINED = 4


@dataclass(frozen=True)
class Split:
    """The way text is cut into words before merges apply."""

    pattern: str | None = None
    """A regular expression; None for GPT-2's own."""
    digits_alone: bool = False
    takes_whole_words: bool = False
    """Whether a word that is itself a token skips the merges."""
    composes: bool = False
    """Whether text is first normalized to Unicode's composed form (NFC)."""


_END = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _END
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_QWEN35 = _QWEN2.replace(r"\p{L}+", r"[\p{L}\p{M}]+").replace(r"[^\s\p{L}\p{N}]+", r"[^\s\p{L}\p{M}\p{N}]+")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s"
_AFTER_WORD = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_GPT4O = _CASED % (_AFTER_WORD, _AFTER_WORD) + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _END
_TEKKEN = _CASED % ("", "") + r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _END

SPLITS = (
    dict.fromkeys(("default", "gpt-2", "gpt2", "phi-2", "mpt", "olmo", "jais", "trillion"), Split())
    | dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"),
        Split(digits_alone=True),
    )
    | dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "lfm2"),
        Split(_LLAMA3, takes_whole_words=True),
    )
    | dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe", "glm4"), Split(_LLAMA3))
    | dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), Split(_QWEN2, composes=True))
    | {"qwen35": Split(_QWEN35, composes=True), "tekken": Split(_TEKKEN, takes_whole_words=True)}
    | dict.fromkeys(("gpt-4o", "llama4"), Split(_GPT4O))
)
"""Splits by `tokenizer.ggml.pre`, in llama.cpp's names. The expressions come from the models' tokenizers."""

ENDS = (
    *("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", "<turn|>", "<|tool_response>"),
    *("<|return|>", "<|call|>", "<|endoftext|>", "<|end_of_text|>", "<EOT>", "_<EOT>", "[EOT]"),
    *("<eos>", "[EOS]", "<end_of_utterance>"),
)
"""Tokens that end an answer or a turn in any vocabulary that has them. Many files name only one of theirs."""
_ROLES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def build_tokenizer(file: GgufFile) -> Tokenizer:
    """Build the tokenizer. Raises GgufError, naming the field, if it cannot be built."""
    model = file.need("tokenizer.ggml.model", str)
    tokens = file.need("tokenizer.ggml.tokens", list)
    if model == "gpt2":
        tokenizer = _byte_level(file, tokens)
    elif model in ("llama", "gemma4"):
        tokenizer = _sentence_piece(file, tokens)
    else:
        file.fail(
            f"tokenizer.ggml.model: is {model!r}, not gpt2, llama or gemma4: name another by --tokenizer"
        )
    kinds = _kinds(file, tokens)
    known = tokenizer.get_vocab(with_added_tokens=False)
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == Kind.CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    defined = [token for token, kind in zip(tokens, kinds, strict=True) if kind == Kind.USER_DEFINED]
    tokenizer.add_tokens([AddedToken(each, normalized=False) for each in defined if each in known])
    if tokenizer.get_vocab_size() != len(tokens):
        file.fail(
            f"tokenizer.ggml.tokens: has {len(tokens)} tokens, of which {tokenizer.get_vocab_size()} differ"
        )
    _add_ends(file, tokenizer, tokens)
    return tokenizer


def end_tokens(file: GgufFile) -> list[int]:
    """Return the token ids that end an answer: those that the file names, then those known by their text.

    In Harmony `<|end|>` ends a message of an answer that goes on.
    """
    named = [token_id(file, end) for end in ("eos", "eot", "eom")]
    tokens = file.need("tokenizer.ggml.tokens", list)
    known = {token: place for place, token in enumerate(tokens) if token in ENDS}
    found = dict.fromkeys([*(each for each in named if each is not None), *known.values()])
    if {"<|return|>", "<|call|>", "<|end|>"} <= known.keys():
        del found[known["<|end|>"]]
    return [*found]


def token_id(file: GgufFile, role: str) -> int | None:
    """Return the id that the file names for a role such as `bos`, or None; files write -1 for none, too."""
    place = file.metadata.get(f"tokenizer.ggml.{role}_token_id")
    return place if _is_place(place, file.need("tokenizer.ggml.tokens", list)) else None


def tokenizer_settings(file: GgufFile) -> dict[str, Any]:
    tokens = file.need("tokenizer.ggml.tokens", list)
    ids = {role: token_id(file, name) for role, name in _ROLES.items()}
    template = file.metadata.get("tokenizer.chat_template")
    others = {
        name: file.metadata.get(f"tokenizer.chat_template.{name}")
        for name in file.metadata.get("tokenizer.chat_templates", [])
    }
    if any(others.values()):
        named = {"default": template} | others
        template = [{"name": name, "template": each} for name, each in named.items() if each]
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "add_bos_token": _adds(file, "bos"),
        "add_eos_token": _adds(file, "eos"),
        "chat_template": template,
        "model_max_length": file.get("context_length"),
        **{role: tokens[place] for role, place in ids.items() if place is not None},
    }
    return {name: value for name, value in settings.items() if value is not None}


def _is_place(value: object, tokens: Sequence[str]) -> bool:
    return type(value) is int and 0 <= value < len(tokens)


def _kinds(file: GgufFile, tokens: Sequence[str]) -> Sequence[int]:
    kinds: Sequence[int] = file.metadata.get("tokenizer.ggml.token_type", [Kind.NORMAL] * len(tokens))
    if len(kinds) != len(tokens):
        file.fail(f"tokenizer.ggml.token_type: has {len(kinds)} entries for {len(tokens)} tokens")
    return kinds


def _byte_level(file: GgufFile, tokens: Sequence[str]) -> Tokenizer:
    name = file.metadata.get("tokenizer.ggml.pre", "default")
    split = SPLITS.get(name)
    if split is None:
        file.fail(f"tokenizer.ggml.pre: {name!r} is not known: name a tokenizer with --tokenizer")
    merges = [tuple(merge.split(" ", 1)) for merge in file.need("tokenizer.ggml.merges", list)]
    vocab = {token: place for place, token in enumerate(tokens)}
    try:
        model = models.BPE(vocab, merges, ignore_merges=split.takes_whole_words)
    except Exception as error:  # tokenizers raises plain Exception
        file.fail(f"tokenizer.ggml.merges: {error}")
    tokenizer = Tokenizer(model)
    if split.composes:
        tokenizer.normalizer = normalizers.NFC()
    steps: list[Any] = []
    if split.digits_alone:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if split.pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(split.pattern), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split.pattern is None))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentence_piece(file: GgufFile, tokens: Sequence[str]) -> Tokenizer:
    """Build SentencePiece's byte-pair encoding.

    Gemma's merges are ordered by token id instead of score, and its runs of spaces are stored as spaces.
    """
    is_gemma = file.architecture.startswith("gemma")
    if is_gemma:
        tokens = [token.replace(" ", _SPACE) if token.isspace() else token for token in tokens]
    scores = range(0, -len(tokens), -1) if is_gemma else file.need("tokenizer.ggml.scores", list)
    if len(scores) != len(tokens):
        file.fail(f"tokenizer.ggml.scores: has {len(scores)} entries for {len(tokens)} tokens")
    vocab = {token: place for place, token in enumerate(tokens)}
    unknown = token_id(file, "unknown")
    stored = file.metadata.get("tokenizer.ggml.merges") if file.architecture == "gemma4" else None
    model = models.BPE(
        vocab,
        [*_merges(vocab, tokens, scores)]
        if stored is None
        else [tuple(each.split(" ", 1)) for each in stored],
        unk_token=None if unknown is None else tokens[unknown],
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    adds_space = file.metadata.get("tokenizer.ggml.add_space_prefix", True)
    spaces = normalizers.Replace(" ", _SPACE)
    tokenizer.normalizer = (
        normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if adds_space else spaces
    )
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(
        [*steps, decoders.Strip(content=" ", left=1)] if adds_space else steps
    )
    return tokenizer


def _merges(
    vocab: dict[str, int], tokens: Sequence[str], scores: Sequence[float]
) -> Iterator[tuple[str, str]]:
    """Yield each pair of tokens that merges into another token, the best token's pairs first."""
    for place in sorted(range(len(tokens)), key=lambda place: -scores[place]):
        token = tokens[place]
        for cut in range(len(token) - 1, 0, -1):
            left, right = token[:cut], token[cut:]
            if left in vocab and right in vocab:
                yield left, right


def _adds(file: GgufFile, end: str) -> bool:
    """Return whether the tokenizer adds the end token, `bos` or `eos`, to a text.

    Gemma 4's own adds none, since its template has it; its files say otherwise.
    """
    model = file.need("tokenizer.ggml.model", str)
    if model == "gemma4":
        return False
    is_usual = end == "bos" and (
        model == "llama" or file.metadata.get("tokenizer.ggml.pre") in ("llama-bpe", "llama3", "llama-v3")
    )
    return bool(file.metadata.get(f"tokenizer.ggml.add_{end}_token", is_usual))


def _add_ends(file: GgufFile, tokenizer: Tokenizer, tokens: Sequence[str]) -> None:
    ends = {
        end: file.metadata.get(f"tokenizer.ggml.{end}_token_id") for end in ("bos", "eos") if _adds(file, end)
    }
    for end, place in ends.items():
        if not _is_place(place, tokens):
            file.fail(f"tokenizer.ggml.{end}_token_id: is {place!r}, not the place of a token")
    if not ends:
        return
    places = {end: (tokens[place], place) for end, place in ends.items() if place is not None}
    names = {end: token for end, (token, _) in places.items()}
    single = [names.get("bos"), "$A", names.get("eos")]
    pair = [names.get("bos"), "$A", names.get("eos"), names.get("bos"), "$B:1", names.get("eos")]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=[each for each in single if each],
        pair=[each for each in pair if each],
        special_tokens=[*places.values()],
    )
