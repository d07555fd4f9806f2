"""What Tandem's processes say to each other: messages, ids, sampling parameters, configuration."""
