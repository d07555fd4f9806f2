"""Finds the bottlenecks that keep requests waiting, from two samples of the cluster, and their remedies."""
