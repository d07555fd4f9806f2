"""Attention over the paged KV pool: one interface, one backend per kind of device."""
