"""The rules that kernels know: nodes are accepted while they are the target's own tokens, or by chance."""

OWN, STANDARD, BLOCK = RULES = range(3)
