"""Attention for packed rows: a token attends only to its own sequence, without a mask of the whole row.

Registered with Transformers under a name; `use` selects it for a model. The row's layout is passed to the forward pass
as the keyword `layout`, so that gradient checkpointing recomputes with the same one. Shapes: T tokens of a row,
H heads of queries, G of keys, D size of a head, Q queries and S keys of a mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from trainer_service.prefix_tree import Node, path

NAME = "flywheel"
BLOCK = 1024  # queries that share a mask


@dataclass(frozen=True, slots=True)
class Layout:
    """Which tokens of a row belong to the same sequences."""

    nodes: tuple[Node, ...]
    _kept: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)  # cache for all layers

    @property
    def folded(self) -> bool:
        return any(node.parent >= 0 for node in self.nodes)

    @property
    def lengths(self) -> list[int]:
        """Lengths of the nodes; without folding, of the sequences."""
        return [node.end - node.start for node in self.nodes]

    def kwargs(self, device: torch.device) -> dict[str, Any]:
        """Return keywords for a model's call: for our attention, and for layers that carry a state along the row."""
        if self.folded:
            return {"layout": self}
        starts, sequence_T = self._boundaries(device)
        return {"layout": self, "cu_seq_lens_q": starts, "seq_idx": sequence_T}

    def _boundaries(self, device: torch.device) -> tuple[Tensor, Tensor]:
        if ("boundaries", device) not in self._kept:
            lengths = torch.tensor(self.lengths, device=device)
            starts = F.pad(lengths.cumsum(0), (1, 0)).int()
            numbers = torch.arange(len(self.nodes), device=device, dtype=torch.int32)
            self._kept["boundaries", device] = starts, numbers.repeat_interleave(lengths).unsqueeze(0)
        found: tuple[Tensor, Tensor] = self._kept["boundaries", device]
        return found

    def paths(self) -> list[list[int]]:
        """Return for each node the nodes that its tokens attend to, from the root to itself."""
        if "paths" not in self._kept:
            self._kept["paths"] = [path(self.nodes, number) for number in range(len(self.nodes))]
        found: list[list[int]] = self._kept["paths"]
        return found

    def variable(self, device: torch.device) -> tuple[Tensor | None, Tensor, Tensor, int, int]:
        """Return arguments of variable-length kernels: indices of the keys in the row (None: the row itself), starts of
        the queries and of the keys of each node, and the maximum number of each."""
        if ("variable", device) not in self._kept:
            pieces = [[self.nodes[n] for n in found] for found in self.paths()]
            places = [torch.arange(piece.start, piece.end) for found in pieces for piece in found]
            queries = torch.tensor(self.lengths)
            keys = torch.tensor([node.depth + node.end - node.start for node in self.nodes])
            starts = (F.pad(lengths.cumsum(0), (1, 0)).int().to(device) for lengths in (queries, keys))
            index = torch.cat(places).to(device) if self.folded else None
            self._kept["variable", device] = (index, *starts, int(queries.max()), int(keys.max()))
        found: tuple[Tensor | None, Tensor, Tensor, int, int] = self._kept["variable", device]
        return found

    def mask(self, first: int, queries: int, keys: int, window: int | None, device: torch.device) -> Tensor:
        """Return a mask [queries, keys], True: attended. first: position of the first query; the keys end with the last
        query."""
        name = (first, queries, keys, window, device)
        if name not in self._kept:
            query_Q1 = torch.arange(first, first + queries, device=device).unsqueeze(1)
            key_S = torch.arange(first + queries - keys, first + queries, device=device)
            seen_QS = key_S <= query_Q1
            self._kept[name] = seen_QS if window is None else seen_QS & (key_S > query_Q1 - window)
        found: Tensor = self._kept[name]
        return found


def use(model: Any) -> bool:
    """Make a model use this attention. Returns whether its code supports that."""
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, _no_mask)
    model.set_attn_implementation(NAME)
    return bool(model.config._attn_implementation == NAME)


def _no_mask(*, attention_mask: Tensor | None = None, **_: Any) -> None:
    """Replace the mask of Transformers. Raises ValueError for padding: packed rows have none."""
    if attention_mask is not None and not bool(attention_mask.all()):
        raise ValueError("the trainer's attention takes packed rows, but this one is padded")


def attend(
    module: nn.Module,
    query_1HTD: Tensor,
    key_1GTD: Tensor,
    value_1GTD: Tensor,
    attention_mask: Tensor | None,
    *,
    layout: Layout | None = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **unknown: Any,
) -> tuple[Tensor, None]:
    """Attention as Transformers calls it: [1, T, H, D]. Without a layout, each of the rows is one sequence.

    s_aux: [H], attention sinks: the logit of a further key of each head, whose value is zero. Raises
    NotImplementedError for options that it does not support, such as a position bias.
    """
    if attention_mask is not None or unknown.get("position_bias") is not None:
        raise NotImplementedError(
            f"{type(module).__name__} attends in a way that the trainer's attention does not know"
        )
    if layout is None:
        length = query_1HTD.shape[2]
        layout = Layout((Node(0, length, -1, 0),))
    options = _Options(layout, scaling, sliding_window, softcap, s_aux)
    if _has_kernel(query_1HTD, value_1GTD, options):
        return _by_kernel(query_1HTD, key_1GTD, value_1GTD, options), None
    queries, keys, values = (torch.split(t, layout.lengths, dim=2) for t in (query_1HTD, key_1GTD, value_1GTD))
    outputs = [
        _node(node, queries[found[-1]], _join(keys, found), _join(values, found), options)
        for node, found in zip(layout.nodes, layout.paths(), strict=True)
    ]
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous(), None


@dataclass(frozen=True, slots=True)
class _Options:
    layout: Layout
    scaling: float | None
    window: int | None
    softcap: float | None
    sinks_H: Tensor | None

    @property
    def are_plain(self) -> bool:
        """Whether PyTorch's own attention supports all of them."""
        return self.softcap is None and self.sinks_H is None


def _join(pieces: Sequence[Tensor], found: list[int]) -> Tensor:
    return pieces[found[0]] if len(found) == 1 else torch.cat([pieces[n] for n in found], dim=2)


def _node(node: Node, query: Tensor, key: Tensor, value: Tensor, options: _Options) -> Tensor:
    """Return the attention of one node's tokens to the keys and values of the path that ends with them."""
    total, window = key.shape[2], options.window
    if node.depth == 0 and options.are_plain and (window is None or window >= total):
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=options.scaling, enable_gqa=True)
    outputs = []
    for offset in range(0, query.shape[2], BLOCK):
        block = query[:, :, offset : offset + BLOCK]
        first = node.depth + offset
        end = first + block.shape[2]
        begin = 0 if window is None else max(0, first - window + 1)
        mask = options.layout.mask(first, end - first, end - begin, window, query.device)
        outputs.append(_block(block, key[:, :, begin:end], value[:, :, begin:end], mask, options))
    return torch.cat(outputs, dim=2) if len(outputs) > 1 else outputs[0]


def _block(query: Tensor, key: Tensor, value: Tensor, mask_QS: Tensor, options: _Options) -> Tensor:
    if options.are_plain:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask_QS, scale=options.scaling, enable_gqa=True
        )
    groups, scale = key.shape[1], options.scaling or query.shape[-1] ** -0.5
    by_group = torch.unflatten(query, 1, (groups, -1))  # [1, G, H / G, Q, D]
    logits = by_group @ key.unsqueeze(2).mT * scale
    if options.softcap is not None:
        logits = torch.tanh(logits / options.softcap) * options.softcap
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)).masked_fill(~mask_QS, -torch.inf)
    if options.sinks_H is not None:
        sinks = options.sinks_H.to(logits.dtype).view(groups, -1, 1, 1)
        logits = torch.cat((logits, sinks.expand(*logits.shape[:-1], 1)), dim=-1)
    weights = logits.softmax(-1)[..., : key.shape[2]].to(value.dtype)
    return (weights @ value.unsqueeze(2)).flatten(1, 2)


def _has_kernel(query: Tensor, value: Tensor, options: _Options) -> bool:
    """Whether PyTorch's kernel for variable-length sequences supports these tensors."""
    return (
        query.is_cuda
        and query.dtype in (torch.float16, torch.bfloat16)
        and query.shape[0] == 1
        and query.shape[-1] == value.shape[-1] <= 256
        and query.shape[-1] % 8 == 0
        and options.are_plain
        and torch.cuda.get_device_capability(query.device) >= (8, 0)
    )


def _by_kernel(query: Tensor, key: Tensor, value: Tensor, options: _Options) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    index, query_starts, key_starts, most_queries, most_keys = options.layout.variable(query.device)
    query_THD, key_SGD, value_SGD = (t[0].transpose(0, 1) for t in (query, key, value))
    if index is not None:
        key_SGD, value_SGD = key_SGD[index], value_SGD[index]
    window = -1 if options.window is None else options.window - 1
    output = varlen_attn(
        query_THD,
        key_SGD,
        value_SGD,
        query_starts,
        key_starts,
        most_queries,
        most_keys,
        scale=options.scaling,
        window_size=(window, 0),
        enable_gqa=True,
    )
    assert isinstance(output, Tensor)  # a pair only if more is requested
    return output.unsqueeze(0)
