"""Messages of a data connection, and the sockets that carry them."""
