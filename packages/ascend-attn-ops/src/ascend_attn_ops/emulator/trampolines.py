"""Assembly of libopapi.so: the symbols of every aclnn operator, for x86-64 and aarch64.

The first stage of an operator jumps through its slot into a Python callback of the operator's own
signature, all argument registers and the stack untouched. A slot that is still empty leads to
``emulator_resolve`` (executors.c), which gets the registers as an array, may fill the slot, and
says where the call continues. Second stages have one form and share one function.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

_INTEGERS = ("rdi", "rsi", "rdx", "rcx", "r8", "r9")
_FLOATS = 8


def assembly(machine: str, operators: Sequence[str], max_workspace: Collection[str]) -> str:
    """Source for the GNU or LLVM assembler.

    Args:
        machine: ``x86_64`` or ``aarch64``, as ``platform.machine()`` says.
        operators: aclnn names; slot i belongs to operator i.
        max_workspace: Operators that also have a ``GetMaxWorkspaceSize`` form.

    Raises:
        KeyError: There are no trampolines for this machine.
    """
    first_stage, second_stage, slow_path = _MACHINES[machine]
    lines = ['.section .note.GNU-stack,"",%progbits', ".text"]
    for index, name in enumerate(operators):
        entries = [f"{name}GetWorkspaceSize"]
        if name in max_workspace:
            entries.append(f"{name}GetMaxWorkspaceSize")
        lines += [line for entry in entries for line in _symbol(entry, "function")]
        lines += [f"  {line}" for line in first_stage(index)]
        lines += [*_symbol(name, "function"), f"  {second_stage}"]
    lines += [".Lslow:", *(f"  {line}" for line in slow_path), *_slots(len(operators))]
    return "\n".join(lines) + "\n"


def _symbol(name: str, kind: str) -> list[str]:
    return [f".globl {name}", f".type {name}, %{kind}", f"{name}:"]


def _slots(count: int) -> Iterator[str]:
    yield from (".bss", ".p2align 3", *_symbol("emulator_slots", "object"))
    yield f".zero {8 * count}"
    yield f".size emulator_slots, {8 * count}"


def _x86_first_stage(index: int) -> list[str]:
    """eax and r11 carry no argument; eax also leads the slow path to the operator."""
    return [
        "movq emulator_slots@GOTPCREL(%rip), %r11",
        f"movl ${index}, %eax",
        f"movq {8 * index}(%r11), %r11",
        "testq %r11, %r11",
        "je .Lslow",
        "jmp *%r11",
    ]


def _x86_slow_path() -> list[str]:
    """Arguments on the stack begin at 16(%rbp): saved rbp, return address, arguments."""
    size = 8 * (len(_INTEGERS) + _FLOATS) + 16  # keeps the stack aligned to 16
    integers = [(f"%{register}", 8 * place) for place, register in enumerate(_INTEGERS)]
    floats = [(f"%xmm{place}", 8 * (len(_INTEGERS) + place)) for place in range(_FLOATS)]
    return [
        "pushq %rbp",
        "movq %rsp, %rbp",
        f"subq ${size}, %rsp",
        *(f"movq {register}, {offset}(%rsp)" for register, offset in integers + floats),
        "movl %eax, %edi",
        "movq %rsp, %rsi",
        "leaq 16(%rbp), %rdx",
        "call emulator_resolve@PLT",
        "movq %rax, %r11",
        *(f"movq {offset}(%rsp), {register}" for register, offset in integers + floats),
        "leave",
        "jmp *%r11",
    ]


def _arm_first_stage(index: int) -> list[str]:
    """x16 and x17 are free between caller and callee; w17 leads the slow path to the operator."""
    return [
        "adrp x16, :got:emulator_slots",
        "ldr x16, [x16, :got_lo12:emulator_slots]",
        f"ldr x16, [x16, {8 * index}]",
        f"mov w17, {index}",
        "cbz x16, .Lslow",
        "br x16",
    ]


def _arm_slow_path() -> list[str]:
    """Arguments on the stack begin where sp was at the call: 16 bytes above the frame record."""
    size = 8 * (8 + _FLOATS)
    return [
        "stp x29, x30, [sp, -16]!",
        "mov x29, sp",
        f"sub sp, sp, {size}",
        *(f"stp x{r}, x{r + 1}, [sp, {8 * r}]" for r in range(0, 8, 2)),
        *(f"stp d{r}, d{r + 1}, [sp, {64 + 8 * r}]" for r in range(0, _FLOATS, 2)),
        "mov w0, w17",
        "mov x1, sp",
        "add x2, x29, 16",
        "bl emulator_resolve",
        "mov x16, x0",
        *(f"ldp x{r}, x{r + 1}, [sp, {8 * r}]" for r in range(0, 8, 2)),
        *(f"ldp d{r}, d{r + 1}, [sp, {64 + 8 * r}]" for r in range(0, _FLOATS, 2)),
        "mov sp, x29",
        "ldp x29, x30, [sp], 16",
        "br x16",
    ]


_MACHINES: Mapping[str, tuple[Callable[[int], list[str]], str, list[str]]] = {
    "x86_64": (_x86_first_stage, "jmp emulator_second_stage@PLT", _x86_slow_path()),
    "aarch64": (_arm_first_stage, "b emulator_second_stage", _arm_slow_path()),
}
MACHINES = tuple(_MACHINES)
