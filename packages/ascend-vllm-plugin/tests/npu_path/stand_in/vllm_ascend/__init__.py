"""A stand-in of vllm-ascend's two entry points; it wants every vLLM, as vllm-ascend does."""

from __future__ import annotations


def register() -> str:
    return "vllm_ascend.platform.NPUPlatform"


def register_connector() -> None:
    print("stand-in: connectors registered")
