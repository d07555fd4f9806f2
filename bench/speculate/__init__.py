"""Costs and gains of speculation by method, K, concurrency and temperature, against no speculation in the
same run.
"""
