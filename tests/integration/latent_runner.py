"""Several vLLM engines, one after the other, in one process: `latent_runner.py JOB RESULT`.

The job is JSON: `models`, folder -> function of `latent_models.py` or `tiny_models.py` and its
arguments, made first;
`engines`, a list of `name`, `engine` (arguments of `vllm.LLM`), `runs` (as in `engine_runner.py`),
`port` (of the rendezvous where the process is one of several ranks) and `probe_merges`; and
`reference`, names of engines whose first run transformers is to judge. Loading vLLM takes much
longer than a tiny engine does, hence one process.

The result is JSON: `engines` by name with their runs, the backends of their layers and what vLLM's
own functions that merge ranks do if asked for; and `reference` by name of the engine: for each
prompt what `hf_check.py` says.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import engine_runner
import latent_faults
import latent_models
import tiny_models
from hf_check import judge
from patch_probe import probe

from ascend_vllm_plugin.garbage import postponed


def watch_backends() -> None:
    """Count what our backends compute, layer by layer."""
    import ascend_attn_backends as backends

    for cls, name in (
        (backends.AscendMLAImpl, "forward_mqa"),
        (backends.AscendMLAImpl, "forward_mqa_partial"),
        (backends.AscendSFAImpl, "forward"),
        (backends.AscendSFAImpl, "forward_partial"),
        (backends.AscendSFAIndexerDCPImpl, "forward"),
        (backends.AscendAttentionDCPImpl, "forward"),
        (backends.AscendFAImpl, "forward"),
        (backends.AscendDSAImpl, "forward"),
        (backends.AscendDSAIndexerImpl, "forward"),
    ):
        engine_runner.count(cls, name, f"{cls.__name__}.{name}")


STOCK_MERGES: dict[str, Any] = {}
"""The functions of vLLM that merge ranks, as they are before an engine starts."""


def keep_stock_merges() -> None:
    """Remember the functions that a patch replaces."""
    from vllm.v1.attention.ops import dcp

    from ascend_vllm_plugin.patches.dcp_merge import REPLACEMENTS

    STOCK_MERGES.update({name: getattr(dcp, name) for name in REPLACEMENTS})


def stock_merges() -> dict[str, Any]:
    """What each of them makes of two tokens and four heads, or its error; and the kernel's type."""
    import torch
    from vllm.distributed import get_dcp_group
    from vllm.v1.attention.ops import dcp

    part = torch.ones(2, 4, 16), torch.zeros(2, 4)
    said = {
        name: probe(lambda merge=merge: merge(*part, get_dcp_group()).tolist())
        for name, merge in STOCK_MERGES.items()
    }
    return {"functions": said, "a2a kernel": type(dcp._dcp_a2a_unpack_combine_kernel).__name__}


def wait_without_spinning() -> None:
    """Let ranks exchange tensors through gloo only.

    In shared memory, vLLM's choice on one machine, a rank spins until the other one has come, and
    takes the core from it where there is only one.
    """
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    CpuCommunicator._all_group_ranks_share_shm_group_name = lambda self: False


@contextmanager
def started(arguments: dict[str, Any]) -> Iterator[Any]:
    """An engine while the context lasts; another one may follow in this process."""
    with postponed():  # vLLM collects garbage a dozen times for an engine
        from vllm import LLM
        from vllm.distributed import cleanup_dist_env_and_memory
    llm = LLM(**arguments)
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()


def run_engine(job: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Start an engine, let it generate, and stop it."""
    os.environ["ASCEND_VLLM_ROUTING_FILE"] = str(folder / f"{job['name']}.routing.json")
    if "port" in job:
        os.environ["MASTER_PORT"] = str(job["port"])
    with started(job["engine"]) as llm:
        runs = {}
        for run in job["runs"]:
            before = engine_runner.speculation_metrics(llm)
            runs[run["name"]] = engine_runner.generate(llm, run)
            after = engine_runner.speculation_metrics(llm)
            runs[run["name"]]["speculation"] = {"before": before, "after": after}
        merges = stock_merges() if job.get("probe_merges") else None
        layers = llm.apply_model(engine_runner.layer_backends)[0]
    return {"runs": runs, "layers": layers, "merges": merges}


def reference(job: dict[str, Any], result: dict[str, Any]) -> list[dict[str, Any]]:
    """What transformers says of an engine's first run."""
    run = job["runs"][0]
    outputs = result["runs"][run["name"]]["tokens"]
    pairs = zip(run["prompts"], outputs, strict=True)
    return judge(job["engine"]["model"], [{"prompt": p, "output": o} for p, o in pairs])


def main(job_file: str, result_file: str) -> None:
    """Run the job and write its result."""
    job = json.loads(Path(job_file).read_text(encoding="utf-8"))
    with postponed():
        watch_backends()
        keep_stock_merges()
    if "RANK" in os.environ:
        wait_without_spinning()
    engine_runner.FAULTS.update(latent_faults.FAULTS)
    for folder, (maker, *arguments) in job["models"].items():
        module = latent_models if hasattr(latent_models, maker) else tiny_models
        getattr(module, maker)(Path(folder), *arguments)
    result: dict[str, Any] = {"engines": {}, "reference": {}}
    for engine in job["engines"]:
        name = engine["name"]
        result["engines"][name] = run_engine(engine, Path(result_file).parent)
        if name in job["reference"]:
            result["reference"][name] = reference(engine, result["engines"][name])
    Path(result_file).write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
