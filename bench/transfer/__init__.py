"""The cost of moving KV between workers, compared with the machine's own limits."""
