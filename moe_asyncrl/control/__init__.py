"""The state of the run: who is alive, which weights are committed, who owns the run."""
