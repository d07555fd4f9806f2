"""Predicts a cluster's behaviour under a recorded load: `tandem profile` measures a server, `tandem plan`
simulates.
"""
