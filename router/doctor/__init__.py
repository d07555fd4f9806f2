"""What keeps requests waiting now, and what to change: verdicts from two looks at the cluster."""
