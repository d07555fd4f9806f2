"""The bundled model pair, `tandem-code-10m` and its draft `tandem-code-1m`, and the code that trained it."""
