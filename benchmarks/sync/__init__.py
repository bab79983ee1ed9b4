"""The parts of `benchmarks.weight_sync`: the model, its optimizer steps, the two sides of each way of sending."""
