"""The forms in which checkpoints store weights: plain, FP8 in blocks, MXFP4.

Reading needs nothing of this: `SafetensorsDir` lists quantised weights under the model's own names, as bfloat16, and
dequantises the rectangle that is asked for. `StoredTensor.form` says `plain`, `fp8` or `mxfp4`; only a plain tensor's
bytes in the file are its values.

Writing goes through an `Encoder` (`formats.encode`):

- `Plain()`: everything as it is; `quantization_config` is taken out of the config.
- `Fp8(scales)`: the weights that were published in FP8 in FP8 again. `scales` is `CheckpointScales(SafetensorsDir)`
  where the published checkpoint is at hand, or `ScaleFolder(folder)` where `collect(SafetensorsDir, folder)` has put
  its scales beside weights in another format (`formats.scales`).

An encoder has

- `stored_tensors(tensors)`: names, shapes and types (`HfTensor`) of what will be stored, to plan files with, in the
  order of `tensors`;
- `encode(name, value)`: one whole tensor (bfloat16 or float32) to what is stored of it, by name;
- `config(config)`: the `config.json` to go with it.
"""
