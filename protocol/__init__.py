"""Messages between Tandem's processes, ids, sampling parameters and configuration."""
