from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ascend_specdecode import Purpose, uniforms
from ascend_specdecode.random_streams import philox_4x32

WORD = 2**32
words = st.integers(0, WORD - 1)


def philox_by_hand(key: list[int], counter: list[int]) -> list[int]:
    """Philox-4x32-10 with Python's integers, round by round as in the paper's section 3.3."""
    (k0, k1), (c0, c1, c2, c3) = key, counter
    for _ in range(10):
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = p1 // WORD ^ c1 ^ k0, p1 % WORD, p0 // WORD ^ c3 ^ k1, p0 % WORD
        k0, k1 = (k0 + 0x9E3779B9) % WORD, (k1 + 0xBB67AE85) % WORD
    return [c0, c1, c2, c3]


def as_tensors(values: list[int]) -> tuple[torch.Tensor, ...]:
    return tuple(torch.tensor(value, dtype=torch.int64) for value in values)


@pytest.mark.parametrize(
    ("key", "counter", "expected"),
    [
        ("0" * 16, "0" * 32, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("f" * 16, "f" * 32, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            "a4093822299f31d0",
            "243f6a8885a308d313198a2e03707344",
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
    ids=["zeros", "ones", "pi"],
)
def test_equals_the_published_vectors(key: str, counter: str, expected: str) -> None:
    """The known answers of Random123, the authors' own library."""
    parts = [int(text[i : i + 8], 16) for text in (key, counter) for i in range(0, len(text), 8)]
    found = philox_4x32(as_tensors(parts[:2]), as_tensors(parts[2:]))
    assert " ".join(f"{int(word):08x}" for word in found) == expected
    assert philox_by_hand(parts[:2], parts[2:]) == [int(word) for word in found]


@given(st.lists(words, min_size=2, max_size=2), st.lists(words, min_size=4, max_size=4))
def test_equals_the_generator_in_plain_integers(key: list[int], counter: list[int]) -> None:
    found = philox_4x32(as_tensors(key), as_tensors(counter))
    assert [int(word) for word in found] == philox_by_hand(key, counter)


@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**40), st.sampled_from(Purpose), words)
def test_numbers_come_from_the_documented_counter(
    seed: int, position: int, purpose: Purpose, draw: int
) -> None:
    key = [seed % WORD, seed // WORD % WORD]
    out = philox_by_hand(key, [position % WORD, position // WORD, draw, int(purpose)])
    expected = (out[0] // 2**5 * 2**26 + out[1] // 2**6) / 2**53
    found = uniforms(torch.tensor(seed), torch.tensor(position), purpose, draw)
    assert found.dtype == torch.float64
    assert 0 <= float(found) < 1
    assert float(found) == expected


def streams(purpose: Purpose) -> torch.Tensor:
    """Numbers of 64 seeds and 512 positions."""
    return uniforms(torch.arange(64).unsqueeze(1), torch.arange(512), purpose)


def test_numbers_are_uniform() -> None:
    numbers = streams(Purpose.ACCEPT)
    assert float(numbers.mean()) == pytest.approx(0.5, abs=0.01)
    counts = torch.bincount((numbers.flatten() * 100).long(), minlength=100).double()
    statistic = ((counts - 327.68) ** 2 / 327.68).sum()
    p_value = torch.special.gammaincc(torch.tensor(99 / 2, dtype=torch.float64), statistic / 2)
    assert float(p_value) > 1e-3


@pytest.mark.parametrize("shift", [(0, 1), (1, 0)], ids=["next-position", "next-seed"])
def test_neighbours_are_not_correlated(shift: tuple[int, int]) -> None:
    numbers = streams(Purpose.CHOOSE)
    pairs = torch.stack([numbers.flatten(), numbers.roll(shift, (0, 1)).flatten()])
    assert abs(float(torch.corrcoef(pairs)[0, 1])) < 0.02
    assert float(torch.corrcoef(pairs[:1].expand(2, -1))[0, 1]) == pytest.approx(1)  # control


def test_purposes_are_not_correlated() -> None:
    numbers = torch.stack([streams(purpose).flatten() for purpose in Purpose])
    correlation = torch.corrcoef(numbers) - torch.eye(len(Purpose), dtype=torch.float64)
    assert float(correlation.abs().max()) < 0.02


def test_all_bits_of_the_seed_count() -> None:
    seeds = torch.tensor([0] + [1 << bit for bit in range(63)] + [-(2**63)])
    numbers = uniforms(seeds, torch.tensor(5), Purpose.CHOOSE)
    assert len(set(numbers.tolist())) == len(seeds)
