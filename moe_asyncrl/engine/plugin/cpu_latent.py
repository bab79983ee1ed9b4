"""Multi-latent attention (DeepSeek-V3) on a CPU engine: every pass takes the absorbed form.

SGLang computes a prompt without a cached prefix with keys and values written out for each head, and hands them to the
attention backend beside the cache. The `torch_native` backend reads the cache only, which holds the latent vectors: a
shape error. In the absorbed form queries meet the latent vectors themselves, one shared key head, and the cache is all
that it needs; the values are the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def absorbed(original: Callable[..., Any], attention: Any, forward_batch: Any) -> Any:
    """Stands around `DeepseekV2AttentionMLA.dispatch_attn_forward_method`, which also notes the backend's name."""
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod

    method = original(attention, forward_batch)
    return AttnForwardMethod.MLA if attention.current_attention_backend == "torch_native" else method
