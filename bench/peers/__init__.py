"""Other serving systems, started on this machine for a comparison."""
