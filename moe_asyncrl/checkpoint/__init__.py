"""Hugging Face checkpoints in and out of a Megatron model, streaming."""
