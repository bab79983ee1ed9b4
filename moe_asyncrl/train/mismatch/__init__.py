"""Where the gap between the sampler's and the trainer's log-probabilities comes from, by controlled re-evaluation."""
