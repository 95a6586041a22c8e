"""vLLM's description of a step as the batch of ascend-attn-backends."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ascend_attn_backends import AttentionBatch

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.attention.backend import CommonAttentionMetadata


def attention_batch(common: CommonAttentionMetadata, *, drafts_in_flight: bool) -> AttentionBatch:
    """The batch of one step, with vLLM's host copies so that nothing is read from the device.

    vLLM's counts may include padding (its field names notwithstanding); what is padding it does
    not say, and padding rows have no tokens and negative slots.

    Args:
        common: vLLM's metadata of the step. Fields used: `query_start_loc` [num_reqs + 1],
            `seq_lens` [num_reqs], `block_table_tensor` [>= num_reqs, max_blocks], `slot_mapping`
            [>= num_actual_tokens], their counts and maxima, `causal`, `is_prefilling`.
        drafts_in_flight: the host does not know yet how many drafts of the last step were
            accepted, so that its sequence lengths are bounds and not exact.
    """
    rows, tokens = common.num_reqs, common.num_actual_tokens
    bounds, flags = common.seq_lens_cpu_upper_bound, common.is_prefilling
    return AttentionBatch(
        query_start_loc=_first(common.query_start_loc, rows + 1),
        seq_lens=_first(common.seq_lens, rows),
        block_table=_first(common.block_table_tensor, rows),
        slot_mapping=_first(common.slot_mapping, tokens),
        num_reqs=rows,
        num_tokens=tokens,
        max_query_len=common.max_query_len,
        max_seq_len=common.max_seq_len,
        causal=common.causal,
        query_start_loc_cpu=_first(common.query_start_loc_cpu, rows + 1),
        seq_lens_cpu=_host_seq_lens(common, drafts_in_flight),
        seq_lens_cpu_upper_bound=None if bounds is None else _first(bounds, rows),
        is_prefilling=None if flags is None else _first(flags, rows),
    )


def drafts_in_flight(vllm_config: VllmConfig) -> bool:
    """Whether a step may be described before the host knows which drafts were accepted."""
    return bool(
        vllm_config.scheduler_config.async_scheduling and vllm_config.speculative_config is not None
    )


def _host_seq_lens(common: CommonAttentionMetadata, drafts_in_flight: bool) -> torch.Tensor | None:
    """Exact lengths in host memory, or None where only the device has them."""
    if common.seq_lens.device.type == "cpu":
        return _first(common.seq_lens, common.num_reqs)
    bound = common.seq_lens_cpu_upper_bound
    if bound is None or drafts_in_flight:
        return None
    return _first(bound, common.num_reqs)


def _first(rows: torch.Tensor, count: int) -> torch.Tensor:
    """The first rows, which mostly are all; a view costs microseconds."""
    return rows if rows.shape[0] == count else rows[:count]
