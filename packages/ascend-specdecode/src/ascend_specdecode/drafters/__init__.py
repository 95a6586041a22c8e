"""Drafters: they propose what a target may say next.

* :class:`PromptLookupDrafter`, :class:`SuffixDrafter`: from the sequence's own text, no model
* :class:`ModelDrafter`: a smaller language model
* :class:`HiddenStateDrafter`: a layer on the target's hidden states (MTP, EAGLE)
* :class:`BlockDrafter`: all tokens at once (DFlash, Medusa)
* :class:`FirstDrafter`, :class:`RaceDrafter`, :class:`TreeOfDrafts`: several of them

Those with a model take it as a small protocol (:mod:`ascend_specdecode.drafters.models`).
"""

from __future__ import annotations

from ascend_specdecode.drafters.block import BlockDrafter
from ascend_specdecode.drafters.composite import FirstDrafter, RaceDrafter, TreeOfDrafts
from ascend_specdecode.drafters.draft_model import ModelDrafter
from ascend_specdecode.drafters.draws import DraftDraws
from ascend_specdecode.drafters.hidden_state import HiddenStateDrafter
from ascend_specdecode.drafters.lookup import NgramIndex, PromptLookupDrafter
from ascend_specdecode.drafters.models import (
    BlockModel,
    DraftInput,
    DraftModel,
    DraftOutput,
    HiddenStateModel,
)
from ascend_specdecode.drafters.suffix import SuffixAutomaton, SuffixDrafter
from ascend_specdecode.drafters.vocabulary import DraftVocabulary

__all__ = [
    "BlockDrafter",
    "BlockModel",
    "DraftDraws",
    "DraftInput",
    "DraftModel",
    "DraftOutput",
    "DraftVocabulary",
    "FirstDrafter",
    "HiddenStateDrafter",
    "HiddenStateModel",
    "ModelDrafter",
    "NgramIndex",
    "PromptLookupDrafter",
    "RaceDrafter",
    "SuffixAutomaton",
    "SuffixDrafter",
    "TreeOfDrafts",
]
