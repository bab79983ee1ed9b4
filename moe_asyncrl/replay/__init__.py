"""Routing replay: the sampler's experts drive the trainer."""
