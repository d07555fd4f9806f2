"""Plain torch operators, for any device: the fallback and the reference."""
