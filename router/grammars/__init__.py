"""Grammars that constrain answers, converted to the form that llguidance compiles."""
