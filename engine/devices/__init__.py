"""Executes packed rows on a device: attention, recurrent layers and whole decoders."""
