"""The router's tokenizer gives the same results as Transformers' with the same files."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import pre_tokenizers
from tokenizers.processors import TemplateProcessing

from checkpoints.tokenizer import whole_tokenizer
from protocol.config import ServeConfig
from protocol.errors import ConfigError
from router.errors import ApiError
from router.text.tokenizer import PIECE_CHARACTERS, Tokenizer
from tests.router.text.test_detokenizer import sentencepiece_like

TEXTS = ["hello fox", "  two  spaces ", "naïve 🙂\n日本", "<|end|>mid<|end|>", "", "x" * 3000]
BUNDLED = Path(__file__).parents[3] / "models" / "tandem-code-10m"


def save(folder: Path, fast: FastTokenizer, **settings) -> ServeConfig:
    fast.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **settings}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return ServeConfig(model=str(folder))


def transformers_tokenizer(config: ServeConfig):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(config.model)


def check_equal(config: ServeConfig) -> None:
    ours, theirs = Tokenizer.load(config), transformers_tokenizer(config)
    for text in TEXTS:
        for special in (True, False):
            token_ids = ours.encode(text, special)
            assert token_ids == theirs.encode(text, add_special_tokens=special)
            for skip in (True, False):
                plain = theirs.decode(token_ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
                assert ours.decode(token_ids, skip) == plain
    if theirs.chat_template:
        messages = [{"role": "user", "content": "hi"}]
        rendered = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert ours.chat_template.render(messages) == rendered


SETTINGS = [
    {},
    {"bos_token": "<|pad|>", "eos_token": "<|end|>", "add_bos_token": True},
    {"bos_token": "<|pad|>", "eos_token": "<|end|>", "add_bos_token": False, "add_eos_token": True},
    {
        "eos_token": "<|end|>",
        "chat_template": "{{ eos_token }}{% for m in messages %}{{ m.content }}{% endfor %}",
    },
    {"eos_token": {"content": "the", "__type": "AddedToken"}},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_byte_level_equals_transformers(tmp_path, fast_tokenizer, settings):
    check_equal(save(tmp_path, fast_tokenizer, **settings))


@pytest.mark.parametrize(
    "settings", [{}, {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": False}], ids=str
)
def test_llama_like_equals_transformers(tmp_path, settings):
    fast = FastTokenizer.from_buffer(sentencepiece_like(strip=True).as_json())
    fast.add_special_tokens(["<unk>", "<s>", "</s>"])
    fast.post_processor = TemplateProcessing(single="<s> $A", pair=None, special_tokens=[("<s>", 1)])
    check_equal(save(tmp_path, fast, **settings))


@pytest.mark.skipif(not (BUNDLED / "tokenizer.json").exists(), reason="the bundled model is not there")
def test_bundled_equals_transformers():
    check_equal(ServeConfig(model=str(BUNDLED)))


def test_template_file_comes_before_the_settings(tmp_path, fast_tokenizer):
    config = save(tmp_path, fast_tokenizer, chat_template="from the settings")
    assert Tokenizer.load(config).chat_template.render([]) == "from the settings"
    (tmp_path / "chat_template.jinja").write_text("from the file")
    assert Tokenizer.load(config).chat_template.render([]) == "from the file"


NAMED = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]


def test_named_templates(tmp_path, fast_tokenizer):
    tokenizer = Tokenizer.load(save(tmp_path, fast_tokenizer, chat_template=NAMED))
    assert (tokenizer.chat_template.render([]), tokenizer.tool_template.render([])) == ("plain", "tools")
    config = save(tmp_path, fast_tokenizer, chat_template=[NAMED[0]])
    assert Tokenizer.load(config).chat_template.render([]) == "tools", "there is no other"
    chosen = tmp_path / "chosen.jinja"
    chosen.write_text("chosen")
    tokenizer = Tokenizer.load(ServeConfig(model=config.model, chat_template=str(chosen)))
    assert tokenizer.tool_template is tokenizer.chat_template and tokenizer.chat_template.source == "chosen"


def test_named_templates_as_transformers_saves_them(tmp_path, fast_tokenizer):
    from transformers import PreTrainedTokenizerFast

    saved = PreTrainedTokenizerFast(tokenizer_object=FastTokenizer.from_str(fast_tokenizer.to_str()))
    saved.chat_template = {entry["name"]: entry["template"] for entry in NAMED}
    saved.save_pretrained(tmp_path)
    assert "chat_template" not in json.loads((tmp_path / "tokenizer_config.json").read_text())
    tokenizer = Tokenizer.load(ServeConfig(model=str(tmp_path)))
    assert (tokenizer.chat_template.render([]), tokenizer.tool_template.render([])) == ("plain", "tools")


def test_without_a_template(tmp_path, fast_tokenizer):
    tokenizer = Tokenizer.load(save(tmp_path, fast_tokenizer))
    assert tokenizer.chat_template is tokenizer.tool_template is None


def test_truncation_and_padding_of_the_file_are_off(tmp_path, fast_tokenizer):
    fast = FastTokenizer.from_str(fast_tokenizer.to_str())
    fast.enable_truncation(3)
    fast.enable_padding(length=50)
    tokenizer = Tokenizer.load(save(tmp_path, fast))
    assert len(tokenizer.encode("the quick brown fox jumps over the lazy dog")) not in (3, 50)


def test_a_special_token_without_an_id_leaves_the_file_as_it_is(fast_tokenizer):
    whole = fast_tokenizer.to_str()
    assert whole_tokenizer(whole, {"pad_token": "<nowhere>"}) is whole
    with_backslash = whole.replace('"the"', r'"\\u"')
    assert with_backslash != whole
    assert whole_tokenizer(with_backslash, {"pad_token": "<nowhere>"}) is with_backslash


@pytest.mark.parametrize("spelled", ["the", r"\u0074he", r"\u0074\u0068e"])
def test_a_token_of_the_vocabulary_becomes_special_however_it_is_spelled(fast_tokenizer, spelled):
    whole = whole_tokenizer(fast_tokenizer.to_str().replace('"the"', f'"{spelled}"'), {"eos_token": "the"})
    added = {token["content"]: token for token in json.loads(whole)["added_tokens"]}
    assert added["the"]["special"]


def test_a_token_that_only_the_settings_give_an_id_becomes_special_by_its_role(fast_tokenizer):
    settings = {"added_tokens_decoder": {"500": {"content": "<over>"}}, "eos_token": "<over>"}
    whole = whole_tokenizer(fast_tokenizer.to_str(), settings)
    added = {token["content"]: token for token in json.loads(whole)["added_tokens"]}
    assert added["<over>"]["special"]


@pytest.mark.parametrize(
    ("length", "most", "told", "tokenized"),
    [
        (8_000_000, 512, "8000000 characters exceed .* 512", 0),
        (10**6, 300_000, "it exceeds .* 300000", PIECE_CHARACTERS),
    ],
)
def test_a_text_of_too_many_tokens_is_never_tokenized_as_a_whole(
    model_folder, monkeypatch, length, most, told, tokenized
):
    """Nor is any of it, if its characters alone are too many."""
    tokenizer = Tokenizer.load(ServeConfig(model=str(model_folder)))
    encode, lengths = tokenizer.encode, [0]

    def noting(text, *arguments):
        lengths.append(len(text))
        return encode(text, *arguments)

    monkeypatch.setattr(tokenizer, "encode", noting)
    if tokenized:
        monkeypatch.setattr("router.text.tokenizer.SAFE_CHARACTERS_PER_TOKEN", 1)
    with pytest.raises(ApiError, match=f"prompt: {told} tokens") as refused:
        tokenizer.encode_prompt("x" * length, True, most, "prompt")
    assert (refused.value.code, max(lengths)) == ("context_length_exceeded", tokenized)
    words = "the quick " * 50_000
    assert tokenizer.encode_prompt(words, True, 250_000, "prompt") == encode(words), "though it is counted"


def test_slow_tokenizers_are_converted(tmp_path):
    """Older models have only vocabulary files, which another process converts."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate([*alphabet, "he", "<|endoftext|>"])}
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    (tmp_path / "merges.txt").write_text("#version: 0.2\nh e\n")
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    tokenizer = Tokenizer.load(ServeConfig(model=str(tmp_path)))
    assert tokenizer.encode("he") == [vocab["he"]]


@pytest.mark.parametrize("content", [None, "not JSON", '{"version": "1.0"}'])
def test_unusable_files(tmp_path, content):
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ConfigError, match=r"--tokenizer|--model"):
        Tokenizer.load(ServeConfig(model=str(tmp_path)))


def test_unusable_template(tmp_path, fast_tokenizer):
    config = save(tmp_path, fast_tokenizer, chat_template="{% for %}")
    with pytest.raises(ConfigError, match="does not compile"):
        Tokenizer.load(config)
    with pytest.raises(ConfigError, match="--chat-template"):
        Tokenizer.load(ServeConfig(model=config.model, chat_template=str(tmp_path / "missing")))
    for content in (b"{% for %}", b"\xff", None):
        path = tmp_path / "template"
        path.write_bytes(content) if content is not None else (path.unlink(), os.mkfifo(path))
        with pytest.raises(ConfigError, match=f"--chat-template: .*{path}"):
            Tokenizer.load(ServeConfig(model=config.model, chat_template=str(path)))
