"""SGLang's gather of the state of speculative decoding, as one multigather call.

The same name, arguments and results as in SGLang
(``sglang/srt/speculative/triton_ops/gather_spec_extras.py``). Before the server starts::

    from sglang.srt.managers import overlap_utils
    from multigather.integrations import sglang

    overlap_utils.gather_spec_extras = sglang.gather_spec_extras

What it adds: any number of dimensions, strided pools, indices of any integer type and layout,
negative indices from the end, and pools on the CPU; a bad index is reported instead of read. Does
not import SGLang.
"""

from __future__ import annotations

import torch

from ..api import gather

__all__ = ["gather_spec_extras"]


def gather_spec_extras(
    indices: torch.Tensor,
    topk_p_buf: torch.Tensor,
    topk_index_buf: torch.Tensor,
    output_tokens_buf: torch.Tensor,
    hidden_states_buf: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Gather the rows of each request: ``buf[indices]`` for each buffer, in one launch.

    Args:
        indices: slots of the requests, shape ``[m]``, any integer dtype.
        topk_p_buf: ``[pool, topk]``, float32.
        topk_index_buf: ``[pool, topk]``, int64.
        output_tokens_buf: ``[pool]``, int64.
        hidden_states_buf: ``[pool, ..., hidden]``, the model's dtype; None where the model does not
            keep them.

    Returns:
        ``(topk_p, topk_index, bonus_tokens, hidden_states)``: new contiguous tensors of ``m`` rows;
        ``hidden_states`` is None if its buffer is.

    Raises:
        IndexError: as `multigather.gather` in mode "raise": on a GPU a bad slot gives a row of
            zeros, and a later call raises.
    """
    if hidden_states_buf is None:
        # Without a None among the buffers the call is the plain one that is fastest.
        topk_p, topk_index, tokens = gather(indices, topk_p_buf, topk_index_buf, output_tokens_buf)
        return topk_p, topk_index, tokens, None
    topk_p, topk_index, tokens, hidden = gather(
        indices, topk_p_buf, topk_index_buf, output_tokens_buf, hidden_states_buf
    )
    return topk_p, topk_index, tokens, hidden
