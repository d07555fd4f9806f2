"""The load generator behind `tandem bench serve`."""
