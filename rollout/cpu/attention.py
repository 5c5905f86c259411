"""Attention of a whole batch in a few calls, where SGLang's `torch_native` backend loops over the requests.

Legend of shapes: B requests of a group, Q query rows of each, L keys of each (padded), H query heads, K key heads,
D head width, T tokens of the forward (all requests, flat).
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

QUERY_STEP, SHORTEST_KEYS = 16, 64
MASK_ELEMENTS = 1 << 22
"""Most elements of one group's mask; a longer prefill is split over several calls."""
KEY_ELEMENTS = 1 << 18
"""Most elements of one group's keys, which are gathered for each call. A megabyte stays in a core's cache between
gathering and use, and malloc takes none of it from the kernel anew: 256 requests of 64 or 128 keys take 0.2 (wide
heads) to 0.9 of the time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Requests whose attention is one call. A group of two prompts of 3 and 5 new tokens has B=2, Q=16, L=64."""

    slots: Tensor
    """[B * L] rows of the key and value buffers. Those past a request's length are stale, and masked by `bias`."""
    bias: Tensor
    """[B, 1, Q, L]: 0 where the query may see the key, else -inf."""
    rows: Tensor | None
    """[n] rows of the forward's flat queries that belong to the group; None: all of them, in order."""
    places: Tensor | None
    """[n] where those rows lie in the padded [B * Q]; None: Q is 1 and nothing is padded."""


def padded_keys(length: int, limit: int) -> int:
    """Keys that a request of `length` tokens is padded to: a power of two, at least 64, at most `limit`.

    It depends on the request's own length alone. A length common to the batch would be simpler, but the kernel's
    sums over the keys are blocked by the padded length, so the neighbours would change a request's last bits.
    """
    return min(max(SHORTEST_KEYS, 1 << (length - 1).bit_length()), limit)


def group_requests(lengths: Sequence[int], new: Sequence[int], limit: int) -> dict[tuple[int, int], list[int]]:
    """Requests by their padded size: {(Q, L): indices}. `lengths` include the `new` tokens; Q is 1 in decode."""
    groups: dict[tuple[int, int], list[int]] = defaultdict(list)
    for index, (length, count) in enumerate(zip(lengths, new, strict=True)):
        queries = 1 if count == 1 else -(-count // QUERY_STEP) * QUERY_STEP
        groups[queries, padded_keys(length, limit)].append(index)
    return groups


def backend_for(model_runner: Any) -> TorchNativeAttnBackend:
    """`BatchedAttention`, or SGLang's own backend where attention is more than causal self-attention, or where a
    forward may verify drafted tokens."""
    layers = [layer for layer in model_runner.model.modules() if isinstance(layer, RadixAttention)]
    plain = all(
        layer.attn_type == AttentionType.DECODER and not layer.is_cross_attention and layer.sliding_window_size < 0
        for layer in layers
    )
    drafted = model_runner.server_args.speculative_algorithm is not None
    return BatchedAttention(model_runner, layers) if plain and not drafted else TorchNativeAttnBackend(model_runner)


class BatchedAttention(TorchNativeAttnBackend):
    """Causal self-attention of all requests with one SDPA call a group and layer."""

    def __init__(self, model_runner: Any, layers: Sequence[RadixAttention]) -> None:
        super().__init__(model_runner)
        self.dtype = model_runner.dtype
        self.groups: list[Group] = []
        self.key_width = max((layer.tp_k_head_num * layer.qk_head_dim for layer in layers), default=1)
        """Elements of a token's keys in one layer."""

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Plans the forward: indices and masks are the same in every layer."""
        mode, on_host = forward_batch.forward_mode, forward_batch.seq_lens_cpu
        lengths = (forward_batch.seq_lens if on_host is None else on_host).tolist()
        new = [1] * len(lengths) if mode.is_decode() else list(forward_batch.extend_seq_lens_cpu or ())
        self.groups = self._plan(forward_batch.req_pool_indices, lengths, new)

    def _plan(self, requests: Tensor, lengths: list[int], new: list[int]) -> list[Group]:
        """`requests`: [n] rows of the table of slots."""
        table, starts = self.req_to_token_pool.req_to_token, torch.tensor([0, *new]).cumsum(0)
        groups = []
        for (queries, keys), members in group_requests(lengths, new, table.shape[1]).items():
            most = max(1, min(MASK_ELEMENTS // (queries * keys), KEY_ELEMENTS // (keys * self.key_width)))
            for begin in range(0, len(members), most):
                chosen = members[begin : begin + most]
                index = torch.tensor(chosen)
                total, count = torch.tensor([lengths[i] for i in chosen]), torch.tensor([new[i] for i in chosen])
                query = torch.arange(queries)
                position = (total - count)[:, None] + query  # [B, Q]
                masked = torch.arange(keys) > position[:, :, None]  # [B, Q, L]
                bias = torch.zeros(masked.shape, dtype=self.dtype).masked_fill_(masked, float("-inf"))
                rows: Tensor | None = starts[index]
                places = None
                if queries > 1:
                    real = query < count[:, None]  # [B, Q]
                    rows, places = (starts[index][:, None] + query)[real], real.view(-1).nonzero().view(-1)
                elif len(chosen) == len(lengths):
                    rows = None
                slots = table[requests[index], :keys].long().view(-1)
                groups.append(Group(slots=slots, bias=bias[:, None], rows=rows, places=places))
        return groups

    def forward_extend(
        self, q: Tensor, k: Tensor, v: Tensor, layer: RadixAttention, forward_batch: Any, save_kv_cache: bool = True
    ) -> Tensor:
        """[T, H * D] -> [T, H * D]: prompts, or the part of them that is not cached; in decode, one token a request."""
        pool = self.token_to_kv_pool
        if save_kv_cache and k is not None and v is not None:
            pool.set_kv_buffer(layer, KVWriteLoc(forward_batch.out_cache_loc, None), k, v)
        keys, values = pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)
        q = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        out = q.new_empty(q.shape[0], layer.tp_q_head_num * layer.v_head_dim)
        for group in self.groups:
            shape = (len(group.bias), group.bias.shape[-1], layer.tp_k_head_num, -1)
            key = keys.index_select(0, group.slots).view(shape).transpose(1, 2).to(q.dtype)  # [B, K, L, D]
            value = values.index_select(0, group.slots).view(shape).transpose(1, 2).to(q.dtype)
            result = _attend_group(q if group.rows is None else q[group.rows], key, value, group, layer)
            if group.rows is None:
                return result
            out[group.rows] = result
        return out

    forward_decode = forward_extend


def _attend_group(q: Tensor, key: Tensor, value: Tensor, group: Group, layer: RadixAttention) -> Tensor:
    """[n, H, D] queries of the group's rows -> [n, H * D]."""
    heads, key_heads, width = layer.tp_q_head_num, layer.tp_k_head_num, layer.v_head_dim
    size, _, queries, _ = group.bias.shape
    if group.places is None:
        # One token a request: the query heads that share a key head become its rows, so no key is copied.
        q = q.view(size, key_heads, heads // key_heads, -1)
        result = scaled_dot_product_attention(q, key, value, attn_mask=group.bias, scale=layer.scaling)
        return result.reshape(size, heads * width)
    padded = q.new_zeros(size * queries, *q.shape[1:])
    padded[group.places] = q
    padded = padded.view(size, queries, heads, -1).transpose(1, 2)
    grouped = heads != key_heads
    result = scaled_dot_product_attention(padded, key, value, group.bias, scale=layer.scaling, enable_gqa=grouped)
    return result.transpose(1, 2).reshape(size * queries, heads * width)[group.places]
