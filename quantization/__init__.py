"""`tandem quantize`: quantizes a model block by block, with calibration, and writes a published layout."""
