from __future__ import annotations

from pathlib import Path

import pytest

from ascend_hwprofile.docs import main, render


def test_written_page_is_up_to_date(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "docs" / "hardware.md"
    assert main([str(path), "--check"]) == 1
    assert "does not exist" in capsys.readouterr().err
    assert not path.exists()
    assert main([str(path)]) == 0
    assert main([str(path), "--check"]) == 0
    path.write_text(path.read_text("utf8").replace("1850 MHz", "1851 MHz"), "utf8")
    assert main([str(path), "--check"]) == 1
    assert "is not what the data give" in capsys.readouterr().err


def test_page_states_facts_and_doubts() -> None:
    lines = render().splitlines()
    rows = {line.split(" | ")[0].lstrip("| "): line for line in lines if line.startswith("|")}
    assert "| Ascend910_9391 | A3 | 250 | 24 | 48 | 1850 MHz | 64 GiB | 192 MiB | ? |" in lines
    assert any("| Ascend910_9363 | A3 | 256 | 20 (?) | 40 (?)" in line for line in lines)
    flags = rows["`DEVICE_LENGTH_FLASH_ATTN`"].split(" | ")[2:]
    assert [flag.rstrip(" |") for flag in flags] == ["no", "no", "yes", "yes", "no", "no"]
    assert "first generation" in rows["Ascend910B"]


def test_every_table_is_well_formed() -> None:
    width = 0
    for line in render().splitlines():
        if not line.startswith("|"):
            width = 0
            continue
        cells = line.count("|")
        width = width or cells
        assert cells == width, line
