"""NPU mode: vLLM on a device of type `npu`, on one of two bases.

`overlay` puts our backends and their selection on top of an installed vllm-ascend; `standalone`
brings a platform, a worker and a model runner of its own, written against vLLM's generic ones.
`detection` looks for the NPU, `base` decides, `fit` judges the vllm-ascend that is installed.
Nothing here was run on an NPU: see docs/npu_mode.md.
"""
