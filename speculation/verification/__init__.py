"""Verification: the target's logits decide how much of a draft becomes output."""
