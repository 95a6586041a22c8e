"""Train a small DFlash2 draft for the tiny glm_moe_dsa, and write it as a folder vLLM loads.

Usage: python -m tiny_glm.train_draft TARGET OUT [--steps 1000] [--seed 0] [--threads 1]
       (in tools/)

Examples:
  python -m tiny_glm.train_draft ../assets/tiny_glm ../assets/tiny_glm_dflash   a few minutes
  python -m tiny_glm.train_draft ../assets/tiny_glm /tmp/try --steps 50         a quick look
  python -m tiny_glm.train_draft ../assets/tiny_glm /tmp/none --steps 0         untrained

What a draft has to say is what its target says, so the target first continues prompts from the
corpus, greedily; its hidden states are kept. The folder gets config.json, model.safetensors
(bfloat16) and training_record.json with the losses and the acceptance on held-out prompts.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import sys
import time
from pathlib import Path

import attrs
import torch
import transformers
from torch import nn
from torch.nn import functional
from transformers import GlmMoeDsaForCausalLM

from . import corpus, draft_model
from .draft_model import DraftSizes, TinyDraft

PROMPT, LENGTH = 24, 128  # tokens of a prompt, and of a row with its continuation
TEXTS, HELD_OUT = 960, 64
ROWS, BLOCKS = 16, 16  # rows of a batch, blocks of a row
_FIRST_ANCHOR = 4
_PEAK_RATE, _WARM_UP = 3e-3, 40
_TOGETHER = 64  # rows that the target continues at once


@attrs.frozen(eq=False)
class Texts:
    """What the target wrote, and what it thought.

    Attributes:
        tokens: int64 [N, LENGTH], the prompt first.
        states: bfloat16 [N, LENGTH, layers * H], outputs of all layers of the target.
    """

    tokens: torch.Tensor
    states: torch.Tensor


@attrs.frozen(eq=False)
class Frozen:
    """What the draft takes from its target: embedding and head, float32 [V, H] each."""

    embedding: torch.Tensor
    head: torch.Tensor


@torch.no_grad()
def written(target: GlmMoeDsaForCausalLM, prompts: torch.Tensor) -> Texts:
    """Greedy continuations of prompts [N, PROMPT], with the states of every layer."""
    tokens, states = [], []
    for rows in prompts.split(_TOGETHER):
        text = target.generate(
            rows,
            attention_mask=torch.ones_like(rows),
            max_new_tokens=LENGTH - PROMPT,
            min_new_tokens=LENGTH - PROMPT,
            do_sample=False,
        )
        tokens.append(text)
        states.append(layer_outputs(target, text).to(torch.bfloat16))
        done = sum(map(len, tokens))
        print(f"the target wrote {done} of {len(prompts)} texts", flush=True)
    return Texts(torch.cat(tokens), torch.cat(states))


@torch.no_grad()
def layer_outputs(target: GlmMoeDsaForCausalLM, tokens: torch.Tensor) -> torch.Tensor:
    """Outputs of all layers [B, S, layers * H] for tokens [B, S], before the last norm."""
    outputs: list[torch.Tensor] = []
    handles = [
        layer.register_forward_hook(
            lambda _module, _args, out: outputs.append(out[0] if isinstance(out, tuple) else out)
        )
        for layer in target.model.layers
    ]
    try:
        target.model(tokens, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return torch.cat(outputs, dim=-1)


def block_losses(
    draft: TinyDraft, frozen: Frozen, texts: Texts, anchors: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cross entropies per position of the block, without and with the selector, [k] each.

    Args:
        draft: what is trained.
        frozen: embedding and head.
        texts: rows [B, LENGTH].
        anchors: [B, A] positions.
    """
    hidden = _mask_states(draft, frozen, texts, anchors)
    wanted = _gathered(texts.tokens, anchors, 1, draft.sizes.drafted)
    alone = functional.linear(hidden, frozen.head)
    previous = torch.cat([_gathered(texts.tokens, anchors, 0, 1), wanted[..., :-1]], dim=-1)
    paired = alone + draft.candidate_selector(hidden, previous)
    return _per_position(alone, wanted), _per_position(paired, wanted)


def _per_position(logits: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    losses = functional.cross_entropy(logits.flatten(0, -2), wanted.flatten(), reduction="none")
    return losses.view(wanted.shape).mean((0, 1))


def _mask_states(
    draft: TinyDraft, frozen: Frozen, texts: Texts, anchors: torch.Tensor
) -> torch.Tensor:
    """States of the mask tokens [B, A, k, H]."""
    masks = torch.full((*anchors.shape, draft.sizes.drafted), draft.sizes.mask_token)
    blocks = torch.cat([_gathered(texts.tokens, anchors, 0, 1), masks], dim=-1)
    return draft(frozen.embedding[blocks], texts.states.float(), anchors)  # type: ignore[no-any-return]


def _gathered(tokens: torch.Tensor, anchors: torch.Tensor, offset: int, count: int) -> torch.Tensor:
    """Tokens [B, A, count] that start ``offset`` after each anchor."""
    places = anchors[..., None] + offset + torch.arange(count)
    return tokens.gather(1, places.flatten(1)).view(places.shape)


@torch.no_grad()
def drafted(draft: TinyDraft, frozen: Frozen, texts: Texts, anchors: torch.Tensor) -> torch.Tensor:
    """Greedy drafts [B, A, k] after the anchors [B, A] of rows [B, S].

    Tokens are chosen one after the other among the draft's candidates, as vLLM chooses them.
    """
    hidden = _mask_states(draft, frozen, texts, anchors)
    chosen = [_gathered(texts.tokens, anchors, 0, 1)[..., 0]]
    for place in range(draft.sizes.drafted):
        states = hidden[:, :, place]
        logits = functional.linear(states, frozen.head)
        scores, candidates = logits.topk(draft.sizes.candidates, dim=-1)
        pairs = draft.candidate_selector(states, chosen[-1]).gather(-1, candidates)
        best = (scores + pairs).argmax(-1, keepdim=True)
        chosen.append(candidates.gather(-1, best)[..., 0])
    return torch.stack(chosen[1:], dim=-1)


def acceptance(draft: TinyDraft, frozen: Frozen, texts: Texts) -> list[float]:
    """Share of the drafts whose first, second ... token the target would accept, [k].

    A block starts at every position of the continuations; a token counts if those before it do.
    """
    k = draft.sizes.drafted
    anchors = torch.arange(PROMPT, LENGTH - k).expand(len(texts.tokens), -1)
    right = drafted(draft, frozen, texts, anchors) == _gathered(texts.tokens, anchors, 1, k)
    shares: list[float] = right.cumprod(dim=-1).float().mean((0, 1)).tolist()
    return shares


def train(
    draft: TinyDraft, frozen: Frozen, texts: Texts, held_out: Texts, steps: int, seed: int
) -> list[dict[str, object]]:
    """Train for ``steps`` batches; returns what was printed on the way."""
    matrices = [p for p in draft.parameters() if p.dim() >= 2]
    vectors = [p for p in draft.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}],
        betas=(0.9, 0.95),
    )
    generator = torch.Generator().manual_seed(seed)
    weights = torch.tensor([0.8**place for place in range(draft.sizes.drafted)])
    history: list[dict[str, object]] = []
    start = time.monotonic()
    for step in range(steps):
        decay = 0.5 * (1 + math.cos(math.pi * step / steps)) * 0.95 + 0.05
        for group in optimizer.param_groups:
            group["lr"] = _PEAK_RATE * min(1.0, (step + 1) / _WARM_UP) * decay
        rows = torch.randint(0, len(texts.tokens), (ROWS,), generator=generator)
        last = LENGTH - draft.sizes.drafted
        anchors = torch.randint(_FIRST_ANCHOR, last, (ROWS, BLOCKS), generator=generator)
        batch = Texts(texts.tokens[rows], texts.states[rows])
        alone, paired = block_losses(draft, frozen, batch, anchors)
        loss = ((0.5 * alone + paired) * weights).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
        optimizer.step()
        if step % 250 == 249 or step + 1 == steps:
            shares, found = acceptance(draft, frozen, held_out), loss.item()
            history.append({"step": step + 1, "loss": found, "acceptance": shares})
            _say(step + 1, steps, found, shares, time.monotonic() - start)
    return history


def _say(done: int, steps: int, loss: float, shares: list[float], seconds: float) -> None:
    accepted = " ".join(f"{share:.2f}" for share in shares)
    left = seconds / done * (steps - done)
    print(
        f"step {done}/{steps}  loss {loss:.3f}  held-out acceptance {accepted}  "
        f"{seconds:.0f} s, about {left:.0f} s left",
        flush=True,
    )


def _mask_token(tokens: torch.Tensor, vocabulary: int) -> int:
    """The last token that no text has."""
    unseen = torch.bincount(tokens.flatten(), minlength=vocabulary) == 0
    if not unseen.any():
        raise SystemExit("every token of the vocabulary occurs; a draft needs one for its masks")
    return int(unseen.nonzero()[-1])


def _prompts(tokens: torch.Tensor, count: int, seed: int) -> torch.Tensor:
    return corpus.batches(tokens, count, PROMPT, torch.Generator().manual_seed(seed))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("target", type=Path, metavar="TARGET")
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--texts", type=int, default=TEXTS, help="continuations to learn from")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    return parser


def main() -> int:
    """Run the command line; returns the exit code."""
    options = _parser().parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    start = time.monotonic()
    data = corpus.load(options.target)
    target = GlmMoeDsaForCausalLM.from_pretrained(
        options.target, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    frozen = Frozen(target.model.embed_tokens.weight.detach(), target.lm_head.weight.detach())
    held_out = written(target, _prompts(data.validation, HELD_OUT, seed=1))
    texts = (
        written(target, _prompts(data.train, options.texts, options.seed))
        if options.steps
        else held_out
    )
    seen = torch.cat([data.train, data.validation, texts.tokens.flatten()])
    sizes = DraftSizes(
        vocabulary=target.config.vocab_size,
        hidden=target.config.hidden_size,
        target_layers=tuple(range(target.config.num_hidden_layers)),
        mask_token=_mask_token(seen, target.config.vocab_size),
        longest=target.config.max_position_embeddings,
    )
    draft = TinyDraft(sizes)
    untrained = acceptance(draft, frozen, held_out)
    history = train(draft, frozen, texts, held_out, options.steps, options.seed)
    shares = acceptance(draft, frozen, held_out)
    record = {
        "script": "tools/tiny_glm/train_draft.py",
        "corpus": f"pydoc_data.topics of CPython {platform.python_version()} (PSF licence)",
        "texts": len(texts.tokens),
        "tokens_per_text": LENGTH,
        "steps": options.steps,
        "seed": options.seed,
        "parameters": sum(p.numel() for p in draft.parameters()),
        "seconds": round(time.monotonic() - start),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "held_out_acceptance": shares,
        "held_out_acceptance_untrained": untrained,
        "history": history,
    }
    draft_model.save(draft, options.out)
    (options.out / "training_record.json").write_text(json.dumps(record, indent=1) + "\n")
    print(f"wrote {options.out}: held-out acceptance " + " ".join(f"{s:.2f}" for s in shares))
    return 0


if __name__ == "__main__":
    sys.exit(main())
