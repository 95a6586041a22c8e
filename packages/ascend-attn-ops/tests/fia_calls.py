"""Drawn problems as calls of fused_infer_attention_score, v1 or v2."""

from __future__ import annotations

from typing import Any

import torch
from fia_problems import PACKED, TEMPLATE, Requests, band

V2 = {
    "actual_seq_lengths": "actual_seq_qlen", "actual_seq_lengths_kv": "actual_seq_kvlen",
    "num_heads": "num_query_heads", "scale": "softmax_scale",
    "softmax_lse_flag": "return_softmax_lse",
}  # fmt: skip
FROM_BSND = {
    "BSH": lambda t: t.flatten(2),
    "BSND": lambda t: t,
    "BNSD": lambda t: t.permute(0, 2, 1, 3).contiguous(),
    "NBSD": lambda t: t.permute(2, 0, 1, 3).contiguous(),
}


class Builder:
    """Packs one drawn problem."""

    def __init__(self, p: dict[str, Any], dtype: torch.dtype = torch.float32) -> None:
        self.p, self.dtype = p, dtype
        self.rng = torch.Generator().manual_seed(p["seed"])
        self.packed = p["layout"] in PACKED
        self.base, self.target = p["layout"].split("_")[0], p["layout"].split("_")[-1]
        self.length = max(p["q_lens"]) + (0 if self.packed else p["padding"])
        self.single = not self.packed and self.length == 1 and not p["rope"]
        self.room = max(p["kv_lens"]) + p["padding"]
        if p["form"] != "rows":
            self.room = max(-(-self.room // p["block"]), 1) * p["block"]

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.rng).to(self.dtype)

    def call(self, version: int) -> tuple[dict[str, Any], Requests]:
        """Arguments and the requests they stand for."""
        p = self.p
        heads, kv_heads = p["heads"]
        width = {"query": p["size"], "key": p["size"], "value": p["value_size"], "rope": p["rope"]}
        query = [self.random(n, heads, width["query"] + p["rope"]) for n in p["q_lens"]]
        key = [self.random(n, kv_heads, width["key"] + p["rope"]) for n in p["kv_lens"]]
        value = [self.random(n, kv_heads, width["value"]) for n in p["kv_lens"]]
        data: dict[str, Any] = {
            "query": self.pack([t[..., : p["size"]] for t in query], self.length),
            "num_heads": heads, "num_key_value_heads": kv_heads, "input_layout": p["layout"],
            "sparse_mode": p["mode"], "pre_tokens": p["pre"], "next_tokens": p["next"],
            "scale": 0.3,
        }  # fmt: skip
        if p["rope"]:
            data["query_rope"] = self.pack([t[..., p["size"] :] for t in query], self.length)
        self.add_keys(data, key, value)
        self.add_lengths(data)
        if version == 1 and p["prefix"] and not p["rope"]:
            key, value = self.add_prefix(data, key, value)
        hidden = self.add_mask(data, key)
        shift = self.add_shift(data, key)
        sink = None
        if version == 2 and p["sink"]:
            sink = data["learnable_sink"] = self.random(heads)
        else:
            data["softmax_lse_flag"] = True
        if version == 2:
            data = {V2.get(name, name): value for name, value in data.items()}
        return data, Requests(query, key, value, hidden, shift, sink)

    def pack(self, parts: list[torch.Tensor], length: int) -> torch.Tensor:
        """Request-wise [L, N, D] in the layout of the query; padding rows hold noise."""
        if self.packed:
            rows = torch.cat(parts)
            return rows if self.base == "TND" else rows.transpose(0, 1).contiguous()
        whole = self.random(len(parts), length, *parts[0].shape[1:])
        for row, part in zip(whole, parts, strict=True):
            row[: len(part)] = part
        return FROM_BSND[self.base](whole)

    def add_keys(
        self, data: dict[str, Any], key: list[torch.Tensor], value: list[torch.Tensor]
    ) -> None:
        p = self.p
        split = {"key": [t[..., : p["size"]] for t in key], "value": value}
        if p["rope"]:
            split["key_rope"] = [t[..., p["size"] :] for t in key]
        if p["form"] != "rows":
            columns = self.room // p["block"]
            blocks = columns * len(key) + 1
            table = torch.randperm(blocks, generator=self.rng)[:-1].view(-1, columns)
            data |= {name: self.cache(parts, table, blocks) for name, parts in split.items()}
            for row, n in zip(table, p["kv_lens"], strict=True):
                row[-(-n // p["block"]) :] = -7  # never read
            data |= {"block_table": table.int(), "block_size": p["block"]}
        elif p["list"] and not p["rope"]:
            for name, parts in split.items():
                data[name] = [FROM_BSND[self.base](part[None]) for part in parts]
        else:
            data |= {name: self.pack(parts, self.room) for name, parts in split.items()}

    def cache(self, parts: list[torch.Tensor], table: torch.Tensor, blocks: int) -> torch.Tensor:
        """A paged cache; slot by slot."""
        form, bs = self.p["form"], self.p["block"]
        heads, size = parts[0].shape[1:]
        store = self.random(blocks, bs, heads, size)
        for row, part in zip(table.tolist(), parts, strict=True):
            for position, token in enumerate(part):
                store[row[position // bs], position % bs] = token
        if form == "BnBsH":
            return store.reshape(blocks, bs, heads * size)
        if form == "BnNBsD":
            return store.permute(0, 2, 1, 3)
        return store.view(blocks, bs, heads, size // 16, 16).permute(0, 2, 3, 1, 4).contiguous()

    def add_lengths(self, data: dict[str, Any]) -> None:
        p = self.p
        if self.packed:
            data["actual_seq_lengths"] = torch.tensor(p["q_lens"]).cumsum(0).tolist()
        elif p["padding"] or len(set(p["q_lens"])) > 1:
            data["actual_seq_lengths"] = p["q_lens"]
        cumulative = self.packed and p["form"] == "rows"
        kv_lens = torch.tensor(p["kv_lens"])
        data["actual_seq_lengths_kv"] = (kv_lens.cumsum(0) if cumulative else kv_lens).tolist()

    def add_prefix(
        self, data: dict[str, Any], key: list[torch.Tensor], value: list[torch.Tensor]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        used = self.p["prefix"]
        if self.p["list"]:
            return key, value
        shared = [self.random(used + 2, *parts[0].shape[1:]) for parts in (key, value)]
        for name, part in zip(("key_shared_prefix", "value_shared_prefix"), shared, strict=True):
            data[name] = FROM_BSND[self.base](part[None])
        data["actual_shared_prefix_len"] = [used]
        whole = [
            [torch.cat([prefix[:used], part]) for part in parts]
            for prefix, parts in zip(shared, (key, value), strict=True)
        ]
        return whole[0], whole[1]

    def add_mask(self, data: dict[str, Any], key: list[torch.Tensor]) -> list[torch.Tensor]:
        """Adds the mask the mode wants; returns what is hidden, request by request."""
        p, mode = self.p, self.p["mode"]
        pairs = [(n, len(part)) for n, part in zip(p["q_lens"], key, strict=True)]
        if mode in (2, 3, 4) and not (self.single and p["mask"]):
            data["atten_mask"] = TEMPLATE
            return [band(mode, lq, lkv, p["pre"], p["next"]) for lq, lkv in pairs]
        if mode == 0 and not p["mask"]:
            return [torch.zeros(lq, lkv, dtype=torch.bool) for lq, lkv in pairs]
        extra = 3 if p["mask"] == "large" else 0
        count = len(pairs) if p["mask"] == "each" else 1
        columns = self.room + (p["prefix"] + 2 if "key_shared_prefix" in data else 0)
        mask = torch.rand(count, self.length + extra, columns + extra, generator=self.rng) < 0.4
        data["atten_mask"] = mask[:, None] if p["seed"] % 2 else mask
        own = [mask[b % count, :lq, :lkv] for b, (lq, lkv) in enumerate(pairs)]
        used = mode if mode == 0 else 1
        return [
            part | band(used, lq, lkv, p["pre"], p["next"])
            for part, (lq, lkv) in zip(own, pairs, strict=True)
        ]

    def add_shift(self, data: dict[str, Any], key: list[torch.Tensor]) -> list[torch.Tensor] | None:
        count = self.p["shift"]
        if not count:
            return None
        columns = self.room + (self.p["prefix"] + 2 if "key_shared_prefix" in data else 0)
        shift = self.random(count, self.p["heads"][0], self.length, columns)
        data["pse_shift"] = shift
        return [
            shift[b % count, :, :lq, : len(part)]
            for b, (lq, part) in enumerate(zip(self.p["q_lens"], key, strict=True))
        ]

    def expected(self, requests: Requests) -> tuple[torch.Tensor, torch.Tensor]:
        """out and lse in the output layout; padding rows are 0 and +inf."""
        answers = requests.answer(0.3)
        outs, lses = zip(*answers, strict=True)
        if self.packed:
            out, lse = torch.cat(outs), torch.cat(lses)[..., None]
            return (out if self.target == "TND" else out.transpose(0, 1)), lse
        batch, (_, heads, size) = len(outs), outs[0].shape
        out = torch.zeros(batch, self.length, heads, size, dtype=torch.float64)
        lse = torch.full((batch, self.length, heads), torch.inf, dtype=torch.float64)
        for b, (part, part_lse) in enumerate(answers):
            out[b, : len(part)], lse[b, : len(part)] = part, part_lse
        return FROM_BSND[self.target](out), lse.transpose(1, 2)[..., None]
