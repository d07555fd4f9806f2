"""Decides where a request's drafts are made: `interface`, `rates`, and `decide` on top of them. Pure
functions.
"""
