"""Figures of one role for Prometheus, read from the run folder: nothing is counted inside the loops."""
