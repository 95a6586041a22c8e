"""Running a Hugging Face model through the draft-verify engine, and what it should have said."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import anyio
import torch
from transformers import AutoModelForCausalLM

from ascend_specdecode import (
    Completion,
    Drafter,
    DraftVerify,
    EngineConfig,
    Finished,
    Request,
    Statistics,
    Target,
    Verifier,
)


def generate(
    target: Target[Any],
    drafter: Drafter | None,
    prompts: Sequence[Sequence[int]],
    num_tokens: int,
    *,
    verifier: Verifier[Any] | None = None,
    backend: str = "asyncio",
    **settings: Any,
) -> tuple[list[list[int]], Statistics]:
    """All prompts together; their tokens and the engine's counters."""
    config = EngineConfig(adaptive=None, draft_time_limit=None, **settings)
    done: dict[int, Completion] = {}

    async def one(engine: DraftVerify[Any], row: int, prompt: Sequence[int]) -> None:
        done[row] = await engine.complete(Request(list(prompt), max_new_tokens=num_tokens))

    async def main() -> Statistics:
        async with (
            DraftVerify(target, drafter, config, verifier=verifier) as engine,
            anyio.create_task_group() as group,
        ):
            for row, prompt in enumerate(prompts):
                group.start_soon(one, engine, row, prompt)
        return engine.statistics

    statistics = anyio.run(main, backend=backend)
    assert all(isinstance(one.ending, Finished) for one in done.values()), done
    return [list(done[row].tokens) for row in range(len(prompts))], statistics


@torch.inference_mode()
def argmax_after(model: Any, prompt: Sequence[int], tokens: Sequence[int]) -> list[int]:
    """The model's own choice at each place of ``tokens``, from one pass without a cache.

    Equal to ``tokens`` exactly if greedy decoding gives them.
    """
    whole = torch.tensor([[*prompt, *tokens]])
    logits = model(input_ids=whole, use_cache=False).logits[0]
    choices: list[int] = logits[len(prompt) - 1 : -1].argmax(-1).tolist()
    return choices


def eager_model(folder: Any) -> Any:
    """The model as transformers runs it, float32 and eager."""
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", local_files_only=True
    ).eval()
