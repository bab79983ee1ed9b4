"""TRL's `GRPOTrainer` on the same machine, in an environment of its own."""
