"""Leases: which of the receiver's blocks may be written, by whom, and until when."""
