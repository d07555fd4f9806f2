"""The transports, a file or folder each. `transport` defines their interface, `registry` opens them."""
