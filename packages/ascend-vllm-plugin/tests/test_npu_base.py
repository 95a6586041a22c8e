"""Which base NPU mode stands on, and what a vllm-ascend must have for the overlay."""

from types import ModuleType

import pytest

from ascend_vllm_plugin import EnvironmentVariableError, NpuBaseRefusedError, compat
from ascend_vllm_plugin.npu import base as bases
from ascend_vllm_plugin.npu import fit
from ascend_vllm_plugin.npu.base import OVERLAY, STANDALONE, choose_base, current_base
from ascend_vllm_plugin.npu.fit import VllmAscend, installed_vllm_ascend, misfits_of

FITS = VllmAscend("0.30.1", misfits=())
LACKS = VllmAscend("0.30.1", misfits=("NPUPlatform.set_device is missing",))
OLD = VllmAscend("0.29.0")


class NPUPlatform:
    """A stand-in of vllm-ascend's platform class: the names and signatures that are relied on."""

    device_type = "npu"
    dispatch_key = "PrivateUse1"

    @classmethod
    def get_attn_backend_cls(cls, selected_backend, attn_selector_config, num_heads=None): ...

    @classmethod
    def check_and_update_config(cls, vllm_config): ...

    @classmethod
    def import_kernels(cls): ...

    @classmethod
    def get_device_name(cls, device_id=0): ...

    @classmethod
    def set_device(cls, device): ...

    @classmethod
    def get_device_communicator_cls(cls): ...


@pytest.mark.parametrize(
    ("wish", "vllm_ascend", "base", "reason"),
    [
        ("auto", None, STANDALONE, "vllm-ascend is not installed"),
        ("auto", OLD, STANDALONE, "vllm-ascend 0.29.0 is for another vLLM than 0.30.0"),
        ("auto", FITS, OVERLAY, "vllm-ascend 0.30.1 for vLLM 0.30.0 is installed and fits"),
        ("overlay", FITS, OVERLAY, "vllm-ascend 0.30.1 for vLLM 0.30.0 is installed and fits"),
        ("standalone", None, STANDALONE, "ASCEND_VLLM_NPU=standalone"),
        ("standalone", FITS, STANDALONE, "ASCEND_VLLM_NPU=standalone"),
        ("standalone", LACKS, STANDALONE, "ASCEND_VLLM_NPU=standalone"),
    ],
)
def test_the_base_that_is_chosen(wish, vllm_ascend, base, reason):
    found = choose_base(wish, "0.30.0", vllm_ascend)
    assert (found.name, found.reason) == (base, reason)
    assert found.platform.startswith("ascend_vllm_plugin.npu.")


@pytest.mark.parametrize(
    ("wish", "vllm_ascend", "said"),
    [
        ("overlay", None, "vllm-ascend is not installed"),
        ("overlay", OLD, "vllm-ascend 0.29.0 is for another vLLM than 0.30.0"),
        ("overlay", LACKS, "NPUPlatform.set_device is missing"),
        ("auto", LACKS, "NPUPlatform.set_device is missing"),
    ],
)
def test_a_base_that_is_refused(wish, vllm_ascend, said):
    with pytest.raises(NpuBaseRefusedError) as raised:
        choose_base(wish, "0.30.0", vllm_ascend)
    text = str(raised.value)
    assert text.startswith("no overlay on vllm-ascend: ")
    assert said in text
    assert "Set ASCEND_VLLM_NPU=standalone to run without it" in text


def test_the_stand_in_fits():
    assert misfits_of(NPUPlatform) == []


def changed(**attributes):
    return type("NPUPlatform", (NPUPlatform,), attributes)


def old_question(cls, selected_backend, head_size, dtype, kv_cache_dtype, block_size, use_mla): ...


@pytest.mark.parametrize(
    ("platform", "said"),
    [
        (changed(set_device=None), "NPUPlatform.set_device is missing"),
        (
            changed(get_attn_backend_cls=classmethod(old_question)),
            "NPUPlatform.get_attn_backend_cls(selected_backend, head_size, dtype, "
            "kv_cache_dtype, block_size, use_mla) does not take (selected_backend, "
            "attn_selector_config, num_heads): missing a required argument: 'head_size'",
        ),
        (
            changed(check_and_update_config=lambda vllm_config: None),
            "NPUPlatform.check_and_update_config is no classmethod",
        ),
        (
            changed(device_type="cuda"),
            "NPUPlatform.device_type: found 'cuda'; allowed: 'npu'",
        ),
    ],
    ids=["missing", "signature", "kind", "attribute"],
)
def test_one_change_is_found_and_named(platform, said):
    assert misfits_of(platform) == [said]


@pytest.fixture
def install(monkeypatch):
    """Say what is installed; a platform class becomes `vllm_ascend.platform`."""
    bases._base_for.cache_clear()

    def say(platform=None, **versions):
        names = {name.replace("_", "-"): version for name, version in versions.items()}

        def version(name):
            if name not in names:
                raise compat.metadata.PackageNotFoundError(name)
            return names[name]

        monkeypatch.setattr(compat.metadata, "version", version)
        module = ModuleType("vllm_ascend.platform")
        if platform is not None:
            module.NPUPlatform = platform
        monkeypatch.setattr(fit, "import_module", lambda name: {module.__name__: module}[name])

    yield say
    bases._base_for.cache_clear()


def test_an_installed_vllm_ascend_is_judged(install):
    install(NPUPlatform, vllm="0.30.0", vllm_ascend="0.30.0")
    assert current_base().name == OVERLAY


def test_a_misfit_is_refused_with_its_reason(install):
    install(changed(set_device=None), vllm="0.30.0", vllm_ascend="0.30.0")
    with pytest.raises(NpuBaseRefusedError, match=r"NPUPlatform\.set_device is missing"):
        current_base()


def test_a_module_without_the_class_is_a_misfit(install):
    install(vllm="0.30.0", vllm_ascend="0.30.0")
    with pytest.raises(NpuBaseRefusedError, match=r"vllm_ascend\.platform has no NPUPlatform"):
        current_base()


def test_a_module_that_cannot_be_imported_is_a_misfit(install, monkeypatch):
    install(vllm="0.30.0", vllm_ascend="0.30.0")

    def fail(name):
        raise ImportError("libfoo.so: cannot open shared object file")

    monkeypatch.setattr(fit, "import_module", fail)
    with pytest.raises(NpuBaseRefusedError, match=r"cannot be imported: libfoo\.so"):
        current_base()


@pytest.mark.parametrize("wish", ["auto", "standalone"])
def test_what_is_not_taken_is_not_imported(wish, install, monkeypatch):
    version = {"auto": "0.29.0", "standalone": "0.30.0"}[wish]
    install(NPUPlatform, vllm="0.30.0", vllm_ascend=version)
    monkeypatch.setenv("ASCEND_VLLM_NPU", wish)
    monkeypatch.setattr(fit, "import_module", lambda name: pytest.fail(f"imported {name}"))
    assert current_base().name == STANDALONE


def test_an_unknown_wish_is_refused(install, monkeypatch):
    install(vllm="0.30.0")
    monkeypatch.setenv("ASCEND_VLLM_NPU", "yes")
    with pytest.raises(EnvironmentVariableError, match="ASCEND_VLLM_NPU='yes'"):
        current_base()


def test_no_vllm_ascend_here(install):
    install(vllm="0.30.0")
    assert installed_vllm_ascend() is None
