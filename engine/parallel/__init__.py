"""Tensor parallelism: several processes, the ranks, run one model, each with a share of its heads and weights."""
