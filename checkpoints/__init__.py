"""The files of a checkpoint on disk: configuration, tokenizer and weights."""
