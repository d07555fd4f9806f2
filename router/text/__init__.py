"""Text and tokens: tokenizers, detokenizing, stop strings."""
