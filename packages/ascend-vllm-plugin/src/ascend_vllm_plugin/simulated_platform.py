"""The platform of simulate mode: vLLM's CPU platform with our attention backends."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.platforms.cpu import CpuPlatform
from vllm.platforms.interface import PlatformEnum

from ascend_vllm_plugin import compat, selection
from ascend_vllm_plugin.environment import pin_profile
from ascend_vllm_plugin.latent_settings import latent_settings_kept
from ascend_vllm_plugin.patches import dflash2_on_v1, kernel_scan
from ascend_vllm_plugin.platform_steps import prepare_configuration, take_worker

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm.v1.attention.selector import AttentionSelectorConfig

WORKER = "ascend_vllm_plugin.worker.SimulatedAscendWorker"


class SimulatedAscendPlatform(CpuPlatform):
    """A CPU to vLLM (`PlatformEnum.CPU`), an NPU to the choice of attention backends.

    It stays `CPU` because code of vLLM outside attention asks `is_cpu()`; an out-of-tree enum
    would send custom ops and MoE layers down paths that do not exist here.
    """

    _enum = PlatformEnum.CPU

    @classmethod
    def check_and_update_config(cls, vllm_config: VllmConfig) -> None:
        """Take our worker where the user left the choice, check our options, mark drafts.

        vLLM calls this again for every configuration derived from the first.

        Raises:
            OptionError: our part of `--additional-config` is wrong.
            DraftRefusedError: the draft does not fit the target or the engine.
            NoBackendError: the model has layers that no backend of ours computes.
            SimulationUnavailableError: vLLM was built without its CPU kernels.
        """
        cls.import_kernels()
        compat.require_cpu_kernels()
        pin_profile()
        selection.require_attention_layers(vllm_config)
        prepare_configuration(vllm_config)
        dflash2_on_v1.allow_configuration()
        take_worker(vllm_config, WORKER)
        with latent_settings_kept(vllm_config):
            super().check_and_update_config(vllm_config)

    @classmethod
    def register_triton_kernel_overrides(cls) -> None:
        """Replace Triton kernels by C++ ones, as vLLM's platforms do since 0.31 in every worker."""
        kernel_scan.apply()
        super().register_triton_kernel_overrides()

    @classmethod
    def get_attn_backend_cls(
        cls,
        selected_backend: AttentionBackendEnum | None,
        attn_selector_config: AttentionSelectorConfig,
        num_heads: int | None = None,
    ) -> str:
        """Class path of the attention backend for layers of one kind.

        Raises:
            NoBackendError: no backend takes them; the message has every reason.
        """
        from vllm.config import get_current_vllm_config

        if selection.user_choice(selected_backend) is None:
            route = selection.select(attn_selector_config, get_current_vllm_config(), num_heads)
        else:
            path = super().get_attn_backend_cls(
                selected_backend,  # type: ignore[arg-type]  # vLLM passes None as well
                attn_selector_config,
                num_heads,
            )
            route = selection.Route(path, selection.option_of_current_layer(), None)
        selection.record(attn_selector_config, route)
        return route.class_path
