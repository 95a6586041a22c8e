"""`ascend-vllm serve`: vLLM's own server, through the plugin, on this machine alone.

Two servers run at once, one with a drafter of ours and one with a draft on the draft backend. They
are asked, and told to stop as a service manager does it; the tests look at what was said, and left.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import attrs
import pytest
from draft_models import make_qwen3_config
from engines import REPOSITORY, environment, run_python

sys.path.insert(0, str(REPOSITORY / "tools"))

from ascend_demo.server import ServerSettings, choose_port, fetch, serving

from ascend_vllm_plugin import RoutingTable, read_routing
from ascend_vllm_plugin.plan_reports import SECONDS

pytestmark = pytest.mark.engine

GLM, DRAFT = REPOSITORY / "assets" / "tiny_glm", REPOSITORY / "assets" / "tiny_glm_dflash"
TOKENS = 20
PROMPT = [5, 6, 7, 8] * 4
OPTIONS = (
    *("--served-model-name", "tiny", "--skip-tokenizer-init", "--enforce-eager"),
    *("--max-model-len", "256", "--num-gpu-blocks-override", "64", "--dtype", "bfloat16"),
)
LOOPBACK = {"0100007F"}
"""127.0.0.1 as /proc/net/tcp writes it."""
TITLE = "Ascend attention routing (simulated "


@attrs.frozen
class Outcome:
    """What a server said, and what it left after SIGTERM."""

    answers: list[list[int]]
    metrics: str
    listeners: set[str]
    counters: tuple[int, int]
    log: str
    table: RoutingTable

    def metric(self, name: str) -> float:
        """Value of the only sample of a metric."""
        (line,) = (one for one in self.metrics.splitlines() if one.startswith(name + "{"))
        assert 'engine="0"' in line
        assert 'model_name="tiny"' in line
        return float(line.rpartition(" ")[2])


def settings(folder: Path, drafts: dict[str, Any], *options: str) -> ServerSettings:
    """The command as a user types it, with a folder of its own for all that it leaves."""
    port = choose_port(None)
    command = (sys.executable, "-m", "ascend_vllm_plugin", "serve", str(GLM), *options)
    further = ("--port", str(port), *OPTIONS, "--speculative-config", json.dumps(drafts))
    (folder / "temporary").mkdir(parents=True)
    own = {
        "ASCEND_VLLM_ROUTING_FILE": str(folder / "routing.json"),
        "TMPDIR": str(folder / "temporary"),
        # A socket's path is short, so vLLM's are where all temporary files are.
        "VLLM_RPC_BASE_PATH": tempfile.gettempdir(),
    }
    return ServerSettings(
        command=(*command, *further),
        environment=environment(simulate=False, **own),
        port=port,
        log=folder / "server.log",
    )


def complete(port: int, prompt: list[int]) -> list[int]:
    """Tokens that the server answers to a prompt of tokens."""
    asked = {"prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "return_token_ids": True}
    body = json.dumps({**asked, "model": "tiny", "detokenize": False, "ignore_eos": True})
    with closing(HTTPConnection("127.0.0.1", port, timeout=300)) as connection:
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        text = answer.read().decode()
        assert answer.status == 200, text
        found: list[int] = json.loads(text)["choices"][0]["token_ids"]
        return found


def listeners(port: int) -> set[str]:
    """Addresses on which somebody listens to a port (state 0A in /proc/net/tcp, and tcp6)."""
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text(encoding="ascii").splitlines()[1:]:
            address, _, state = line.split()[1:4]
            host, _, number = address.partition(":")
            if state == "0A" and int(number, 16) == port:
                found.add(host)
    return found


def plans_are_whole(folder: Path) -> bool:
    """Whether the plans in the routing file of a running server end with a whole draft step.

    They are written beside the engine: those of a step that runs may be built and not yet reused.
    """
    plans = read_routing(folder / "routing.json").plans
    return plans is None or 0 < plans.builds * (plans.layers - plans.per_step) == plans.hits


def ask(wanted: ServerSettings) -> Outcome:
    """Start a server, ask it twice, and end it with SIGTERM."""
    folder = wanted.log.parent

    def counters() -> int:
        return len(list(folder.glob("temporary/**/*.speculation")))

    with serving(wanted):
        answers = [complete(wanted.port, PROMPT) for _ in range(2)]
        metrics, found = fetch(f"{wanted.url}/metrics"), listeners(wanted.port)
        wait_for(lambda: plans_are_whole(folder), seconds=60 * SECONDS)
        before = counters()
    log = wanted.log.read_text(encoding="utf-8", errors="replace")
    table = read_routing(folder / "routing.json")
    return Outcome(answers, metrics, found, (before, counters()), log, table)


def wait_for(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    folder = tmp_path_factory.mktemp("serve")
    drafter = {"method": "custom_class", "model": "ascend_vllm_plugin.SuffixProposer"}
    servers = {
        "drafter": settings(
            folder / "drafter",
            {**drafter, "num_speculative_tokens": 3},
            *("--profile", "A3"),
            *("--additional-config", '{"ascend": {"draft_deadline_ms": 1000}}'),
        ),
        "draft": settings(
            folder / "draft",
            {"method": "dflash", "model": str(DRAFT), "num_speculative_tokens": 3},
            *("--profile", "A5"),
        ),
    }
    with ThreadPoolExecutor(max_workers=len(servers)) as pool:
        running = {name: pool.submit(ask, wanted) for name, wanted in servers.items()}
        return {name: one.result() for name, one in running.items()}


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, CompletedProcess[str]]:
    """Servers that cannot start: how they ended, and what they said."""
    folder = tmp_path_factory.mktemp("ended")
    heads = make_qwen3_config(folder / "heads", num_key_value_heads=3)
    servers = {
        "refused": [str(GLM), "--kv-cache-dtype", "fp8"],
        "failed": [str(heads), "--load-format", "dummy"],
    }
    options = ("--profile", "A5", "--port", str(choose_port(None)), *OPTIONS)
    command = ["-m", "ascend_vllm_plugin", "serve"]
    return {
        name: run_python([*command, *arguments, *options], environment(simulate=False))
        for name, arguments in servers.items()
    }


def test_a_model_that_is_refused_ends_with_the_reasons_alone(
    ended: dict[str, CompletedProcess[str]],
) -> None:
    done = ended["refused"]
    assert done.returncode == 1
    assert "\nascend-vllm: target layer, sfa, on Ascend950" in done.stderr
    assert "kv_cache_dtype: found fp8; allowed: auto or bfloat16" in done.stderr
    assert "Traceback" not in done.stderr + done.stdout
    assert "EngineCore" not in done.stderr + done.stdout


def test_a_failure_that_is_no_refusal_keeps_its_traceback(
    ended: dict[str, CompletedProcess[str]],
) -> None:
    done = ended["failed"]
    assert done.returncode != 0
    said = done.stderr + done.stdout
    assert "Traceback" in said
    assert "AssertionError: num_heads (4) is not divisible" in said


@pytest.mark.parametrize("name", ["drafter", "draft"])
def test_the_server_answers_on_this_machine_alone(name: str, outcomes: dict[str, Outcome]) -> None:
    first, second = outcomes[name].answers
    assert len(first) == TOKENS
    assert first == second
    assert outcomes[name].listeners == LOOPBACK


def test_layers_are_routed_for_the_profile_that_was_asked_for(
    outcomes: dict[str, Outcome],
) -> None:
    table = outcomes["drafter"].table
    assert table.profile.startswith("Ascend910_93")
    assert [row.backend for row in table.rows] == ["sfa", "sfa_indexer"]
    backends = [row.backend for row in outcomes["draft"].table.rows]
    assert backends == ["sfa", "draft_flash", "sfa_indexer"]


@pytest.mark.parametrize("name", ["drafter", "draft"])
def test_the_log_has_one_table_with_routing_and_reasons(
    name: str, outcomes: dict[str, Outcome]
) -> None:
    outcome = outcomes[name]
    assert outcome.log.count(TITLE) == 1
    begun = outcome.log.partition(TITLE)[2]
    for row in outcome.table.rows:
        assert f"{row.kind}: {len(row.layers)} layer" in begun
        assert f" -> {row.backend} ({row.backend_class}), chosen by {row.chosen_by}" in begun
    assert "  sfa: takes it" in begun
    assert "  sfa_dcp: refused, context_parallel_size: found 1; allowed: at least 2 [" in begun


def test_figures_of_speculation_are_on_metrics(outcomes: dict[str, Outcome]) -> None:
    drafter = outcomes["drafter"]
    ours = "ascend:spec_decode_num_"
    used = sum(drafter.metric(f"{ours}{kind}_drafts_total") for kind in ("ahead", "waited"))
    assert used == drafter.metric("vllm:spec_decode_num_drafts_total") > 0
    assert drafter.metric(f"{ours}draft_errors_total") == 0
    assert drafter.metric(f"{ours}speculative_tokens") == 3
    draft = outcomes["draft"]
    assert draft.metric("vllm:spec_decode_num_accepted_tokens_total") > 0
    assert "ascend:" not in draft.metrics


def test_plans_are_in_the_routing_file_of_a_server_that_was_ended(
    outcomes: dict[str, Outcome],
) -> None:
    plans, draft = outcomes["draft"].table.plans, outcomes["draft"]
    assert plans is not None
    assert 0 < plans.builds <= draft.metric("vllm:spec_decode_num_drafts_total") + 2
    assert plans.hits == plans.builds * (plans.layers - plans.per_step)
    assert outcomes["drafter"].table.plans is None


def test_no_counters_are_left_by_a_server_that_was_ended(outcomes: dict[str, Outcome]) -> None:
    assert outcomes["drafter"].counters == (1, 0)
    assert outcomes["draft"].counters == (0, 0)
