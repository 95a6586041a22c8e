"""The platform of the overlay base: vllm-ascend's, with our backends and their selection.

vllm-ascend keeps its worker and runner, MoE and quantised layers, communication and graphs. What
its platform answers when vLLM asks for an attention backend is replaced where a backend of ours
has an adapter for vllm-ascend's caches and takes the layer; everything else stays its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger

from ascend_attn_backends import NoBackendError
from ascend_vllm_plugin import compat, selection
from ascend_vllm_plugin.npu.announcement import announce_npu
from ascend_vllm_plugin.npu.fit import needs
from ascend_vllm_plugin.platform_steps import prepare_configuration

if TYPE_CHECKING:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm.v1.attention.selector import AttentionSelectorConfig

ADAPTERS: Mapping[str, str] = {
    "standard": "ascend_vllm_plugin.npu.backends.OverlayStandardBackend",
    "draft_flash": "ascend_vllm_plugin.npu.backends.OverlayDraftFlashBackend",
}
"""Backend of ascend-attn-backends -> its adapter on this base."""

REPORTS = "ascend_vllm_plugin.report.RoutingReport"
"""What is added to vllm-ascend's worker, where the user adds nothing else."""

THEIRS = "vllm-ascend"

logger = init_logger("vllm.ascend_vllm_plugin")


def overlay_on(platform: Any) -> type:
    """A subclass of vllm-ascend's platform class; `npu.fit` has judged that class.

    Args:
        platform: `vllm_ascend.platform.NPUPlatform`.
    """

    class OverlayAscendPlatform(platform):  # type: ignore[misc]  # known when it is imported
        """vllm-ascend's platform, with our selection of attention backends."""

        @classmethod
        def check_and_update_config(cls, vllm_config: Any) -> None:
            """Say where we run, check our options and mark drafts; the rest is vllm-ascend's.

            Raises:
                OptionError, DraftRefusedError: as `prepare_configuration`.
                NpuUnavailableError, EnvironmentVariableError: as `announce_npu`.
            """
            announce_npu()
            prepare_configuration(vllm_config)
            super().check_and_update_config(vllm_config)
            if not vllm_config.parallel_config.worker_extension_cls:
                vllm_config.parallel_config.worker_extension_cls = REPORTS

        @classmethod
        def get_attn_backend_cls(
            cls,
            selected_backend: AttentionBackendEnum | None,
            attn_selector_config: AttentionSelectorConfig,
            num_heads: int | None = None,
        ) -> str:
            """Class path of the attention backend for layers of one kind: ours, or its own."""

            def theirs() -> str:
                answer: str = super(OverlayAscendPlatform, cls).get_attn_backend_cls(
                    selected_backend=selected_backend,
                    attn_selector_config=attn_selector_config,
                    num_heads=num_heads,
                )
                return answer

            route = _route(selected_backend, attn_selector_config, num_heads, theirs)
            selection.record(attn_selector_config, route)
            return route.class_path

    OverlayAscendPlatform.__module__ = __name__
    OverlayAscendPlatform.__qualname__ = "OverlayAscendPlatform"
    return OverlayAscendPlatform


def _route(
    selected: AttentionBackendEnum | None,
    config: AttentionSelectorConfig,
    num_heads: int | None,
    theirs: Callable[[], str],
) -> selection.Route:
    """Ours where one takes the layer; what the user named, and what none takes, is vllm-ascend's.

    A layer that nobody of ours takes is no error here: without the overlay vllm-ascend would have
    computed it. The log has the reasons.
    """
    from vllm.config import get_current_vllm_config

    if selected is not None and selected.name != compat.OUR_BACKEND_NAME:
        return selection.Route(theirs(), selection.option_of_current_layer(), None)
    try:
        route = selection.select(config, get_current_vllm_config(), num_heads, ADAPTERS)
    except NoBackendError as nobody:
        route = selection.Route(theirs(), THEIRS, None)
        logger.info("attention by %s, %s:\n%s", THEIRS, route.class_path, nobody)
        return route
    logger.info("attention by %s, chosen by %s", route.class_path, route.chosen_by)
    return route


@cache
def _installed() -> type:
    module: Any = import_module(needs()["module"])
    return overlay_on(getattr(module, needs()["platform_class"]))


def __getattr__(name: str) -> type:
    """The class on the installed vllm-ascend, which this module does not import by itself."""
    if name != "OverlayAscendPlatform":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _installed()
