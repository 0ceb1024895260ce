"""SGLang's gather of the state of speculative decoding, as one multigather call.

The same name, arguments and results as in SGLang: ``gather_spec_extras`` in
``sglang.kernels.ops.speculative.gather_spec_extras`` (from mid-2026 on, seen at commit e136f694),
in ``sglang.srt.speculative.triton_ops.gather_spec_extras`` before (from commit c95179bc on). The
relay imports it by name from either, so this replaces both. Before the server starts::

    from sglang.srt.managers import overlap_utils
    from multigather.integrations import sglang

    overlap_utils.gather_spec_extras = sglang.gather_spec_extras

What it adds: any number of dimensions, strided pools, indices of any integer type and layout,
negative indices from the end, and pools on the CPU; a bad index is reported instead of read. And
further pools of the relay in the same launch. Does not import SGLang.
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
    *more: torch.Tensor | None,
) -> tuple[torch.Tensor | None, ...]:
    """Gather the rows of each request: ``buf[indices]`` for each buffer, in one launch.

    Args:
        indices: slots of the requests, shape ``[m]``, any integer dtype.
        topk_p_buf: ``[pool, topk]``, float32.
        topk_index_buf: ``[pool, topk]``, int64.
        output_tokens_buf: ``[pool]``, int64.
        hidden_states_buf: ``[pool, ..., hidden]``, the model's dtype; None where the model does not
            keep them.
        *more: pools that SGLang's newer relay gathers by calls of their own, such as
            ``draft_probs_buf``, ``dsa_topk_indices_buf`` and ``new_seq_lens_buf``; None for one
            that is not kept.

    Returns:
        ``(topk_p, topk_index, bonus_tokens, hidden_states, *more)``: new contiguous tensors of
        ``m`` rows; None where the buffer is None.

    Raises:
        IndexError: as `multigather.gather` in mode "raise": on a GPU a bad slot gives a row of
            zeros, and a later call raises.
    """
    bufs = (topk_p_buf, topk_index_buf, output_tokens_buf, hidden_states_buf, *more)
    if all(buf is not None for buf in bufs):
        return gather(indices, *bufs)
    # Without a None among the buffers the call is the plain one that is fastest.
    rows = iter(gather(indices, *[buf for buf in bufs if buf is not None]))
    return tuple([None if buf is None else next(rows) for buf in bufs])
