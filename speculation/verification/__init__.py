"""What of a draft becomes output, by the target's logits."""
