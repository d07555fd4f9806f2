"""Layers that carry a state from token to token: short convolutions and linear attention (hybrid models).

A state is kept at grid points alone, every `GRID` tokens of a sequence's absolute positions, and behind the
last one the inputs of each token. So a row's sums run over the same terms in the same order however its
prompt was cut into chunks and whatever shares the step with it.
"""
