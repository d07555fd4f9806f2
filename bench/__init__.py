"""Load generator, peers and comparisons."""
