"""What the platforms of this package do alike, whatever they stand on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ascend_vllm_plugin import compat
from ascend_vllm_plugin.draft_checks import require_fitting_draft
from ascend_vllm_plugin.facts import mark_drafts
from ascend_vllm_plugin.options import options_from
from ascend_vllm_plugin.speculation_metrics import export_speculation_metrics

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def prepare_configuration(vllm_config: VllmConfig) -> None:
    """Check our options and the draft; mark drafts; have metrics exported.

    vLLM calls a platform's `check_and_update_config` again for every configuration derived from
    the first, so twice is the same as once.

    Raises:
        OptionError: our part of `--additional-config` is wrong.
        DraftRefusedError: the draft does not fit the target or the engine.
    """
    options_from(vllm_config.additional_config)
    require_fitting_draft(vllm_config)
    compat.forget_selections()
    mark_drafts(vllm_config)
    export_speculation_metrics(vllm_config)


def take_worker(vllm_config: VllmConfig, worker: str) -> None:
    """Name our worker where the user left the choice."""
    if vllm_config.parallel_config.worker_cls == compat.AUTO_WORKER:
        vllm_config.parallel_config.worker_cls = worker
