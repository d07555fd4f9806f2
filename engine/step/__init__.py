"""One engine step: schedule, pack, run, sample or verify, commit."""
