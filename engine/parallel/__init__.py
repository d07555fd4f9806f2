"""Tensor parallelism: several processes, the ranks, run one model, each with some of its weights."""
