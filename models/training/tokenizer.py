"""Trains the pair's tokenizer: byte-level BPE, 4096 tokens, lossless for any text."""

import argparse
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from models.training.corpus import END_OF_TEXT, held_out_files, training_texts
from models.training.shapes import CONTEXT, VOCABULARY

PAD = "<|pad|>"

# Like GPT-4's split: a word keeps one leading mark or space, numbers split in threes, `):` keeps its line
# break, and indentation ends one space before the word that follows it.
SPLIT = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def train(texts: list[str]) -> Tokenizer:
    """Train on `texts`. The vocabulary always has the 256 byte symbols, so any text can be encoded."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END_OF_TEXT, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", nargs="+", type=Path, help="model folders to save the tokenizer in")
    arguments = parser.parse_args()
    tokenizer = train(training_texts())
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=PAD,
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )
    for folder in arguments.folders:
        wrapped.save_pretrained(folder)
    held_out = [file.text for file in held_out_files()]
    ids = sum(len(encoding.ids) for encoding in tokenizer.encode_batch(held_out))
    size = sum(len(text.encode()) for text in held_out)
    print(f"{tokenizer.get_vocab_size()} tokens; {size / ids:.2f} held-out bytes a token")


if __name__ == "__main__":
    main()
