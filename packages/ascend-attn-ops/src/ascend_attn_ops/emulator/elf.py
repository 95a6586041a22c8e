"""Reading the dynamic section of an ELF64 shared library: what it needs and what it defines."""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from pathlib import Path

import attrs

_PT_LOAD, _PT_DYNAMIC = 1, 2
_DT_NEEDED, _DT_HASH, _DT_STRTAB, _DT_SYMTAB, _DT_SONAME = 1, 4, 5, 6, 14
_DT_GNU_HASH = 0x6FFFFEF5
_BIND_GLOBAL, _BIND_WEAK, _BIND_UNIQUE = 1, 2, 10
_SYMBOL = struct.Struct("<IBBHQQ")


class ElfError(ValueError):
    """The file is not a 64-bit little-endian shared library."""


@attrs.frozen
class Library:
    """Dynamic section of one library.

    Attributes:
        soname: Name that others load it by, or None.
        needed: Names of the libraries that it loads.
        undefined: Symbols that it must find elsewhere; weak ones are left out.
        defined: Symbols that it offers.
    """

    soname: str | None
    needed: tuple[str, ...]
    undefined: frozenset[str]
    defined: frozenset[str]


def read_library(path: Path) -> Library:
    """The dynamic section of the library at ``path``.

    Raises:
        ElfError: It is no such library.
    """
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        if data[:6] != b"\x7fELF\x02\x01":
            raise ElfError(f"{path.name} is not a 64-bit little-endian ELF file")
        return _Reader(data, path.name).read()


class _Reader:
    def __init__(self, data: mmap.mmap, name: str) -> None:
        self.data = data
        (offset,) = struct.unpack_from("<Q", data, 32)
        size, count = struct.unpack_from("<HH", data, 54)
        headers = [
            struct.unpack_from("<IIQQQQQQ", data, offset + index * size) for index in range(count)
        ]
        self.loads = [(h[3], h[2], h[5]) for h in headers if h[0] == _PT_LOAD]
        dynamic = [(h[2], h[5]) for h in headers if h[0] == _PT_DYNAMIC]
        if not dynamic:
            raise ElfError(f"{name} has no dynamic section")
        self.tags = list(self._entries(*dynamic[0]))
        self.table = dict(self.tags)
        self.strings = self._file_offset(self.table[_DT_STRTAB])

    def read(self) -> Library:
        undefined, defined = set(), set()
        for name, bind, section in self._symbols():
            if section == 0 and bind != _BIND_WEAK:
                undefined.add(name)
            elif section != 0 and bind in (_BIND_GLOBAL, _BIND_WEAK, _BIND_UNIQUE):
                defined.add(name)
        soname = self.table.get(_DT_SONAME)
        return Library(
            soname=None if soname is None else self._string(soname),
            needed=tuple(self._string(value) for tag, value in self.tags if tag == _DT_NEEDED),
            undefined=frozenset(undefined),
            defined=frozenset(defined),
        )

    def _entries(self, offset: int, size: int) -> Iterator[tuple[int, int]]:
        for place in range(offset, offset + size, 16):
            tag, value = struct.unpack_from("<qQ", self.data, place)
            if tag == 0:
                return
            yield tag, value

    def _file_offset(self, address: int) -> int:
        for start, offset, size in self.loads:
            if start <= address < start + size:
                return int(address - start + offset)
        raise ElfError(f"address {address:#x} is in no segment")

    def _string(self, offset: int) -> str:
        start = self.strings + offset
        return self.data[start : self.data.find(b"\0", start)].decode()

    def _symbols(self) -> Iterator[tuple[str, int, int]]:
        start = self._file_offset(self.table[_DT_SYMTAB])
        for index in range(1, self._symbol_count()):
            name, info, _, section, _, _ = _SYMBOL.unpack_from(
                self.data, start + index * _SYMBOL.size
            )
            yield self._string(name), info >> 4, section

    def _symbol_count(self) -> int:
        if _DT_HASH in self.table:
            place = self._file_offset(self.table[_DT_HASH])
            return int(struct.unpack_from("<II", self.data, place)[1])
        return self._gnu_symbol_count(self._file_offset(self.table[_DT_GNU_HASH]))

    def _gnu_symbol_count(self, place: int) -> int:
        """The GNU table has no count: follow the last chain to its end bit."""
        buckets, first, bloom, _ = struct.unpack_from("<IIII", self.data, place)
        start = place + 16 + bloom * 8
        last = max(struct.unpack_from(f"<{buckets}I", self.data, start), default=0)
        if last < first:
            return int(first)
        chains = start + buckets * 4
        while not struct.unpack_from("<I", self.data, chains + (last - first) * 4)[0] & 1:
            last += 1
        return int(last) + 1
