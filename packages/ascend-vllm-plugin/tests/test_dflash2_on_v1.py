"""The walk along the candidates of a DFlash2 draft, against its definition."""

from types import SimpleNamespace

import pytest
import torch

from ascend_vllm_plugin.patches import dflash2_on_v1
from ascend_vllm_plugin.patches.dflash2_on_v1 import sample_draft_tokens, walk

BATCH, STEPS, TOP_K, VOCABULARY = 6, 4, 5, 40


def best(scores):
    return scores.argmax(-1), None


def candidates_and_scores(seed=0):
    """Different candidates in each step; in step 0 every predecessor is the anchor."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.rand(BATCH, STEPS, VOCABULARY, generator=generator).argsort(-1)
    scores = torch.randn(BATCH, STEPS, TOP_K, TOP_K, generator=generator)
    scores[:, 0] = scores[:, 0, :1]
    return order[..., :TOP_K], scores


def by_definition(candidates, scores):
    """Step by step: the candidate with the best score after the one chosen before."""
    found = []
    for row in range(BATCH):
        previous, tokens = 0, []
        for step in range(STEPS):
            after = [float(scores[row, step, previous, one]) for one in range(TOP_K)]
            previous = after.index(max(after))
            tokens.append(int(candidates[row, step, previous]))
        found.append(tokens)
    return found


@pytest.mark.parametrize("seed", range(5))
def test_each_token_follows_from_the_one_before(seed):
    candidates, scores = candidates_and_scores(seed)
    tokens, probabilities = walk(candidates, scores, best)
    assert tokens.tolist() == by_definition(candidates, scores)
    assert probabilities is None
    # Each step on its own would choose otherwise.
    alone = scores.amax(2).argmax(-1)
    assert tokens.tolist() != candidates.gather(-1, alone[..., None])[..., 0].tolist()


def test_drawn_paths_have_the_probabilities_that_are_told():
    """60,000 paths of two steps, chi-square against the product of the two distributions."""
    draws = 60_000
    generator = torch.Generator().manual_seed(1)
    scores = torch.randn(1, 2, 3, 3, generator=generator)
    scores[:, 0] = scores[:, 0, :1]
    candidates = torch.tensor([[[7, 3, 5], [1, 9, 4]]])

    def draw(row):
        probabilities = row.softmax(-1)
        return probabilities.multinomial(1, generator=generator)[:, 0], probabilities

    tokens, told = walk(candidates.expand(draws, -1, -1), scores.expand(draws, -1, -1, -1), draw)
    first, second = scores[0, 0, 0].double().softmax(-1), scores[0, 1].double().softmax(-1)
    expected = (first[:, None] * second).flatten() * draws
    path = (tokens[:, 0, None] == candidates[0, 0]).int().argmax(-1) * 3
    path += (tokens[:, 1, None] == candidates[0, 1]).int().argmax(-1)
    counted = path.bincount(minlength=9).double()
    assert ((counted - expected) ** 2 / expected).sum() < 26.1  # 8 degrees of freedom, p = 0.001
    independent = (first[:, None] * (first @ second)).flatten() * draws
    assert ((counted - independent) ** 2 / independent).sum() > 26.1
    chosen_before = path // 3
    torch.testing.assert_close(told[:, 0].double(), first.expand(draws, -1))
    torch.testing.assert_close(told[:, 1].double(), second[chosen_before])


def proposer(candidates, scores, anchors):
    """What the sampling reads of vLLM's drafter; the anchors are the first of each block."""
    selector_asked = {}

    def select(given, unary, hidden, tokens):
        selector_asked.update(candidates=given, unary=unary, hidden=hidden, anchors=tokens)
        return scores

    unary = torch.arange(BATCH * STEPS * TOP_K).view(BATCH * STEPS, TOP_K).float()
    blocks = torch.full((BATCH, STEPS + 1), 39)
    blocks[:, 0] = anchors
    return selector_asked, SimpleNamespace(
        num_speculative_tokens=STEPS,
        input_ids=torch.cat([blocks.flatten(), torch.full((7,), -1)]).int(),
        model=SimpleNamespace(
            compute_candidates=lambda hidden: (candidates.flatten(0, 1), unary),
            model=SimpleNamespace(candidate_selector=select),
        ),
        _enable_probabilistic_draft_probs=False,
    )


def test_the_drafter_is_asked_for_pairs_and_walks_them():
    candidates, scores = candidates_and_scores()
    anchors = torch.arange(BATCH) + 10
    asked, drafter = proposer(candidates, scores, anchors)
    hidden = torch.randn(BATCH * STEPS, 8)
    tokens, probabilities = sample_draft_tokens(drafter, hidden, None)
    assert tokens.view(BATCH, STEPS).tolist() == by_definition(candidates, scores)
    assert probabilities is None
    assert asked["anchors"].tolist() == anchors.tolist()
    assert torch.equal(asked["candidates"], candidates)
    assert asked["unary"].shape == candidates.shape
    assert torch.equal(asked["hidden"], hidden.view(BATCH, STEPS, 8))


def test_drawn_drafts_come_with_their_distribution_over_the_vocabulary(monkeypatch):
    candidates, scores = candidates_and_scores()
    _, drafter = proposer(candidates, scores, torch.arange(BATCH))
    drafter._enable_probabilistic_draft_probs = True
    drafter.use_fp64_gumbel = False
    drafter.vllm_config = SimpleNamespace(
        model_config=SimpleNamespace(get_vocab_size=lambda: VOCABULARY)
    )

    def draw_the_best(metadata, use_fp64):
        assert (metadata.all_greedy, use_fp64) == (False, False)
        return lambda row: (row.argmax(-1), row.softmax(-1))

    monkeypatch.setattr(dflash2_on_v1, "_drawn", draw_the_best)
    metadata = SimpleNamespace(all_greedy=False)
    tokens, probabilities = sample_draft_tokens(drafter, torch.randn(BATCH * STEPS, 8), metadata)
    assert tokens.view(BATCH, STEPS).tolist() == by_definition(candidates, scores)
    assert probabilities.shape == (BATCH * STEPS, VOCABULARY)
    assert probabilities.is_contiguous()
    torch.testing.assert_close(probabilities.sum(-1), torch.ones(BATCH * STEPS))
    kept = probabilities.view(BATCH, STEPS, VOCABULARY).gather(-1, candidates)
    torch.testing.assert_close(kept[:, 0], scores[:, 0, 0].softmax(-1))
    torch.testing.assert_close(kept.sum(-1), torch.ones(BATCH, STEPS))


@pytest.mark.parametrize("greedy", [True, False])
def test_greedy_batches_need_no_distribution(greedy):
    candidates, scores = candidates_and_scores()
    _, drafter = proposer(candidates, scores, torch.arange(BATCH))
    drafter._enable_probabilistic_draft_probs = greedy  # wanted, and of no use for greedy requests
    metadata = SimpleNamespace(all_greedy=greedy)
    assert sample_draft_tokens(drafter, torch.randn(BATCH * STEPS, 8), metadata)[1] is None
