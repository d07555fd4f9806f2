"""Finds the bottlenecks that keep requests waiting, and how to remove them, from two samples of the
cluster.
"""
