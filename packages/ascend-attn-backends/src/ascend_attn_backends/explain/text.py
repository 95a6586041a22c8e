"""The explanation for people."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ..draft_gate import GateTerm
from .layers import ExplainedLayer

_MARKS = {"holds": "holds", "relaxed": "RELAXED", "broken": "BROKEN"}


def as_text(layers: Iterable[ExplainedLayer], soc_name: str) -> str:
    """One paragraph per kind of layer: the choice, every backend's reasons, the draft gate."""
    return "\n\n".join("\n".join(_paragraph(layer, soc_name)) for layer in layers)


def _paragraph(layer: ExplainedLayer, soc_name: str) -> Iterator[str]:
    plural = "s" * (layer.count != 1)
    yield (
        f"{layer.role}: {layer.count} layer{plural} ({layer.kind}) on {soc_name}: "
        f"{layer.backend or 'no backend'}"
    )
    yield from (f"  {refusal}" for refusal in layer.architecture_refusals)
    width = max(len(verdict.backend) for verdict in layer.verdicts)
    for verdict in layer.verdicts:
        chosen = verdict.backend == layer.backend
        state = "chosen" if chosen else "accepted" if verdict.accepted else "refused"
        yield f"  {verdict.backend:<{width}}  {state}"
        yield from (f"  {'':<{width}}    {refusal}" for refusal in verdict.refusals)
    if layer.gate:
        yield "  draft gate, term by term:"
        yield from _gate_lines(layer.gate)


def _gate_lines(terms: Iterable[GateTerm]) -> Iterator[str]:
    numbers: dict[str, int] = {}
    for term in terms:
        numbers[term.kind] = numbers.get(term.kind, 0) + 1
        label = f"{term.kind} {numbers[term.kind]}"
        line = f"    {label:<15} {_MARKS[term.state]:<7}  {term.title}; found {term.found}"
        yield line if term.state == "holds" else f"{line}; allowed: {term.allowed}"
