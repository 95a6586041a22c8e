"""Streams and events of an NPU where vLLM's V1 model runner says `torch.cuda`.

The runner copies sampled tokens to the host on a stream of its own, and takes stream, event and
context manager by name from `torch.cuda`, whatever the device is. vLLM's XPU runner puts those of
its device there as well.
"""

from __future__ import annotations

NAMES = ("Stream", "Event", "stream", "current_stream", "default_stream", "set_stream")
"""What the runner and its outputs use of `torch.cuda`; `torch.npu` has the same."""


def apply() -> bool:
    """Give `torch.cuda` the NPU's in this process; always needed."""
    import torch

    from ascend_vllm_plugin.npu.device import npu

    for name in NAMES:
        setattr(torch.cuda, name, getattr(npu(), name))
    return True
