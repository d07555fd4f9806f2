"""`tandem bench five`: the effects of five techniques, alone and together."""
