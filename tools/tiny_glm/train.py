"""Train the tiny glm_moe_dsa and its MTP layer, and write them as a Hugging Face folder.

Usage: python -m tiny_glm.train OUT [--steps 1000] [--seed 0] [--threads 1]   (in tools/)

Examples:
  python -m tiny_glm.train ../assets/tiny_glm            about 10 minutes on one core
  python -m tiny_glm.train /tmp/try --steps 50           a quick look whether it runs

The last 60 % of the steps train the MTP layer too, the last 40 % attend sparsely. The folder gets
config.json, tokenizer.json, model.safetensors (bfloat16) and training_record.json with the losses.
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

from ascend_specdecode.hf import MtpLayer

from . import corpus, model
from .index_loss import IndexLosses

ROWS, LENGTH = 16, 128  # sequences of a batch, tokens of a sequence
_PEAK_RATE, _WARM_UP = 2.5e-3, 60
_MTP_FROM, _SPARSE_FROM, _SECOND_STEP_FROM = 0.4, 0.6, 0.7  # parts of the training
_INDEX_WEIGHT = 0.1


@attrs.frozen(eq=False)
class Trained:
    """What is trained together.

    Attributes:
        target: The language model.
        mtp: Its MTP layer.
        data: The corpus.
    """

    target: GlmMoeDsaForCausalLM
    mtp: MtpLayer
    data: corpus.Corpus

    def parameters(self) -> list[nn.Parameter]:
        """All parameters, each once."""
        return [*self.target.parameters(), *self.mtp.parameters()]


def next_token_loss(trained: Trained, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean cross entropy of the target and its last hidden states [B, S, H]."""
    hidden = trained.target.model(tokens[:, :LENGTH], use_cache=False).last_hidden_state
    return _cross_entropy(trained, hidden, tokens[:, 1 : LENGTH + 1]), hidden


def mtp_loss(
    trained: Trained, tokens: torch.Tensor, hidden: torch.Tensor, steps: int
) -> torch.Tensor:
    """Mean cross entropy of the MTP layer over ``steps`` draft steps from the target's states."""
    losses = []
    for step in range(steps):
        hidden = hidden[:, :-1]
        length = hidden.shape[1]
        embedded = trained.target.model.embed_tokens(tokens[:, 1 + step : 1 + step + length])
        embedded = torch.cat([torch.zeros_like(embedded[:, :1]), embedded[:, 1:]], dim=1)
        rotary = trained.target.model.rotary_emb(embedded, torch.arange(length)[None])
        hidden = trained.mtp(embedded, hidden, rotary, model.causal_mask(length))
        losses.append(_cross_entropy(trained, hidden, tokens[:, 2 + step : 2 + step + length]))
    return torch.stack(losses).mean()


def _cross_entropy(trained: Trained, hidden: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    logits = trained.target.lm_head(hidden)
    return functional.cross_entropy(logits.flatten(0, 1), wanted.flatten())


@torch.no_grad()
def validation_losses(trained: Trained, count: int = 8) -> tuple[float, float]:
    """Losses of the target and of one MTP step on held-out text; always the same batches."""
    generator = torch.Generator().manual_seed(1)
    rows = []
    for _ in range(count):
        tokens = corpus.batches(trained.data.validation, ROWS, LENGTH + 2, generator)
        loss, hidden = next_token_loss(trained, tokens)
        rows.append((float(loss), float(mtp_loss(trained, tokens, hidden, 1))))
    target, mtp = (sum(side) / count for side in zip(*rows, strict=True))
    return target, mtp


def train(trained: Trained, steps: int, seed: int) -> list[dict[str, float]]:
    """Train for ``steps`` batches; returns the losses on the way, printed as they come."""
    matrices = [p for p in trained.parameters() if p.dim() >= 2]
    vectors = [p for p in trained.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}],
        betas=(0.9, 0.95),
    )
    losses = IndexLosses([layer.self_attn for layer in trained.target.model.layers])
    mtp_losses = IndexLosses([trained.mtp.layer.self_attn])
    generator = torch.Generator().manual_seed(seed)
    history, start = [], time.monotonic()
    for step in range(steps):
        part = step / steps
        for group in optimizer.param_groups:
            group["lr"] = _rate(step, part)
        tokens = corpus.batches(trained.data.train, ROWS, LENGTH + 2, generator)
        dense = part < _SPARSE_FROM
        with losses.attached(dense=dense), mtp_losses.attached(dense=dense):
            loss, hidden = next_token_loss(trained, tokens)
            total = loss + _INDEX_WEIGHT * losses.take()
            if part >= _MTP_FROM:
                depth = 1 if part < _SECOND_STEP_FROM else 2
                total = total + mtp_loss(trained, tokens, hidden.detach(), depth)
                total = total + _INDEX_WEIGHT * mtp_losses.take()
        optimizer.zero_grad()
        total.backward()
        nn.utils.clip_grad_norm_(trained.parameters(), 1.0)
        optimizer.step()
        if step % 100 == 99 or step + 1 == steps:
            history.append(_progress(trained, step + 1, steps, float(loss), start))
    return history


def _rate(step: int, part: float) -> float:
    decay = 0.5 * (1 + math.cos(math.pi * part)) * 0.95 + 0.05
    return _PEAK_RATE * min(1.0, (step + 1) / _WARM_UP) * decay


def _progress(
    trained: Trained, done: int, steps: int, loss: float, start: float
) -> dict[str, float]:
    target, mtp = validation_losses(trained, 2)
    seconds = time.monotonic() - start
    left = seconds / done * (steps - done)
    print(
        f"step {done}/{steps}  loss {loss:.3f}  validation {target:.3f}, MTP {mtp:.3f}  "
        f"{seconds:.0f} s, about {left:.0f} s left",
        flush=True,
    )
    return {"step": done, "loss": loss, "validation": target, "validation_mtp": mtp}


def _write(trained: Trained, folder: Path, record: dict[str, object]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    trained.data.tokenizer.save(str(folder / "tokenizer.json"))
    end = corpus.END_OF_TEXT
    tokenizer = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": end,
        "pad_token": end,
        "model_max_length": trained.target.config.max_position_embeddings,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer, indent=1) + "\n")
    model.save(trained.target, trained.mtp, folder)
    (folder / "training_record.json").write_text(json.dumps(record, indent=1) + "\n")


def main() -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    data = corpus.load()
    target = model.target(data.tokenizer.get_vocab_size())
    trained = Trained(target, model.mtp_layer(target.config), data)
    print(f"{sum(p.numel() for p in trained.parameters()) / 1e6:.2f} M parameters", flush=True)
    start = time.monotonic()
    history = train(trained, options.steps, options.seed)
    final = validation_losses(trained)
    record: dict[str, object] = {
        "script": "tools/tiny_glm/train.py",
        "corpus": f"pydoc_data.topics of CPython {platform.python_version()} (PSF licence)",
        "train_tokens": len(data.train),
        "validation_tokens": len(data.validation),
        "steps": options.steps,
        "tokens_seen": options.steps * ROWS * LENGTH,
        "seed": options.seed,
        "seconds": round(time.monotonic() - start),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "validation_loss": final[0],
        "validation_loss_mtp": final[1],
        "history": history,
    }
    _write(trained, options.out, record)
    print(f"wrote {options.out}: validation loss {final[0]:.3f}, MTP {final[1]:.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
