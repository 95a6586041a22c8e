"""The routing table: which backend serves which layers, and why not the others.

The worker writes it as JSON to the file named by `ASCEND_VLLM_ROUTING_FILE` once the model is
loaded, and logs it. The JSON holds the fields of the records below, plus `format`.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from ascend_attn_backends import Verdict
from ascend_attn_ops import Refusal
from ascend_vllm_plugin.errors import RoutingFileError

FORMAT = 1


@attrs.frozen
class RoutingRow:
    """Layers of one kind.

    Attributes:
        kind: for people, such as `target, full attention`.
        layers: names of the layers in vLLM.
        backend: name of the chosen backend.
        backend_class: its class in vLLM, as module.class.
        chosen_by: what decided: `selection`, or the option with which the user did.
        request: what the backends were asked, field by field.
        verdicts: what each backend of ours said; empty when nobody asked them.
    """

    kind: str
    layers: tuple[str, ...]
    backend: str
    backend_class: str
    chosen_by: str
    request: Mapping[str, Any]
    verdicts: tuple[Verdict, ...]


@attrs.frozen
class RoutingTable:
    """Routing of one loaded model.

    Attributes:
        mode: `simulated`: the model runs on a CPU, with the decisions of an NPU.
        profile: SoC or family that is simulated.
        vllm: version of vLLM.
        model: name or folder of the model.
        speculation: method, drafter and number of draft tokens; None without.
        rows: one for each kind of layer.
    """

    mode: str
    profile: str
    vllm: str
    model: str
    speculation: Mapping[str, Any] | None
    rows: tuple[RoutingRow, ...]

    def to_json(self) -> str:
        """The table as JSON text."""
        return json.dumps({"format": FORMAT, **attrs.asdict(self)}, indent=1)

    def write(self, path: Path) -> None:
        """Write the table; a reader sees the whole file or none."""
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(self.to_json())
            Path(temporary).replace(path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise

    def render(self) -> str:
        """The table as text for a log or a terminal."""
        lines = [f"Ascend attention routing ({self.mode} {self.profile}, vLLM {self.vllm})"]
        lines.append(f"model: {self.model}")
        if self.speculation is not None:
            said = ", ".join(f"{name} {value}" for name, value in self.speculation.items())
            lines.append(f"speculation: {said}")
        for row in self.rows:
            lines += _render_row(row)
        return "\n".join(lines)


def _render_row(row: RoutingRow) -> list[str]:
    lines = [
        f"{row.kind}: {len(row.layers)} layers -> {row.backend} ({row.backend_class}), "
        f"chosen by {row.chosen_by}"
    ]
    for verdict in row.verdicts:
        if verdict.accepted:
            lines.append(f"  {verdict.backend}: takes it")
        lines += [f"  {verdict.backend}: refused, {refusal}" for refusal in verdict.refusals]
    return lines


def read_routing(path: Path) -> RoutingTable:
    """Read a table that `RoutingTable.write` wrote.

    Raises:
        RoutingFileError: no such file, or it holds something else.
    """
    try:
        return _table(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise RoutingFileError(str(path), "there is no such file") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise RoutingFileError(str(path), str(error)) from error
    except (TypeError, KeyError, AttributeError) as error:
        raise RoutingFileError(str(path), f"a field is missing or wrong: {error}") from error
    except ValueError as error:
        raise RoutingFileError(str(path), str(error)) from error


def _table(data: dict[str, Any]) -> RoutingTable:
    found = data.pop("format", None)
    if found != FORMAT:
        raise ValueError(f"its format is {found!r}, this version reads {FORMAT}")
    rows = tuple(_row(row) for row in data.pop("rows"))
    return RoutingTable(**data, rows=rows)


def _row(data: dict[str, Any]) -> RoutingRow:
    verdicts = tuple(
        Verdict(verdict["backend"], tuple(Refusal(**said) for said in verdict["refusals"]))
        for verdict in data.pop("verdicts")
    )
    return RoutingRow(**{**data, "layers": tuple(data["layers"])}, verdicts=verdicts)
