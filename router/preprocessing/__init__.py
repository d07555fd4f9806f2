"""The preprocessor: a process in which the router processes clients' input with a limit of CPU time."""
