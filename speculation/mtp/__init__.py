"""Multi-token prediction: drafting with the heads that published checkpoints bring along."""
