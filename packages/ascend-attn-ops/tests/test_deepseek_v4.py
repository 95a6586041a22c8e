"""compressor and sparse_flash_mla against the eager DeepSeek V4 code of transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import ascend_attn_ops as ops

NAME = "transformers.models.deepseek_v4"
config_module = pytest.importorskip(f"{NAME}.configuration_deepseek_v4")
model = pytest.importorskip(f"{NAME}.modeling_deepseek_v4")
masks = pytest.importorskip("transformers.masking_utils")
caches = pytest.importorskip("transformers.cache_utils")

INT = torch.int32
TOKENS = 23
HIDDEN, SIZE, ROPE, WINDOW = 32, 16, 8, 5
RATIOS = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8}
KINDS = ["sliding_attention", *RATIOS]


def attention(kind: str) -> Any:
    """One attention layer of this kind with random weights."""
    config = config_module.DeepseekV4Config(
        hidden_size=HIDDEN, num_attention_heads=4, head_dim=SIZE, q_lora_rank=8,
        num_hidden_layers=1, layer_types=[kind], mlp_layer_types=["moe"],
        compress_rates=dict(RATIOS), sliding_window=WINDOW, o_groups=2, o_lora_rank=8,
        index_n_heads=2, index_head_dim=12, index_topk=2, partial_rotary_factor=ROPE / SIZE,
        attn_implementation="eager",
    )  # fmt: skip
    layer = model.DeepseekV4Attention(config, 0).eval()
    generator = torch.Generator().manual_seed(4)
    for parameter in layer.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) / 2
    return layer


def hidden_states() -> torch.Tensor:
    return torch.randn(2, TOKENS, HIDDEN, generator=torch.Generator().manual_seed(7))


def recorded(layer: Any, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Queries, keys, indices and result of the eager attention within one forward pass."""
    seen: dict[str, Any] = {}
    eager = model.eager_attention_forward

    def record(module: Any, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any) -> Any:
        result = eager(module, query, key, value, mask, **kwargs)
        seen.update(query=query, key=key, scaling=kwargs["scaling"], out=result[0])
        return result

    monkeypatch.setattr(model, "eager_attention_forward", record)
    if hasattr(layer.compressor, "indexer"):
        layer.compressor.indexer.register_forward_hook(
            lambda module, inputs, output: seen.update(indices=output)
        )
    x, position = hidden_states(), torch.arange(TOKENS).expand(2, -1)
    tables = {
        name: model.DeepseekV4RotaryEmbedding(layer.config)(x, position, layer_type=name)
        for name in ("main", "compress")
    }
    mask = masks.create_sliding_window_causal_mask(
        config=layer.config, inputs_embeds=x, attention_mask=None, cache=None,
        position_ids=position,
    )  # fmt: skip
    with torch.no_grad():
        layer(x, tables, position, mask)
    return seen


@pytest.mark.parametrize("kind", KINDS)
def test_shared_key_attention_equals_the_eager_layer(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = attention(kind)
    seen = recorded(layer, monkeypatch)
    keys = seen["key"].transpose(1, 2)
    arguments: dict[str, Any] = {
        "ori_kv": keys[:, :TOKENS], "sinks": layer.sinks.detach(), "cmp_mask_mode": 0,
        "softmax_scale": seen["scaling"], "ori_mask_mode": 4, "ori_win_left": WINDOW - 1,
        "ori_win_right": 0,
    }  # fmt: skip
    ratio = RATIOS.get(kind)
    if ratio:
        assert keys.shape[1] == TOKENS + TOKENS // ratio
        arguments |= {
            "cmp_kv": keys[:, TOKENS:], "cmp_ratio": ratio, "cmp_mask_mode": 3,
            "cmp_residual_kv": torch.full((2,), TOKENS % ratio, dtype=INT),
        }  # fmt: skip
    if "indices" in seen:
        arguments["cmp_sparse_indices"] = seen["indices"].to(INT)[:, :, None]
    query = seen["query"].transpose(1, 2)
    out, _ = ops.sparse_flash_mla(query, **arguments)
    torch.testing.assert_close(out, seen["out"], rtol=1e-5, atol=1e-5)
    mistakes = [{"ori_win_left": WINDOW}, {"sinks": layer.sinks.detach() + 1}]
    if "indices" in seen:
        mistakes.append({"cmp_sparse_indices": None})
    if ratio:
        mistakes.append({"cmp_mask_mode": 0, "cmp_sparse_indices": None})
    for wrong in mistakes:
        other, _ = ops.sparse_flash_mla(query, **(arguments | wrong))
        assert not torch.allclose(other, seen["out"], rtol=1e-3, atol=1e-3)


def operator_keys(module: Any, norm_size: int, ratio: int, cuts: list[int]) -> torch.Tensor:
    """All keys of both requests by the operator, in pieces that end at ``cuts``."""
    coff = module.kv_proj.weight.shape[0] // norm_size
    width = coff * norm_size
    table = torch.tensor([[1, 2], [4, 3]], dtype=INT)
    state = torch.zeros(5, 16, 2 * width)
    pieces, start = [], 0
    for stop in cuts:
        sin, cos = rope_tables(module, range(start // ratio, stop // ratio), ratio, stop - start)
        out, *_ = ops.compressor(
            hidden_states()[:, start:stop], module.kv_proj.weight, module.gate_proj.weight,
            state[..., :width], state[..., width:], module.position_bias, module.kv_norm.weight,
            sin, cos, kv_block_table=table, score_block_table=table,
            start_pos=torch.full((2,), start, dtype=INT), rope_head_dim=sin.shape[-1],
            cmp_ratio=ratio, coff=coff, norm_eps=module.kv_norm.variance_epsilon, rotary_mode=2,
        )  # fmt: skip
        pieces.append(out[:, : stop // ratio - start // ratio])
        start = stop
    return torch.cat(pieces, 1)


def rope_tables(
    module: Any, groups: range, ratio: int, tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """sin and cos of the new groups, one row for each that a call of so many tokens can end."""
    position = torch.zeros(2, -(-tokens // ratio), dtype=torch.long)
    position[:, : len(groups)] = torch.tensor(list(groups), dtype=torch.long) * ratio
    cos, sin = module.rotary_emb(torch.zeros(1), position, layer_type="compress")
    return sin.repeat_interleave(2, -1), cos.repeat_interleave(2, -1)


@pytest.mark.parametrize("cuts", [[TOKENS], [9, 10, 11, TOKENS]], ids=str)
@pytest.mark.parametrize("kind", list(RATIOS))
def test_compressor_equals_the_eager_module_with_its_cache(kind: str, cuts: list[int]) -> None:
    layer = attention(kind)
    ratio, x = RATIOS[kind], hidden_states()
    cache = caches.DynamicCache(config=layer.config)
    start = 0
    with torch.no_grad():
        for stop in cuts:
            position = torch.arange(start, stop).expand(2, -1)
            residual = layer.q_a_norm(layer.q_a_proj(x[:, start:stop]))
            keys, _ = layer.compressor(x[:, start:stop], residual, position, cache, 0)
            start = stop
        ours = operator_keys(layer.compressor, SIZE, ratio, cuts)
    assert keys.shape[2] == TOKENS // ratio
    torch.testing.assert_close(ours, keys[:, 0], rtol=1e-5, atol=1e-5)
    assert not torch.allclose(ours.roll(1, 1), keys[:, 0], rtol=1e-2, atol=1e-2)
    if kind == "compressed_sparse_attention":
        indexer = layer.compressor.indexer
        with torch.no_grad():
            ours = operator_keys(indexer, indexer.head_dim, ratio, cuts)
        want = cache.layers[0].compressed_kv["indexer"]
        torch.testing.assert_close(ours, want, rtol=1e-5, atol=1e-5)
