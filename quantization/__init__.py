"""`tandem quantize`: calibrated, block-by-block quantization of a model, written in a published layout."""
