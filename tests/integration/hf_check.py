"""HF transformers as the reference: `hf_check.py JOB_FILE RESULT_FILE`.

The job is JSON: `model` (folder), `cases` (list of `prompt` and `output` token ids). For each
case the model (float32, eager attention) is run once over prompt and output; the result holds
the argmax at each position of the output and the distance of the best logit from the second.
When the argmax equals the output everywhere, HF's own greedy decoding gives the same output: by
induction each token follows from the ones before it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch


def judge(folder: str, cases: list[dict[str, list[int]]]) -> list[dict[str, Any]]:
    """What the model in a folder says to each case, as in the result."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    results = []
    for case in cases:
        ids = torch.tensor([case["prompt"] + case["output"]])
        with torch.no_grad():
            kept = model(ids, logits_to_keep=len(case["output"]) + 1).logits[0].float()
        best = kept[:-1].topk(2, dim=-1)  # the last logits follow the output
        results.append(
            {
                "tokens": best.indices[:, 0].tolist(),
                "margins": (best.values[:, 0] - best.values[:, 1]).tolist(),
            }
        )
    return results


def main(job_file: str, result_file: str) -> None:
    """Run the job and write its result."""
    job = json.loads(Path(job_file).read_text(encoding="utf-8"))
    results = judge(job["model"], job["cases"])
    Path(result_file).write_text(json.dumps(results), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
