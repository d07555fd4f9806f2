"""The native decoder: a small decoder's whole forward in one native call."""
