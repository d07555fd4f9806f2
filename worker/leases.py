"""What both ends of a hand-off must agree on."""

from __future__ import annotations

ANY_LEASE = "*"
"""In a `Release`: whatever this prefill worker holds for the request, be it only a place in the queue."""

LEASE_SHARE = 0.9
"""A lease's life as a share of the prefill worker's own patience, so that the decode worker's answer, which
knows the reason, comes first."""

RENEWALS_PER_LIFE = 3
"""How often a lease is renewed while its prompt waits for its next chunk and no block moves."""
