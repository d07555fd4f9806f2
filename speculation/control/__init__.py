"""Decides how many tokens requests draft: `estimator`, `planner`, `explorer`, and `controller` above them."""
