"""Predictions for a cluster under a recorded load: `tandem profile` measures a server, `tandem plan`
simulates.
"""
