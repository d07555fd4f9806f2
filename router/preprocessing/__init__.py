"""The preprocessor: a process in which the router works on what clients send, under a limit of CPU time."""
