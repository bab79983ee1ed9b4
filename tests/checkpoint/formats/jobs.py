"""What the tests of stored bytes run in each worker: weights go in and come out, nothing is computed with them."""

from __future__ import annotations

from moe_asyncrl.checkpoint.hf_export import Form, export_hf
from moe_asyncrl.checkpoint.hf_load import load_hf
from moe_asyncrl.models.layout import Layout
from moe_asyncrl.models.spec import ModelSpec
from moe_asyncrl.train.model import build_model
from tests.pool.machine import CPU


def there_and_back(layout: Layout, trips: list[tuple[str, str, Form]]) -> None:
    """For each (HF directory, new directory, form): load the one, and export the model to the other.

    All directories hold models of one shape, so that one set of layers serves them.
    """
    spec = ModelSpec.from_hf(trips[0][0])
    chunks = build_model(spec, layout, CPU)
    for hf_dir, out_dir, form in trips:
        spec = ModelSpec.from_hf(hf_dir)
        load_hf(chunks, spec, layout, hf_dir)
        # Buckets far smaller than the embedding.
        export_hf(chunks, spec, layout, out_dir, source_hf_dir=hf_dir, form=form, max_bucket_bytes=20_000)
