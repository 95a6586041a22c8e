from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ascend_specdecode import (
    PAD_TOKEN,
    ArgumentError,
    InverseCdf,
    Purpose,
    rejection_sample,
    rejection_sample_with,
    uniforms,
)


def distributions(generator: torch.Generator, *shape: int, sharp: float = 2.0) -> torch.Tensor:
    return (sharp * torch.randn(*shape, generator=generator)).softmax(-1)


def random_step(
    seed: int, batch: int, width: int, vocabulary: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Draft tokens, target and draft distributions, counts; the drafter is sometimes right."""
    generator = torch.Generator().manual_seed(seed)
    target = distributions(generator, batch, width + 1, vocabulary)
    drafter = 0.5 * target[:, :width] + 0.5 * distributions(generator, batch, width, vocabulary)
    flat = drafter.reshape(-1, vocabulary)
    drawn = flat.multinomial(1, generator=generator) if len(flat) else torch.zeros(0).long()
    counts = torch.randint(0, width + 1, (batch,), generator=generator)
    return drawn.reshape(batch, width), target, drafter, counts


def one_by_one(
    tokens: list[int],
    target: torch.Tensor,
    drafter: torch.Tensor | None,
    count: int,
    seed: int,
    position: int,
) -> list[int]:
    """Rejection sampling of one request, token after token, in float64."""

    def number(place: int, purpose: Purpose) -> float:
        at = torch.tensor(position + place)
        return float(uniforms(torch.tensor(seed), at, purpose))

    def sample(weights: torch.Tensor, place: int) -> int:
        limit = number(place, Purpose.CHOOSE) * float(weights.sum())
        return int((weights.cumsum(0) <= limit).sum())

    emitted: list[int] = []
    for place in range(count):
        p = target[place].double()
        q = torch.zeros_like(p)
        if drafter is None:
            q[tokens[place]] = 1
        else:
            q = drafter[place].double()
        if number(place, Purpose.ACCEPT) * q[tokens[place]] >= p[tokens[place]]:
            return [*emitted, sample((p - q).clamp(min=0), place)]
        emitted.append(tokens[place])
    return [*emitted, sample(target[count].double(), count)]


shapes = st.tuples(
    st.integers(0, 2**31), st.integers(0, 5), st.integers(0, 6), st.sampled_from([1, 2, 7, 300])
)


@given(shapes, st.booleans(), st.integers(0, 2**40))
def test_equals_a_plain_loop(shape: tuple[int, ...], with_probs: bool, start: int) -> None:
    tokens, target, drafter, counts = random_step(*shape)
    seeds = torch.arange(len(tokens)) * 977 - 2
    positions = torch.arange(len(tokens)) + start
    probs = drafter if with_probs else None
    found = rejection_sample(
        tokens, target, probs, num_draft_tokens=counts, seeds=seeds, positions=positions
    )
    assert found.dtype == torch.int64
    assert found.shape == target.shape[:2]
    for row, emitted in enumerate(found.tolist()):
        expected = one_by_one(
            tokens[row].tolist(),
            target[row],
            drafter[row] if with_probs else None,
            int(counts[row]),
            int(seeds[row]),
            int(positions[row]),
        )
        assert emitted == expected + [PAD_TOKEN] * (len(emitted) - len(expected))


@given(shapes, st.booleans(), st.randoms(use_true_random=False))
def test_a_request_has_the_same_stream_in_every_batch(
    shape: tuple[int, ...], with_probs: bool, random: Any
) -> None:
    """Alone, in another order, beside others, and with more padding."""
    tokens, target, drafter, counts = random_step(*shape)
    seeds = torch.arange(len(tokens)) * 12345
    order = list(range(len(tokens)))
    random.shuffle(order)
    everyone = rejection_sample(
        tokens, target, drafter if with_probs else None, num_draft_tokens=counts, seeds=seeds
    )

    def some(rows: list[int], extra: int) -> torch.Tensor:
        pad = torch.nn.functional.pad
        probs = pad(drafter[rows], (0, 0, 0, extra)) if with_probs else None
        return rejection_sample(
            pad(tokens[rows], (0, extra)),
            pad(target[rows], (0, 0, 0, extra)),
            probs,
            num_draft_tokens=counts[rows],
            seeds=seeds[rows],
        )[:, : tokens.shape[1] + 1]

    assert torch.equal(some(order, 2), everyone[order])
    for row in order:
        assert torch.equal(some([row], 0), everyone[[row]])


def test_a_seed_that_follows_the_batch_is_told_apart() -> None:
    """The comparison above sees a generator whose numbers depend on the place in the batch."""
    tokens, target, drafter, _ = random_step(0, 6, 4, 50)
    everyone = rejection_sample(tokens, target, drafter, seeds=torch.arange(6))
    moved = rejection_sample(tokens[3:], target[3:], drafter[3:], seeds=torch.arange(3))
    assert not torch.equal(everyone[3:], moved)


@given(shapes, st.booleans())
def test_what_follows_the_drafted_tokens_is_ignored(
    shape: tuple[int, ...], with_probs: bool
) -> None:
    tokens, target, drafter, counts = random_step(*shape)
    arguments = {"num_draft_tokens": counts, "seeds": torch.arange(len(tokens))}
    expected = rejection_sample(tokens, target, drafter if with_probs else None, **arguments)
    step = torch.arange(target.shape[1])
    beyond = step > counts.unsqueeze(1)
    not_drafted = beyond | (step == counts.unsqueeze(1))
    tokens = torch.where(not_drafted[:, :-1], -1, tokens)
    target = torch.where(beyond.unsqueeze(2), torch.nan, target)
    drafter = torch.where(not_drafted[:, :-1].unsqueeze(2), torch.nan, drafter)
    found = rejection_sample(tokens, target, drafter if with_probs else None, **arguments)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("with_probs", [True, False])
def test_a_large_vocabulary_gives_the_same_as_a_loop(with_probs: bool) -> None:
    _, target, _, counts = random_step(3, 6, 3, 5000)
    target = (target.log() * 3).softmax(-1)
    drafter = target[:, :3].roll(1, dims=0) * 0.4 + target[:, :3] * 0.6
    tokens = target[:, :3].argmax(-1)
    probs = drafter if with_probs else None
    found = rejection_sample(
        tokens, target, probs, num_draft_tokens=counts, seeds=torch.arange(6)
    ).tolist()
    assert len({sum(token >= 0 for token in row) for row in found}) > 1  # lengths differ
    for row, emitted in enumerate(found):
        own = drafter[row] if with_probs else None
        count = int(counts[row])
        expected = one_by_one(tokens[row].tolist(), target[row], own, count, row, 0)
        assert [token for token in emitted if token >= 0] == expected


def test_certain_targets_emit_their_own_tokens() -> None:
    """All mass on one token: rejection sampling becomes greedy verification."""
    target = torch.nn.functional.one_hot(torch.tensor([[4, 2, 1], [4, 2, 1]]), 6).float()
    tokens = torch.tensor([[4, 2], [4, 3]])
    drafter = torch.full((2, 2, 6), 1 / 6)
    for probs in (drafter, None):
        found = rejection_sample(tokens, target, probs)
        assert found.tolist() == [[4, 2, 1], [4, 2, -1]]


def test_equal_distributions_accept_everything() -> None:
    tokens, _, drafter, _ = random_step(1, 64, 5, 9)
    bonus = torch.nn.functional.one_hot(torch.full((64, 1), 7), 9).float()
    found = rejection_sample(tokens, torch.cat([drafter, bonus], dim=1), drafter)
    assert torch.equal(found, torch.nn.functional.pad(tokens, (0, 1), value=7))


def test_a_token_that_its_drafter_could_not_draw_is_rejected() -> None:
    target = torch.tensor([[[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]]])
    drafter = torch.tensor([[[0.0, 1.0, 0.0]]])
    assert rejection_sample(torch.tensor([[0]]), target, drafter).tolist() == [[0, -1]]


@pytest.mark.parametrize("with_probs", [True, False])
def test_a_residual_of_zero_emits_what_the_target_can_say(with_probs: bool) -> None:
    """Rounding can reject although nothing is left: never token 0 just because nothing is larger.

    vLLM 0.30 emits token 0 here, of probability 0.
    """
    almost_one = torch.tensor([0.0, 1 - 2.0**-24, 0.0])
    target = almost_one.expand(1, 2, 3)
    drafter = torch.tensor([[[0.0, 1.0, 0.0]]]) if with_probs else None
    found = rejection_sample_with(
        torch.tensor([[1]]),
        target,
        drafter,
        torch.tensor([1]),
        torch.tensor([[1 - 2.0**-25]]).double(),
        InverseCdf(torch.zeros(1, 2).double()),
    )
    assert found.tolist() == [[1, -1]]


def test_a_uniform_of_zero_accepts_nothing_impossible() -> None:
    target = torch.tensor([[[0.0, 1.0], [0.0, 1.0]]])
    found = rejection_sample_with(
        torch.tensor([[0]]),
        target,
        None,
        torch.tensor([1]),
        torch.zeros(1, 1),
        InverseCdf(torch.zeros(1, 2).double()),
    )
    assert found.tolist() == [[1, -1]]


def test_without_seeds_torchs_generator_decides() -> None:
    tokens, target, drafter, _ = random_step(5, 32, 3, 40)

    def run() -> torch.Tensor:
        return rejection_sample(tokens, target, drafter)

    torch.manual_seed(1)
    first, second = run(), run()
    torch.manual_seed(1)
    assert torch.equal(run(), first)
    assert not torch.equal(first, second)


def test_positions_keep_steps_apart() -> None:
    tokens, target, drafter, _ = random_step(6, 32, 3, 40)
    seeds = torch.arange(32)
    first = rejection_sample(tokens, target, drafter, seeds=seeds)
    zeros = torch.zeros(32, dtype=torch.int64)
    again = rejection_sample(tokens, target, drafter, seeds=seeds, positions=zeros)
    later = rejection_sample(tokens, target, drafter, seeds=seeds, positions=zeros + 4)
    assert torch.equal(first, again)
    assert not torch.equal(first, later)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_integer_dtypes_give_the_same(dtype: torch.dtype) -> None:
    tokens, target, drafter, counts = random_step(7, 8, 3, 20)
    expected = rejection_sample(
        tokens, target, drafter, num_draft_tokens=counts, seeds=torch.arange(8)
    )
    found = rejection_sample(
        tokens.to(dtype),
        target,
        drafter,
        num_draft_tokens=counts.to(dtype),
        seeds=torch.arange(8, dtype=dtype),
        positions=torch.zeros(8, dtype=dtype),
    )
    assert torch.equal(found, expected)


def test_inputs_are_left_alone_and_need_not_be_contiguous() -> None:
    tokens, target, drafter, counts = random_step(8, 4, 3, 3000)
    arguments = {"num_draft_tokens": counts, "seeds": torch.arange(4)}
    copies = [one.clone() for one in (tokens, target, drafter, counts)]
    expected = rejection_sample(tokens, target, drafter, **arguments)
    for one, copy in zip((tokens, target, drafter, counts), copies, strict=True):
        assert torch.equal(one, copy)
    strided = [one.transpose(0, 1).contiguous().transpose(0, 1) for one in (target, drafter)]
    assert not strided[0].is_contiguous()
    assert torch.equal(rejection_sample(tokens, *strided, **arguments), expected)


def test_reads_no_value_on_a_device() -> None:
    """A meta tensor has no values: any read back to the host would raise."""
    with torch.device("meta"):
        found = rejection_sample(
            torch.zeros(4, 3, dtype=torch.int64),
            torch.zeros(4, 4, 5000),
            torch.zeros(4, 3, 5000),
            num_draft_tokens=torch.zeros(4, dtype=torch.int64),
            seeds=torch.zeros(4, dtype=torch.int64),
            positions=torch.zeros(4, dtype=torch.int64),
        )
    assert found.shape == (4, 4)
    assert found.device.type == "meta"


GOOD: dict[str, Any] = {
    "draft_tokens": torch.zeros(2, 3, dtype=torch.int64),
    "target_probs": torch.full((2, 4, 5), 0.2),
    "draft_probs": torch.full((2, 3, 5), 0.2),
    "num_draft_tokens": torch.tensor([3, 0]),
    "seeds": torch.tensor([1, 2]),
    "positions": torch.tensor([0, 7]),
}


def changed(name: str, index: tuple[int, ...], value: float) -> torch.Tensor:
    tensor = GOOD[name].clone()
    tensor[index] = value
    return tensor


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("draft_tokens", torch.zeros(6).long(), r"draft_tokens: found shape \[6\]"),
        ("draft_tokens", torch.zeros(2, 3), "draft_tokens.dtype: found torch.float32"),
        ("target_probs", torch.zeros(2, 4), r"target_probs: found shape \[2, 4\]"),
        ("target_probs", torch.zeros(2, 3, 5), r"target_probs: .*\[B, K\+1, V\] = \[2, 4, 5\]"),
        ("target_probs", torch.zeros(2, 4, 0), r"target_probs: .* V >= 1"),
        ("target_probs", torch.full((2, 4, 5), 0.2).half(), "target_probs.dtype: .*torch.float16"),
        ("target_probs", torch.ones(2, 4, 5).long(), "target_probs.dtype: found torch.int64"),
        ("target_probs", torch.full((2, 4, 5), 0.2).double(), "draft_probs.dtype: found .*float32"),
        ("target_probs", torch.full((2, 4, 5), 0.2, device="meta"), "target_probs.device: .*meta"),
        ("draft_probs", torch.full((2, 4, 5), 0.2), r"draft_probs: .* = \[2, 3, 5\]"),
        ("num_draft_tokens", torch.zeros(3).long(), r"num_draft_tokens: found shape \[3\]"),
        ("num_draft_tokens", torch.tensor([3.0, 0.0]), "num_draft_tokens.dtype: .*float32"),
        ("num_draft_tokens", torch.tensor([4, 0]), r"num_draft_tokens\[0\]: found 4, .*K = 3"),
        ("num_draft_tokens", torch.tensor([3, -1]), r"num_draft_tokens\[1\]: found -1"),
        ("num_draft_tokens", [3, 1.0], r"num_draft_tokens: found \[3, 1.0\], .*sequence of int"),
        ("seeds", [1, 2, 3], r"seeds: found shape \[3\]"),
        ("draft_tokens", [[1, 2, 3]], "draft_tokens: found a list, allowed a torch.Tensor"),
        ("draft_probs", 0.5, "draft_probs: found a float"),
        ("seeds", torch.zeros(3).long(), r"seeds: found shape \[3\]"),
        ("seeds", torch.zeros(2), "seeds.dtype: found torch.float32"),
        ("positions", torch.tensor([0, -1]), r"positions\[1\]: found -1, allowed positions >= 0"),
        ("draft_tokens", changed("draft_tokens", (0, 1), -1), r"draft_tokens\[0, 1\]: found -1"),
        ("draft_tokens", changed("draft_tokens", (0, 2), 5), r"\[0, 2\]: found 5, .*V = 5"),
        ("target_probs", changed("target_probs", (0, 3, 1), 0.5), r"\[0, 3\]: found a sum of 1.3"),
        ("target_probs", changed("target_probs", (1, 0, 1), torch.nan), r"\[1, 0\]: .*sum of nan"),
        ("draft_probs", changed("draft_probs", (0, 2, 0), 0.1), r"draft_probs\[0, 2\]: .* 0.9"),
    ],
)  # fmt: skip
def test_bad_input_is_refused(name: str, value: object, message: str) -> None:
    assert rejection_sample(**GOOD).shape == (2, 4)
    with pytest.raises(ArgumentError, match=message):
        rejection_sample(**{**GOOD, name: value})


def test_negative_probabilities_are_refused() -> None:
    target = GOOD["target_probs"].clone()
    target[0, 1, :2] = torch.tensor([-0.1, 0.5])
    with pytest.raises(ArgumentError, match=r"target_probs\[0, 1\]: found a probability of -0.1"):
        rejection_sample(**{**GOOD, "target_probs": target})


def test_numbers_per_request_may_be_plain_ints() -> None:
    plain = {"num_draft_tokens": [3, 1], "seeds": (5, 6), "positions": range(2)}
    tensors = {name: torch.tensor(list(values)) for name, values in plain.items()}
    expected = rejection_sample(**{**GOOD, **tensors})
    assert torch.equal(rejection_sample(**{**GOOD, **plain}), expected)


def test_everything_but_tokens_and_target_may_be_left_out() -> None:
    found = rejection_sample(GOOD["draft_tokens"], GOOD["target_probs"])
    assert bool((found[:, 0] >= 0).all())
