from __future__ import annotations

import importlib

import pytest

import ascend_hwprofile

EXPORTED = """
Capability Confidence Detection DtypeSupport Evidence Family Figure HardwareProfile HwProfileError
OperatorSupport Outcome SocId System UnknownFigureError UnknownOperatorError UnknownSocError
UnsupportedSocError detect known_profiles known_socs operator_names parse_soc_name profile_for
profile_from_environment
"""


def test_exported_names() -> None:
    assert sorted(ascend_hwprofile.__all__) == sorted(EXPORTED.split())


@pytest.mark.parametrize("name", EXPORTED.split())
def test_every_name_loads_and_is_documented(name: str) -> None:
    exported = getattr(ascend_hwprofile, name)
    assert exported.__doc__
    assert name in dir(ascend_hwprofile)
    assert exported.__name__ == name


def test_unknown_attribute() -> None:
    with pytest.raises(AttributeError, match="no attribute 'profil_for'"):
        ascend_hwprofile.profil_for  # noqa: B018


def test_submodules_do_not_shadow_exported_names() -> None:
    for module in ("detection", "diagnosis", "profiles", "soc", "words"):
        importlib.import_module(f"ascend_hwprofile.{module}")
    assert callable(ascend_hwprofile.detect)


def test_errors_share_one_base() -> None:
    for name in ascend_hwprofile.__all__:
        if name.endswith("Error"):
            assert issubclass(getattr(ascend_hwprofile, name), ascend_hwprofile.HwProfileError)
    assert issubclass(ascend_hwprofile.HwProfileError, ValueError)
