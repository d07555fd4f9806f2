"""Decides how many tokens requests draft: `estimator`, `planner`, and `controller` above them."""
