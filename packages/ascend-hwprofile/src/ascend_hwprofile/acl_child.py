"""Asks libascendcl for the name of the SoC. Run as a script in a process of its own.

Arguments: the libraries to try. Each answer is one JSON object on a line of its own, the name
first, so that a crash in a later call does not lose it. No device is opened, no context made.
"""

from __future__ import annotations

import ctypes
import json
import sys

# enum aclplatformDevInfo, CANN 9.1 runtime documentation, page aclcppdevg_03_2279.
_PLATFORM_QUERIES = {"cube_cores": 2, "vector_cores": 3, "npu_arch": 15}
_ANSWER_BYTES = 64


def _load(candidates: list[str]) -> tuple[ctypes.CDLL | None, str]:
    problems: list[str] = []
    for candidate in candidates:
        try:
            return ctypes.CDLL(candidate), candidate
        except OSError as error:
            problems.append(str(error))
    return None, "; ".join(problems)


def _soc_name(library: ctypes.CDLL) -> str | None:
    query = library.aclrtGetSocName
    query.restype = ctypes.c_char_p
    name = query()
    if name is None and library.aclInit(None) == 0:
        name = query()
        library.aclFinalize()
    return name.decode("ascii", "replace") if name else None


def _platform_numbers(library: ctypes.CDLL) -> dict[str, int]:
    query = getattr(library, "aclplatformGetDeviceInfo", None)
    if query is None:
        return {}
    query.argtypes = [ctypes.c_int32, ctypes.c_char_p, ctypes.c_uint32]
    numbers: dict[str, int] = {}
    for name, code in _PLATFORM_QUERIES.items():
        answer = ctypes.create_string_buffer(_ANSWER_BYTES)
        if query(code, answer, _ANSWER_BYTES) == 0 and answer.value.isdigit():
            numbers[name] = int(answer.value)
    return numbers


def _say(answer: dict[str, object]) -> None:
    print(json.dumps(answer), flush=True)


def main(candidates: list[str]) -> None:
    """Print the answers of the first library that loads."""
    library, loaded = _load(candidates)
    if library is None:
        _say({"problem": loaded, "missing": True})
        return
    try:
        name = _soc_name(library)
    except AttributeError as error:
        _say({"library": loaded, "problem": f"{error}"})
        return
    _say({"library": loaded, "soc_name": name})
    _say({**_platform_numbers(library)})


if __name__ == "__main__":
    main(sys.argv[1:])
