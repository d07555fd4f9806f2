"""A small decoder's whole forward in one native call."""
