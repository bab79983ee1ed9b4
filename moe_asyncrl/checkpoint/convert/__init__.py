"""`moe-asyncrl convert`: HF checkpoints to Megatron-Core's distributed ones and back, as a plan of byte movements.

The plan is made from headers alone. Workers carry it out; they know files, offsets and rectangles, and nothing of
models. Nothing here imports torch unless a checkpoint is quantised, so a conversion starts in a fraction of a second.
"""
