"""The data files: their schema, and that the check can fail."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from ascend_hwprofile import Capability, datacheck
from ascend_hwprofile.catalog import capability_table, entry_groups, read_table
from ascend_hwprofile.datacheck import problems, read_toml, staleness
from ascend_hwprofile.soc import name_key


def test_data_are_right() -> None:
    assert problems() == []


def changed(name: str, change: Callable[[dict[str, Any]], object]) -> list[str]:
    """Return the problems after a change to one file."""

    def read(wanted: str) -> Mapping[str, Any]:
        table = copy.deepcopy(dict(read_toml(wanted)))
        if wanted == name:
            change(table)
        return table

    return problems(read)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("families/a2", lambda t: t["soc"][0]["figures"]["cube_cores"].pop("source"), "source"),
        ("families/a2", lambda t: t["soc"][0].update(names=["910B1"]), "names"),
        ("families/a2", lambda t: t["soc"][0].update(colour="red"), "colour"),
        ("families/a2", lambda t: t["family"].update(default_soc="Ascend910B9"), "default SoC"),
        ("families/a3", lambda t: t["features"]["simt"].pop("reason"), "simt"),
        ("families/a5", lambda t: t["dtypes"]["int8"].update(confidence="sure"), "confidence"),
        ("families/a5", lambda t: t["dtypes"]["int8"].update(source="x"), "unknown source 'x'"),
        (
            "operators",
            lambda t: t["flash_attn"]["verdicts"].append({"products": ["A2"], "reason": "x"}),
            "two verdicts",
        ),
        ("operators", lambda t: t["flash_attn"].pop("api"), "api"),
        ("capabilities", lambda t: t["mla"].update(operators=["x"]), "unknown operator 'x'"),
        ("compatibility", lambda t: t["rule"][0].update(needs="x"), "unknown component 'x'"),
        ("compatibility", lambda t: t["rule"][0].update(same_parts=2), "exactly"),
    ],
)
def test_wrong_data_are_found(
    name: str, change: Callable[[dict[str, Any]], object], message: str
) -> None:
    found = changed(name, change)
    assert len(found) == 1
    assert found[0].startswith(f"{name}.toml: ")
    assert message in found[0]


def test_capabilities_and_their_definitions_are_the_same_set() -> None:
    assert set(capability_table()) == {capability.value for capability in Capability}


def test_no_two_socs_share_a_name() -> None:
    keys = [
        name_key(name)
        for group in entry_groups()
        for entry in group
        for name in (entry.soc_name, *entry.aliases)
    ]
    assert len(keys) == len(set(keys))


def test_compiled_data_are_those_of_the_toml_files() -> None:
    assert staleness() == []
    for name in ("families/a5", "operators", "compatibility"):
        assert read_table(name) == read_toml(name)


def test_stale_compiled_data_are_found_and_written_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "compiled.json"
    monkeypatch.setattr(datacheck, "_COMPILED", path)
    assert datacheck.main([]) == 1
    assert "compiled.json is stale" in capsys.readouterr().err
    assert datacheck.main(["--write"]) == 0
    path.write_text(path.read_text("utf8").replace("1850", "1851", 1), "utf8")
    assert datacheck.main([]) == 1


def test_wrong_data_are_not_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(datacheck, "_COMPILED", tmp_path / "compiled.json")
    monkeypatch.setattr(datacheck, "problems", lambda: ["a2.toml: wrong"])
    assert datacheck.main(["--write"]) == 1
    assert "a2.toml: wrong" in capsys.readouterr().err
    assert not (tmp_path / "compiled.json").exists()
