"""`tandem quantize`: block by block, calibrated quantization of a model, written in a published layout."""
