"""Buffer of V1, for the stand-in of deep_ep."""

from typing import Any

import torch
from torch import Tensor

from parallel.fake_deep_ep import FakeDeepEP, FakeEvent, add_partial_sums, check_choices, check_tokens, gather
from parallel.fake_deep_ep import local_ids as to_local

RANKS = (2, 4, 8)


class FakeConfig:
    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return hidden_bytes * num_ranks * 256

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return 0


class FakeLegacyHandle(tuple):
    """Six tensors to the user; what this stand-in keeps is beside them."""

    came: list[tuple[int, int]]
    local_nK: Tensor
    ids: Tensor


class FakeLegacy:
    module: FakeDeepEP
    version: str

    def __init__(self, group: Any, num_nvl_bytes: int, num_rdma_bytes: int, **settings: Any) -> None:
        assert group is not None
        assert group.size() in RANKS
        assert not settings["low_latency_mode"]
        self.group, self.rank, self.num_ranks = group, group.rank(), group.size()
        self.num_nvl_bytes = num_nvl_bytes
        self.settings = settings
        self.alive = True
        self.module.calls.append("make")

    def destroy(self) -> None:
        assert self.settings["explicitly_destroy"]
        assert self.alive
        self.alive = False
        self.module.calls.append("destroy")

    def get_dispatch_config(num_ranks: int) -> FakeConfig:  # type: ignore[misc]
        assert num_ranks in RANKS, f"Unsupported number of EP ranks: {num_ranks}"
        return FakeConfig()

    get_combine_config = get_dispatch_config

    def get_dispatch_layout(self, topk_idx: Tensor, num_experts: int, **given: Any) -> Any:
        assert topk_idx.ndim == 2
        assert topk_idx.is_contiguous()
        assert num_experts % self.num_ranks == 0
        ranks = torch.where(topk_idx < 0, -1, topk_idx // (num_experts // self.num_ranks))
        is_in_rank = torch.stack([(ranks == rank).any(1) for rank in range(self.num_ranks)], dim=1)
        per_expert = torch.tensor([int((topk_idx == expert).sum()) for expert in range(num_experts)])
        event = FakeEvent(self.module, (topk_idx,), asynchronous=given["async_finish"])
        per_rank = event.output(is_in_rank.sum(0).int())
        return per_rank, None, event.output(per_expert.int()), event.output(is_in_rank), event

    def dispatch(self, x: Any, **given: Any) -> Any:
        assert self.alive
        x, scales = x if isinstance(x, tuple) else (x, None)
        check_tokens(x, scales, x.shape[1])
        assert FakeConfig().get_nvl_buffer_size_hint(2 * x.shape[1], self.num_ranks) <= self.num_nvl_bytes
        assert not given["allocate_on_comm_stream"] or (given["previous_event"] is not None and given["async_finish"])
        handle = given["handle"]
        if handle is not None:
            assert given["topk_idx"] is None
            assert given["topk_weights"] is None
            assert scales is None
            assert given["num_worst_tokens"] == 0
            assert x.shape[0] == handle.ids.shape[0]
            self.module.calls.append("cached dispatch")
            event = FakeEvent(self.module, (x,), asynchronous=given["async_finish"])
            rows, _, _ = self._deliver(x, None, None, handle, handle[3].shape[0])
            return event.output(rows), None, None, None, None, event
        return self._first_dispatch(x, scales, **given)

    def _first_dispatch(self, x: Tensor, scales: Tensor | None, **given: Any) -> Any:
        ids, weights, worst = given["topk_idx"], given["topk_weights"], given["num_worst_tokens"]
        num_experts = given["num_tokens_per_expert"].shape[0]
        check_choices(ids, weights, x.shape[0], num_experts)
        expected = self.get_dispatch_layout(ids, num_experts)
        names = ("num_tokens_per_rank", "num_tokens_per_rdma_rank", "num_tokens_per_expert", "is_token_in_rank")
        for name, value in zip(names, expected, strict=False):
            assert value is None if given[name] is None else torch.equal(given[name], value), name
        self.module.calls.append("dispatch")
        self.module.host_reads += worst == 0

        everyone = gather(self.group, (ids, worst > 0))
        assert len({flag for _, flag in everyone}) == 1
        local = [to_local(other, num_experts, self.rank, self.num_ranks) for other, _ in everyone]
        came: list[tuple[int, int]] = []
        for source, ids_of_source in enumerate(local):
            tokens = [token for token, row in enumerate(ids_of_source.tolist()) if max(row) >= 0]
            self.module.random.shuffle(tokens)
            came += [(source, token) for token in tokens]
        num_tokens = worst or len(came)
        assert len(came) <= num_tokens
        local_nK = torch.full((num_tokens, ids.shape[1]), -1)
        for place, (source, token) in enumerate(came):
            local_nK[place] = local[source][token]
        event = FakeEvent(self.module, (x, scales, ids, weights), asynchronous=given["async_finish"])
        handle = FakeLegacyHandle([None, None, None, torch.zeros(num_tokens), given["is_token_in_rank"], None])
        handle.came, handle.local_nK, handle.ids = came, local_nK, ids.clone()
        rows, row_scales, row_weights = self._deliver(x, scales, weights, handle, num_tokens)
        arrived = event.output(rows)
        if scales is not None:
            arrived = (arrived, event.output(row_scales))
        counts = [] if worst else [int((local_nK == expert).sum()) for expert in range(num_experts // self.num_ranks)]
        return arrived, event.output(local_nK.clone()), event.output(row_weights), counts, handle, event

    def _deliver(self, x: Tensor, scales: Tensor | None, weights: Tensor | None, handle: Any, num_tokens: int) -> Any:
        everyone = gather(self.group, (x.float(), scales, weights))
        found = []
        for kind, own in enumerate((x, scales, weights)):
            values = None if own is None else torch.full((num_tokens, own.shape[1]), torch.nan)
            for place, (source, token) in enumerate(handle.came):
                if values is not None:
                    values[place] = everyone[source][kind][token]
            found.append(values)
        return found[0].to(x.dtype), found[1], found[2]

    def combine(self, x: Tensor, handle: Any, **given: Any) -> Any:
        assert self.alive
        weights = given["topk_weights"]
        check_tokens(x, None, x.shape[1])
        assert x.shape[0] == handle[3].shape[0]
        if weights is not None:
            assert weights.shape == handle.local_nK.shape
            assert weights.dtype == torch.float32
            assert weights.is_contiguous()
        self.module.calls.append("combine with weights" if weights is not None else "combine")
        event = FakeEvent(self.module, (x, weights), asynchronous=given["async_finish"])
        entries = [
            (source, token, x[place], None if weights is None else weights[place])
            for place, (source, token) in enumerate(handle.came)
        ]
        y, y_weights = add_partial_sums(gather(self.group, entries), self.rank, handle.ids, x)
        return event.output(y), event.output(y_weights if weights is not None else None), event
