"""Tiers below the device pool for KV blocks that it has no room for: host memory, and below it the disk."""
