"""A real vLLM engine in a process of its own that computes only when it is told to.

Two of them take turns, so that what else the machine does hurts both sides alike. The process reads
a JSON object per line from its standard input and answers each with one.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, TextIO

import attrs

Prompts = list[list[int]]
# One thread, and none that spins: two threads of a busy machine wait for each other. The engine is
# part of the process, so that nothing runs between two requests.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}


class EngineEndedError(RuntimeError):
    """The process of an engine ended; its own words are in the output above."""

    def __init__(self, name: str, code: int | None) -> None:
        super().__init__(f"the engine {name!r} ended with code {code}")


@attrs.define(eq=False)
class Engine:
    """One side of a comparison.

    Attributes:
        name: For people.
        layers: Attention backend of each kind of layer, and how many have it.
    """

    name: str
    layers: dict[str, int]
    _process: subprocess.Popen[str]

    @classmethod
    def started(cls, name: str, model: Path, *, simulate: bool) -> Engine:
        """Start an engine: our backends in simulate mode, or vLLM as it is.

        Raises:
            EngineEndedError: It did not come up.
        """
        foreign = {k: v for k, v in os.environ.items() if not k.startswith(("ASCEND_", "VLLM_"))}
        chosen = {"ASCEND_VLLM_SIMULATE": "1"} if simulate else {}
        process = subprocess.Popen(
            [sys.executable, __file__, str(model)],
            env={**foreign, **ENVIRONMENT, **chosen},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        engine = cls(name, {}, process)
        engine.layers = engine._ask({"layers": True})
        return engine

    def prefill(self, prompts: Prompts, max_tokens: int) -> None:
        """Take in prompts of token ids and compute the first token of each."""
        self._ask({"prompts": prompts, "max_tokens": max_tokens})

    def decode(self, steps: int) -> float:
        """Compute further steps; returns the seconds of the processor that they took."""
        seconds: float = self._ask({"steps": steps})
        return seconds

    def tokens(self) -> Prompts:
        """Tokens of each prompt, after every request has come to its end."""
        found: Prompts = self._ask({"tokens": True})
        return found

    def stop(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)

    def _ask(self, question: dict[str, Any]) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise EngineEndedError(self.name, self._process.wait()) from None
        answer = self._process.stdout.readline()
        if not answer:
            raise EngineEndedError(self.name, self._process.wait())
        return json.loads(answer)


class _Served:
    """The engine inside the process."""

    def __init__(self, model: str) -> None:
        from vllm import LLM

        from ascend_vllm_plugin.patches import rotary_embedding

        # Without it vLLM's CPU kernel rotates the queries of MLA layers wrongly, on either side.
        rotary_embedding.apply()
        self._llm = LLM(
            model=model,
            dtype="float32",
            enforce_eager=True,
            skip_tokenizer_init=True,
            max_model_len=512,
            max_num_seqs=8,
            enable_prefix_caching=False,
        )
        self._requests = 0
        self._tokens: dict[str, list[int]] = {}

    def layers(self) -> dict[str, int]:
        found: dict[str, int] = self._llm.apply_model(_layer_backends)[0]
        return found

    def prefill(self, prompts: Prompts, max_tokens: int) -> float:
        from vllm import SamplingParams

        params = SamplingParams(
            max_tokens=max_tokens, temperature=0, detokenize=False, ignore_eos=True
        )
        self._tokens = {}
        for prompt in prompts:
            self._requests += 1
            name = str(self._requests)
            self._tokens[name] = []
            self._llm.llm_engine.add_request(name, {"prompt_token_ids": prompt}, params)
        gc.collect()
        return self.decode(1)

    def decode(self, steps: int) -> float:
        engine, start = self._llm.llm_engine, time.process_time()
        for _ in range(steps):
            for output in engine.step():
                self._tokens[output.request_id] = list(output.outputs[0].token_ids)
        return time.process_time() - start

    def finished(self) -> Prompts:
        while self._llm.llm_engine.has_unfinished_requests():
            self.decode(1)
        return list(self._tokens.values())

    def answer(self, question: dict[str, Any]) -> Any:
        if "prompts" in question:
            return self.prefill(question["prompts"], question["max_tokens"])
        if "steps" in question:
            return self.decode(question["steps"])
        return self.finished() if "tokens" in question else self.layers()


def _layer_backends(model: Any) -> dict[str, int]:
    counts: dict[str, int] = {}
    for module in model.modules():
        if hasattr(module, "attn_backend"):
            name = module.attn_backend.__qualname__
            counts[name] = counts.get(name, 0) + 1
    return counts


def _answers_apart() -> TextIO:
    """Where answers go; whatever else is printed goes to the standard error output."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def main(model: str) -> None:
    """Answer until the other side closes the pipe."""
    answers = _answers_apart()
    served = _Served(model)
    for line in sys.stdin:
        print(json.dumps(served.answer(json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
