"""Leases: permission to write some of the receiver's blocks, for one sender and a limited time."""
