"""`tandem quantize`: calibrated quantization of a model, block by block, into a published layout."""
