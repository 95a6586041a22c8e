"""What vLLM computes around latent attention, stock and patched: `latent_probe.py JOB RESULT`.

The job is empty. The result is JSON: `has_triton`, whether vLLM finds a Triton to run kernels;
`rotary`, what its rotation makes of queries [tokens, heads, size]; and `indexer`, the keys that its
indexer chooses for each token; these two stock, with all patches, and with all but one of those
that the probe needs, or the error that was raised. One process does it all, because loading vLLM
takes the time.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from latent_models import make_glm
from patch_probe import probe

INDEXER_PATCHES = ("indexer_cache", "indexer", "sparse_attn_indexer")
TOKENS, BLOCK_SIZE, TOP_K = 40, 16, 32


@contextlib.contextmanager
def patched(names: tuple[str, ...]) -> Iterator[None]:
    """vLLM with these patches, for a while."""
    from vllm.model_executor.custom_op import op_registry_oot
    from vllm.model_executor.models import deepseek_v2

    replaced = {name: getattr(deepseek_v2, name) for name in ("Indexer", "DeepseekV32IndexerCache")}
    registered = dict(op_registry_oot)
    try:
        for name in names:
            import_module(f"ascend_vllm_plugin.patches.{name}").apply()
        yield
    finally:
        op_registry_oot.clear()
        op_registry_oot.update(registered)
        for name, original in replaced.items():
            setattr(deepseek_v2, name, original)


def rotated() -> Any:
    """Queries of 3 tokens and 2 heads that are a strided part of a head, and keys of one head."""
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    torch.manual_seed(0)
    rope = RotaryEmbedding(64, 64, 16, 10000.0, False, torch.float32)
    query, key = torch.randn(3, 2, 96)[..., 32:], torch.randn(3, 1, 64)
    given = [query.tolist(), key.tolist()]  # before it is rotated in place
    found = rope.forward_cpu(torch.tensor([0, 5, 9]), query, key)
    return {"given": given, "found": [part.tolist() for part in found]}


def chosen(glm: Path) -> Any:
    """Keys that a layer's indexer chooses for the tokens of one prompt."""
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.forward_context import set_forward_context
    from vllm.model_executor.models import deepseek_v2

    config = EngineArgs(
        model=str(glm), dtype="float32", enforce_eager=True, skip_tokenizer_init=True
    ).create_engine_config()
    text = config.model_config.hf_text_config
    buffer = torch.full((TOKENS, TOP_K), -1, dtype=torch.int32)
    sizes = (config, text, text.hidden_size, text.q_lora_rank, None, config.cache_config)
    torch.manual_seed(0)
    with set_current_vllm_config(config):
        layer = deepseek_v2.Indexer(*sizes, buffer, "layer")
        for parameter in layer.parameters():
            torch.nn.init.normal_(parameter, std=0.1)
        weights = {name: weight.detach().double() for name, weight in layer.named_parameters()}
        for module in layer.modules():
            if hasattr(module, "quant_method"):  # lay the weights out, as after loading
                module.quant_method.process_weights_after_loading(module)
        cache, metadata = step_over(layer.k_cache, config)
        hidden, query = torch.randn(TOKENS, text.hidden_size), torch.randn(TOKENS, text.q_lora_rank)
        by_layer = {layer.k_cache.prefix: metadata}
        layer.k_cache.kv_cache = cache
        positions = torch.zeros(TOKENS, dtype=torch.int64)  # turned by nothing
        with set_forward_context(by_layer, config), torch.no_grad():
            layer(hidden, query, positions, no_rotation)
        return {"found": buffer.tolist(), "scores": scores(weights, hidden, query).tolist()}


def no_rotation(positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> Any:
    """A rotation by nothing."""
    return query, key


def step_over(k_cache: Any, config: Any) -> tuple[torch.Tensor, Any]:
    """An index cache as its layer wants it, and our metadata of a prompt."""
    from vllm.v1.attention.backend import CommonAttentionMetadata

    from ascend_vllm_plugin.adapters.indexer import IndexerMetadataBuilder

    spec = k_cache.get_kv_cache_spec(config)
    blocks = -(-TOKENS // BLOCK_SIZE)
    cache = torch.zeros(blocks, BLOCK_SIZE, spec.head_size, dtype=spec.dtype)
    starts, lens = (torch.tensor(values, dtype=torch.int32) for values in ([0, TOKENS], [TOKENS]))
    common = CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=lens,
        num_reqs=1,
        num_actual_tokens=TOKENS,
        max_query_len=TOKENS,
        max_seq_len=TOKENS,
        block_table_tensor=torch.arange(blocks, dtype=torch.int32)[None],
        slot_mapping=torch.arange(TOKENS),
    )
    block = SimpleNamespace(block_size=BLOCK_SIZE)
    builder = IndexerMetadataBuilder(block, [k_cache.prefix], config, torch.device("cpu"))
    return cache, builder.build(0, common)


def scores(
    weights: dict[str, torch.Tensor], hidden: torch.Tensor, query: torch.Tensor
) -> torch.Tensor:
    """[TOKENS, TOKENS] float64 scores by the formula of the indexer, -inf for later keys."""
    size = weights["k_norm.weight"].shape[0]
    rows = hidden.double() @ weights["wk_weights_proj.weight"].T
    key, heads = rows[:, :size], rows[:, size:]
    norm = weights["k_norm.weight"], weights["k_norm.bias"]
    key = torch.nn.functional.layer_norm(key, (size,), *norm, eps=1e-6)
    queries = (query.double() @ weights["wq_b.weight"].T).view(TOKENS, heads.shape[1], size)
    products = torch.einsum("qhd,kd->hqk", queries, key).relu()
    total = torch.einsum("hqk,qh->qk", products, heads)
    return total.masked_fill(torch.ones(TOKENS, TOKENS).triu(1).bool(), float("-inf"))


def probe_with(names: tuple[str, ...], call: Callable[[], Any]) -> dict[str, Any]:
    """What a call gives with these patches, or its error."""
    with patched(names):
        return probe(call)


def main(job_file: str, result_file: str) -> None:
    """Run the job and write its result."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.triton_utils import HAS_TRITON

    folder = Path(result_file).parent
    glm = make_glm(folder / "glm")
    rendezvous = f"file://{folder}/rendezvous"
    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, rendezvous, 0, "gloo")
        initialize_model_parallel()
        rotary = {
            "stock": probe_with((), rotated),
            "patched": probe_with(("rotary_embedding",), rotated),
        }
    cases = {"stock": (), "patched": INDEXER_PATCHES}
    for left_out in INDEXER_PATCHES:
        cases[left_out] = tuple(name for name in INDEXER_PATCHES if name != left_out)
    indexer = {name: probe_with(names, lambda: chosen(glm)) for name, names in cases.items()}
    result = {"has_triton": HAS_TRITON, "rotary": rotary, "indexer": indexer}
    Path(result_file).write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
