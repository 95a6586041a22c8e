"""vLLM on Ascend: routed, explained attention backends and drafters."""
