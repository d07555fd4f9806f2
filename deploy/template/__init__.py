"""The template: a process per host that has imported and loaded everything, and forks the workers."""
