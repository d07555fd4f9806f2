"""Tiers for KV blocks that the device pool has evicted: host memory and, below it, the disk."""
