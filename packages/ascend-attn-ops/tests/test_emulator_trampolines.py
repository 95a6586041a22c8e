"""The trampolines of both machines: text, machine code where an assembler is, and a run of them.

x86-64 code is linked and called here; aarch64 code is assembled with LLVM and run on the Unicorn
CPU emulator. What is missing is named by the skip.
"""

from __future__ import annotations

import ctypes
import platform
import re
import shutil
import struct
import subprocess
from pathlib import Path

import pytest

from ascend_attn_ops.emulator.trampolines import MACHINES, assembly

OPERATORS = ["aclnnAdd", "aclnnBig", "aclnnCat"]
MAX_WORKSPACE = {"aclnnBig"}
RESOLVER = """
#include <stdint.h>
extern void *emulator_slots[];
int resolved = -1;
uint64_t seen[14], stack_seen[3];
void *answer;
void *emulator_resolve(int op, const uint64_t *registers, const uint64_t *stack)
{
    resolved = op;
    for (int i = 0; i < 14; i++) seen[i] = registers[i];
    for (int i = 0; i < 3; i++) stack_seen[i] = stack[i];
    return answer;
}
int emulator_second_stage(void *a, uint64_t b, void *c, void *d)
{
    return (int)((uintptr_t)a + b + (uintptr_t)c + (uintptr_t)d);
}
void set_slot(int index, void *to) { emulator_slots[index] = to; }
"""
FIRST_STAGE = ctypes.CFUNCTYPE(
    ctypes.c_int,
    *[ctypes.c_int64] * 3, ctypes.c_double, *[ctypes.c_int64] * 3, ctypes.c_double,
    *[ctypes.c_int64] * 3,
)  # fmt: skip
ARGUMENTS = (1, 2, 3, 1.5, 4, 5, 6, 2.5, 7, 8, 9)


@pytest.mark.parametrize("machine", MACHINES)
def test_every_operator_has_its_symbols(machine: str) -> None:
    text = assembly(machine, OPERATORS, MAX_WORKSPACE)
    labels = re.findall(r"^(\w+):$", text, re.MULTILINE)
    assert labels == [
        "aclnnAddGetWorkspaceSize", "aclnnAdd",
        "aclnnBigGetWorkspaceSize", "aclnnBigGetMaxWorkspaceSize", "aclnnBig",
        "aclnnCatGetWorkspaceSize", "aclnnCat",
        "emulator_slots",
    ]  # fmt: skip
    assert text.count("%progbits") == 1  # the stack is not executable
    assert f".zero {8 * len(OPERATORS)}" in text


def test_other_machines_have_none() -> None:
    with pytest.raises(KeyError, match="riscv64"):
        assembly("riscv64", OPERATORS, MAX_WORKSPACE)


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    if shutil.which("gcc") is None:
        pytest.skip("no gcc")
    if platform.machine() not in MACHINES:
        pytest.skip(f"no trampolines for {platform.machine()}")
    folder = tmp_path_factory.mktemp("trampolines")
    (folder / "t.S").write_text(assembly(platform.machine(), OPERATORS, MAX_WORKSPACE))
    (folder / "r.c").write_text(RESOLVER)
    command = ["gcc", "-shared", "-fPIC", "-o", "libt.so", "t.S", "r.c"]
    subprocess.run(command, cwd=folder, check=True, timeout=60)
    return ctypes.CDLL(str(folder / "libt.so"))


def target_of(calls: list[tuple[float, ...]]) -> ctypes._CFuncPtr:
    def target(*arguments: float) -> int:
        calls.append(arguments)
        return 42

    return FIRST_STAGE(target)


def test_a_filled_slot_gets_all_arguments(native: ctypes.CDLL) -> None:
    calls: list[tuple[float, ...]] = []
    target = target_of(calls)
    native.set_slot(0, ctypes.cast(target, ctypes.c_void_p))
    native.resolved = -1
    assert FIRST_STAGE(("aclnnAddGetWorkspaceSize", native))(*ARGUMENTS) == 42
    assert calls == [ARGUMENTS]
    assert ctypes.c_int.in_dll(native, "resolved").value == -1


@pytest.mark.parametrize("name", ["aclnnBigGetWorkspaceSize", "aclnnBigGetMaxWorkspaceSize"])
def test_an_empty_slot_asks_and_then_continues_with_all_arguments(
    name: str, native: ctypes.CDLL
) -> None:
    calls: list[tuple[float, ...]] = []
    target = target_of(calls)
    answer = ctypes.c_void_p.in_dll(native, "answer")
    answer.value = ctypes.cast(target, ctypes.c_void_p).value
    assert FIRST_STAGE((name, native))(*ARGUMENTS) == 42
    assert calls == [ARGUMENTS]
    assert ctypes.c_int.in_dll(native, "resolved").value == OPERATORS.index("aclnnBig")
    if platform.machine() == "x86_64":
        registers = (ctypes.c_uint64 * 14).in_dll(native, "seen")
        assert list(registers[:6]) == [1, 2, 3, 4, 5, 6]
        assert struct.pack("<2Q", *registers[6:8]) == struct.pack("<2d", 1.5, 2.5)
        assert list((ctypes.c_uint64 * 3).in_dll(native, "stack_seen")) == [7, 8, 9]


def test_second_stages_share_a_function(native: ctypes.CDLL) -> None:
    for name in OPERATORS:
        assert getattr(native, name)(1, 20, 300, 4000) == 4321


@pytest.fixture(scope="module")
def arm_object(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("llvm-mc") is None or shutil.which("llvm-objdump") is None:
        pytest.skip("no LLVM assembler for aarch64 (llvm-mc, llvm-objdump)")
    folder = tmp_path_factory.mktemp("aarch64")
    (folder / "t.S").write_text(assembly("aarch64", OPERATORS, MAX_WORKSPACE))
    command = ["llvm-mc", "-triple=aarch64-linux-gnu", "-filetype=obj", "t.S", "-o", "t.o"]
    subprocess.run(command, cwd=folder, check=True, timeout=60)
    return folder / "t.o"


def test_aarch64_code_saves_what_it_restores(arm_object: Path) -> None:
    command = ["llvm-objdump", "-d", "-r", "--no-show-raw-insn", str(arm_object)]
    text = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    assert text.count("R_AARCH64_ADR_GOT_PAGE\temulator_slots") == 3
    assert text.count("R_AARCH64_LD64_GOT_LO12_NC\temulator_slots") == 3
    assert text.count("R_AARCH64_JUMP26\temulator_second_stage") == 3
    assert text.count("R_AARCH64_CALL26\temulator_resolve") == 1
    saved = re.findall(r"stp\s+([xd]\d), ([xd]\d), (\[sp.*\])", text)
    restored = re.findall(r"ldp\s+([xd]\d), ([xd]\d), (\[sp.*\])", text)
    assert saved == restored
    assert {register for pair in saved for register in pair[:2]} == {
        *(f"x{i}" for i in range(8)), *(f"d{i}" for i in range(8)),
    }  # fmt: skip
    assert re.search(r"ldr\s+x16, \[x16, #16\]", text)  # the slot of the third operator


CODE, GOT, SLOTS, HELPERS, STACK = 0x10000, 0x20000, 0x30000, 0x40000, 0x80000
RESOLVE, SECOND, TARGET, RETURN = HELPERS, HELPERS + 0x100, HELPERS + 0x200, HELPERS + 0x300


def linked(data: bytes) -> tuple[bytes, dict[str, int]]:
    """.text of the object with its relocations applied, and where its functions are."""
    (sections_at,) = struct.unpack_from("<Q", data, 40)
    size, count, names = struct.unpack_from("<HHH", data, 58)
    headers = [
        struct.unpack_from("<IIQQQQIIQQ", data, sections_at + i * size) for i in range(count)
    ]

    def body(header: tuple[int, ...]) -> bytes:
        return data[header[4] : header[4] + header[5]]

    def text_at(table: bytes, offset: int) -> str:
        return table[offset : table.index(b"\0", offset)].decode()

    by_name = {text_at(body(headers[names]), header[0]): header for header in headers}
    symbols = body(by_name[".symtab"])
    strings = body(headers[by_name[".symtab"][6]])
    entries = list(struct.iter_unpack("<IBBHQQ", symbols))
    functions = {text_at(strings, e[0]): CODE + e[4] for e in entries if e[1] & 15 == 2}
    places = {"emulator_resolve": RESOLVE, "emulator_second_stage": SECOND}
    code = bytearray(body(by_name[".text"]))
    for offset, info, addend in struct.iter_unpack("<QQq", body(by_name[".rela.text"])):
        name = text_at(strings, entries[info >> 32][0])
        (word,) = struct.unpack_from("<I", code, offset)
        here = CODE + offset
        match info & 0xFFFFFFFF:
            case 311:  # ADR_GOT_PAGE
                pages = (GOT >> 12) - (here >> 12)
                word |= (pages & 3) << 29 | (pages >> 2 & 0x7FFFF) << 5
            case 312:  # LD64_GOT_LO12_NC
                word |= (GOT & 0xFFF) >> 3 << 10
            case 282 | 283:  # JUMP26, CALL26
                word |= (places[name] + addend - here) >> 2 & 0x3FFFFFF
            case other:
                raise AssertionError(f"relocation {other} of {name}")
        struct.pack_into("<I", code, offset, word)
    return bytes(code), functions


def run_on_arm(arm_object: Path, function: str, slot: int) -> tuple[list[int], dict[str, object]]:
    """Calls a trampoline with recognisable registers: where it went, and what arrived there."""
    unicorn = pytest.importorskip("unicorn", reason="no Unicorn CPU emulator (pip install unicorn)")
    from unicorn import arm64_const as arm

    code, functions = linked(arm_object.read_bytes())
    machine = unicorn.Uc(unicorn.UC_ARCH_ARM64, unicorn.UC_MODE_ARM)
    for base in (CODE, GOT, SLOTS, HELPERS, STACK - 0x10000, STACK):
        machine.mem_map(base, 0x10000)
    machine.mem_write(CODE, code)
    machine.mem_write(GOT, struct.pack("<Q", SLOTS))
    machine.mem_write(SLOTS, struct.pack("<3Q", slot, slot, slot))
    ret = struct.pack("<I", 0xD65F03C0)
    for helper in (RESOLVE, SECOND, TARGET, RETURN):
        machine.mem_write(helper, ret)
    registers = [getattr(arm, f"UC_ARM64_REG_X{i}") for i in range(8)]
    floats = [getattr(arm, f"UC_ARM64_REG_D{i}") for i in range(8)]
    for i in range(8):
        machine.reg_write(registers[i], 100 + i)
        machine.reg_write(floats[i], 200 + i)
    machine.mem_write(STACK, struct.pack("<2Q", 900, 901))
    machine.reg_write(arm.UC_ARM64_REG_SP, STACK)
    machine.reg_write(arm.UC_ARM64_REG_X30, RETURN)
    visited: list[int] = []
    asked: dict[str, object] = {}

    def at_helper(uc: object, address: int, _size: int, _data: object) -> None:
        if address not in (RESOLVE, SECOND, TARGET):
            return
        visited.append(address)
        if address == RESOLVE:
            array = machine.reg_read(registers[1])
            asked["operator"] = machine.reg_read(registers[0])
            asked["registers"] = struct.unpack("<16Q", machine.mem_read(array, 128))
            stack = machine.reg_read(registers[2])
            asked["stack"] = struct.unpack("<2Q", machine.mem_read(stack, 16))
            for register in (*registers, *floats):
                machine.reg_write(register, 7)  # a C function may use them all
            machine.reg_write(registers[0], TARGET)

    machine.hook_add(unicorn.UC_HOOK_CODE, at_helper)
    machine.emu_start(functions[function], RETURN, timeout=10_000_000)
    assert machine.reg_read(arm.UC_ARM64_REG_SP) == STACK
    arrived = [machine.reg_read(register) for register in registers]
    assert arrived == [100 + i for i in range(8)]
    assert [machine.reg_read(register) for register in floats] == [200 + i for i in range(8)]
    return visited, asked


def test_aarch64_filled_slot(arm_object: Path) -> None:
    assert run_on_arm(arm_object, "aclnnCatGetWorkspaceSize", TARGET) == ([TARGET], {})


def test_aarch64_empty_slot(arm_object: Path) -> None:
    visited, asked = run_on_arm(arm_object, "aclnnBigGetMaxWorkspaceSize", 0)
    assert visited == [RESOLVE, TARGET]
    assert asked["operator"] == OPERATORS.index("aclnnBig")
    assert asked["registers"] == (*range(100, 108), *range(200, 208))
    assert asked["stack"] == (900, 901)


def test_aarch64_second_stage(arm_object: Path) -> None:
    assert run_on_arm(arm_object, "aclnnBig", 0)[0] == [SECOND]
