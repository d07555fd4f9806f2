"""Decides by the target's logits how much of a draft becomes output."""
