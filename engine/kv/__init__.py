"""The KV cache: pool, blocks, prefix cache, tiers of host and disk, and states of recurrent layers."""
