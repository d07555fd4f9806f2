"""Layers that carry a state from token to token: short convolutions and linear attention (hybrid models).

A state is kept only at grid points, every `GRID` tokens of a sequence's absolute positions, together with the
inputs of each token after the last grid point. So a row's sums have the same terms in the same order however
its prompt was cut into chunks and whichever other rows are in the step.
"""
