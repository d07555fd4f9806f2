"""Grammars that answers are held to, converted to the form that llguidance compiles."""
