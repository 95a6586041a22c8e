"""The routing table: written, read back, shown."""

import json
import subprocess
import sys

import attrs
import pytest

from ascend_attn_backends import GateTerm, Verdict
from ascend_attn_ops import Refusal
from ascend_vllm_plugin import RoutingFileError, RoutingRow, RoutingTable, read_routing
from ascend_vllm_plugin.cli import main
from ascend_vllm_plugin.routing import DraftPlans

STRANGER = Refusal("mla.use_mla", "use_mla", "False", "True", "a table", 561002)
REFUSAL = Refusal("fa3.consistency", "consistency", "False", "True", "a table", 561002)
RUNNER = GateTerm(
    rule="draft_flash.runner",
    kind="condition",
    title="V1 model runner",
    parameter="runner",
    found="v2",
    allowed="v1",
    source="a gate",
    state="relaxed",
)
TABLE = RoutingTable(
    mode="simulated",
    profile="Ascend950",
    vllm="0.30.0",
    model="some/model",
    speculation={"method": "custom_class", "tokens": 4},
    rows=(
        RoutingRow(
            role="target",
            kind="target, full attention",
            layers=("a.0", "a.1"),
            backend="standard",
            backend_class="x.Y",
            chosen_by="selection",
            request={"head_size": 64, "sliding_window": None},
            verdicts=(
                Verdict("standard", ()),
                Verdict("fa3", (REFUSAL,)),
                Verdict("mla", (STRANGER, REFUSAL)),
                Verdict("sfa", (attrs.evolve(STRANGER, parameter="use_mla, use_sparse"),)),
            ),
        ),
        RoutingRow(
            role="draft",
            kind="draft, full attention",
            layers=("b.0",),
            backend="draft_flash",
            backend_class="x.Z",
            chosen_by="selection",
            request={"head_size": 64, "sliding_window": None},
            verdicts=(Verdict("draft_flash", ()), Verdict("standard", ())),
            gate=(RUNNER,),
        ),
    ),
    plans=DraftPlans(layers=1, per_step=1, builds=3, hits=2, evictions=0),
)


def test_a_table_survives_its_file(tmp_path):
    TABLE.write(tmp_path / "routing.json")
    assert read_routing(tmp_path / "routing.json") == TABLE
    assert [path.name for path in tmp_path.iterdir()] == ["routing.json"]


def test_a_failed_write_leaves_nothing(tmp_path):
    (tmp_path / "routing.json").mkdir()
    with pytest.raises(OSError, match=r"routing\.json"):
        TABLE.write(tmp_path / "routing.json")
    assert [path.name for path in tmp_path.iterdir()] == ["routing.json"]


def test_text():
    assert TABLE.render().splitlines() == [
        "Ascend attention routing (simulated Ascend950, vLLM 0.30.0)",
        "model: some/model",
        "speculation: method custom_class, tokens 4",
        "target, full attention: 2 layers -> standard (x.Y), chosen by selection",
        "  standard: takes it",
        "  fa3: refused, consistency: found False; allowed: True "
        "[fa3.consistency, CANN 561002; a table]",
        "  for other architectures: mla, sfa",
        "draft, full attention: 1 layer -> draft_flash (x.Z), chosen by selection",
        "  draft_flash: takes it",
        "    relaxed, runner: found v2; allowed: v1 [draft_flash.runner; a gate]",
        "  standard: takes it",
        "draft plans: 1 per draft step for 1 layers; built 3, reused 2, dropped 0",
    ]


def test_a_table_without_drafts_says_nothing_of_plans():
    plain = attrs.evolve(TABLE, rows=TABLE.rows[:1], plans=None)
    assert "draft" not in plain.render()


def test_only_the_gated_backend_relaxes_the_gate():
    fallen_back = attrs.evolve(TABLE.rows[1], backend="standard")
    assert TABLE.rows[1].relaxations == (RUNNER,)
    assert fallen_back.relaxations == ()


def data(**changes):
    return {**json.loads(TABLE.to_json()), **changes}


def vars_of_plans():
    return attrs.asdict(TABLE.plans)


def row_with(**changes):
    return data(rows=[{**attrs.asdict(TABLE.rows[0]), **changes}])


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("{", "Expecting"),
        ("[]", "a field is missing or wrong"),
        ("{}", "its format is None, this version reads 2"),
        (json.dumps(data(format=1)), "its format is 1, this version reads 2"),
        (json.dumps(data(rows=[{}])), "a field is missing or wrong"),
        (json.dumps(data(further=1)), "a field is missing or wrong"),
        (json.dumps(data(rows=5)), "a field is missing or wrong"),
        (json.dumps(data(speculation="ngram")), "'speculation' must be"),
        (json.dumps(data(model=None)), "'model' must be"),
        (json.dumps(data(plans={**vars_of_plans(), "builds": "3"})), "'builds' must be"),
        (json.dumps(row_with(layers=[1])), "'layers' must be"),
        (json.dumps(row_with(verdicts=[{"backend": 1, "refusals": []}])), "1 is no str"),
        (json.dumps(row_with(gate=[{"rule": 2}])), "2 is no str"),
        ("[" * 100_000, "recursion"),
        (b"\xff\xfe", "decode"),
    ],
)
def test_other_files_are_refused(content, reason, tmp_path, capsys):
    path = tmp_path / "file.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(RoutingFileError) as raised:
        read_routing(path)
    assert str(path) in str(raised.value)
    assert reason in str(raised.value)
    assert main(["routing", str(path)]) == 2
    assert capsys.readouterr().err == f"ascend-vllm: {raised.value}\n"


def test_a_missing_file_is_named(tmp_path, capsys):
    assert main(["routing", str(tmp_path / "none.json")]) == 2
    assert "there is no such file" in capsys.readouterr().err


def test_the_module_prints_a_table(tmp_path):
    TABLE.write(tmp_path / "routing.json")
    done = subprocess.run(
        [sys.executable, "-m", "ascend_vllm_plugin", "routing", str(tmp_path / "routing.json")],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    assert done.stdout == TABLE.render() + "\n"


def test_a_reader_that_has_seen_enough_is_no_error(tmp_path):
    attrs.evolve(TABLE, rows=TABLE.rows * 2000).write(tmp_path / "routing.json")
    command = [
        sys.executable,
        "-m",
        "ascend_vllm_plugin",
        "routing",
        str(tmp_path / "routing.json"),
    ]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout.readline().startswith("Ascend attention routing")
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait(60) == 0
