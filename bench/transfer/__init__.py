"""What moving KV between workers costs, against what the machine itself can do."""
