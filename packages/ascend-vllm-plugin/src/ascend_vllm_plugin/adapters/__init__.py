"""Adapters: vLLM's attention interface in front of the backends of ascend-attn-backends.

They translate arguments and hold no attention maths.
"""
