"""ElasticBuffer of V2.0 and V2.1 and EPBuffer of V2.5, for the stand-in of deep_ep."""

from typing import Any

import torch
from torch import Tensor

from parallel.fake_deep_ep import NUM_SMS, FakeDeepEP, FakeEvent, add_partial_sums, check_choices, check_tokens, gather
from parallel.fake_deep_ep import local_ids as to_local


class FakeHandle:
    """What a dispatch hands to combine and to a cached dispatch; public names as documented."""

    def __init__(self, version: str, ids: Tensor, **values: Any) -> None:
        self._version_of_ids = ids._version if version == "2.5.0" else None
        self._ids = ids if version == "2.5.0" else ids.clone()
        self.__dict__.update(values)

    @property
    def topk_idx(self) -> Tensor:
        assert self._version_of_ids in (None, self._ids._version), "topk_idx changed while the handle was in use"
        return self._ids


class FakeElastic:
    module: FakeDeepEP
    version: str

    def __init__(self, group: Any, num_max_tokens_per_rank: int, hidden: int, num_topk: int, **settings: Any) -> None:
        assert group is not None
        assert num_max_tokens_per_rank > 0
        assert hidden > 0
        assert settings["num_bytes"] is None
        assert not settings["use_fp8_dispatch"]
        assert settings["num_cpu_timeout_secs"] > 0
        assert settings["num_gpu_timeout_secs"] > 0
        self.group, self.rank, self.num_ranks = group, group.rank(), group.size()
        self.sizes = (num_max_tokens_per_rank, hidden, num_topk)
        self.settings = settings
        self.alive = True
        assert len(set(gather(group, self.sizes))) == 1, "all ranks must size their buffers alike"
        self.module.calls.append("make")
        self.module.asked = dict(max_tokens=num_max_tokens_per_rank, hidden=hidden, num_topk=num_topk, **settings)

    def destroy(self) -> None:
        assert self.settings["explicitly_destroy"]
        assert self.alive
        self.alive = False
        self.module.calls.append("destroy")

    def dispatch(self, x: Any, **given: Any) -> Any:
        assert self.alive
        handle = given["handle"]
        if handle is None:
            return self._first_dispatch(x, **given)
        assert given["topk_idx"] is None
        assert not given["do_cpu_sync"]
        assert given["topk_weights"] is None or self.version != "2.0.0"
        assert given["num_sms"] > 0, "a cached dispatch can not work out num_sms without num_experts"
        assert given["num_experts"] in (None, handle.num_experts)
        assert given["expert_alignment"] in (None, handle.expert_alignment)
        assert given["do_expand"] == handle.do_expand
        assert not (given["do_expand"] and self.version == "2.0.0")
        self.module.calls.append("cached dispatch")
        x, scales = x if isinstance(x, tuple) else (x, None)
        assert scales is None
        assert x.shape[0] == handle.topk_idx.shape[0]
        weights = given["topk_weights"]
        event = FakeEvent(self.module, (x, weights), asynchronous=given["async_with_compute_stream"])
        rows, _, row_weights = self._deliver(x, None, weights, handle, given)
        return event.output(rows), None, event.output(row_weights), handle, event

    def _first_dispatch(self, x: Any, **given: Any) -> Any:
        x, scales = x if isinstance(x, tuple) else (x, None)
        ids, weights, num_experts = given["topk_idx"], given["topk_weights"], given["num_experts"]
        most, alignment = given["num_max_tokens_per_rank"], given["expert_alignment"] or 1
        reads = given["do_cpu_sync"] is None or given["do_cpu_sync"]
        expands, num_local = given["do_expand"], num_experts // self.num_ranks
        assert num_experts % self.num_ranks == 0
        assert x.shape[0] <= most == self.sizes[0]
        assert ids.shape[1] <= self.sizes[2]
        assert not given.get("do_zero_padding") or expands
        assert given["previous_event"] is None or given["allocate_on_comm_stream"]
        assert self.version != "2.5.0" or not given["do_handle_copy"]
        check_choices(ids, weights, x.shape[0], num_experts)
        self.module.calls.append("dispatch")
        self.module.asked |= dict(num_sms=given["num_sms"], payload=x.dtype, surface=type(self).__name__)
        self.module.host_reads += reads + self.settings["deterministic"]

        all_ids = gather(self.group, (ids, (most, num_experts, alignment, expands)))
        assert len({settings for _, settings in all_ids}) == 1, "all ranks must dispatch alike"
        local = [to_local(other, num_experts, self.rank, self.num_ranks) for other, _ in all_ids]
        came: list[tuple[int, int]] = []
        for source, ids_of_source in enumerate(local):
            tokens = [token for token, row in enumerate(ids_of_source.tolist()) if max(row) >= 0]
            if not self.settings["deterministic"]:
                self.module.random.shuffle(tokens)
            came += [(source, token) for token in tokens]
        rows_of: list[list[tuple[int, int]]] = [[] for _ in range(num_local)]
        for place, (source, token) in enumerate(came):
            for choice, expert in enumerate(local[source][token].tolist()):
                if expert >= 0:
                    rows_of[expert].append((place, choice))
        counts = [len(rows) for rows in rows_of]
        padded = [-(-count // alignment) * alignment for count in counts]
        starts = [sum(padded[:expert]) for expert in range(num_local)]
        slots = torch.full((len(came), ids.shape[1]), -1)
        for start, rows in zip(starts, rows_of, strict=True):
            if not self.settings["deterministic"]:
                self.module.random.shuffle(rows)
            for row, (place, choice) in enumerate(rows):
                slots[place, choice] = start + row
        if reads:
            num_tokens, num_rows = len(came), sum(padded)
        else:
            num_tokens = most * self.num_ranks
            num_rows = num_tokens * min(ids.shape[1], num_local) + (alignment - 1) * num_local
            num_rows = -(-num_rows // alignment) * alignment
        event = FakeEvent(self.module, (x, scales, ids, weights), asynchronous=given["async_with_compute_stream"])
        by_source = torch.tensor([sum(origin[0] == source for origin in came) for source in range(self.num_ranks)])
        ends = [start + count for start, count in zip(starts, counts, strict=True)]
        psum = torch.tensor(ends if expands else [start + size for start, size in zip(starts, padded, strict=True)])
        handle = FakeHandle(
            self.version,
            ids,
            do_expand=expands,
            num_experts=num_experts,
            expert_alignment=alignment,
            num_max_tokens_per_rank=most,
            num_sms=given["num_sms"] or NUM_SMS,
            num_recv_tokens=num_tokens,
            num_expanded_tokens=num_rows,
            psum_num_recv_tokens_per_scaleup_rank=event.output(by_source.cumsum(0).int()),
            psum_num_recv_tokens_per_expert=event.output(psum.int()),
            came=came,
            slots=slots,
            ends=list(zip(ends, [start + size for start, size in zip(starts, padded, strict=True)], strict=True)),
        )
        rows, row_scales, row_weights = self._deliver(x, scales, weights, handle, given)
        local_ids = None
        if not expands:
            local_ids = torch.full((num_tokens, ids.shape[1]), 10**6)
            for place, (source, token) in enumerate(came):
                local_ids[place] = local[source][token]
        arrived = event.output(rows)
        if scales is not None:
            arrived = (arrived, event.output(row_scales))
        return arrived, event.output(local_ids), event.output(row_weights), handle, event

    def _deliver(self, x: Tensor, scales: Tensor | None, weights: Tensor | None, handle: Any, given: Any) -> Any:
        check_tokens(x, scales, self.sizes[1])
        everyone = gather(self.group, (x.float(), scales, weights))
        num_rows = handle.num_expanded_tokens if handle.do_expand else handle.num_recv_tokens
        rows = torch.full((num_rows, x.shape[1]), torch.nan)
        row_scales = None if scales is None else torch.full((num_rows, scales.shape[1]), torch.nan)
        shape = (num_rows,) if handle.do_expand else (num_rows, handle.topk_idx.shape[1])
        row_weights = None if weights is None else torch.full(shape, torch.nan)
        for place, (source, token) in enumerate(handle.came):
            pairs = [(choice, slot) for choice, slot in enumerate(handle.slots[place].tolist()) if slot >= 0]
            for choice, slot in pairs if handle.do_expand else [(slice(None), place)]:
                rows[slot] = everyone[source][0][token]
                if row_scales is not None:
                    row_scales[slot] = everyone[source][1][token]
                if row_weights is not None:
                    row_weights[slot] = everyone[source][2][token][choice]
        if given.get("do_zero_padding"):
            for end, stop in handle.ends:
                for values in (rows, row_scales, row_weights):
                    if values is not None:
                        values[end:stop] = 0
        return rows.to(x.dtype), row_scales, row_weights

    def combine(self, x: Tensor, handle: Any, **given: Any) -> Any:
        assert self.alive
        weights, ids = given["topk_weights"], handle.topk_idx
        assert x.dtype == torch.bfloat16
        check_tokens(x, None, self.sizes[1])
        num_rows = handle.num_expanded_tokens if handle.do_expand else handle.num_recv_tokens
        assert x.shape[0] == num_rows
        assert given["previous_event"] is None or given["allocate_on_comm_stream"]
        if weights is not None:
            shape = (num_rows,) if handle.do_expand else (num_rows, ids.shape[1])
            assert weights.shape == shape
            assert weights.dtype == torch.float32
            assert weights.is_contiguous()
            assert self.settings["allow_multiple_reduction"], "no weights come back with a single reduction"
        self.module.calls.append("combine with weights" if weights is not None else "combine")
        event = FakeEvent(self.module, (x, weights), asynchronous=given["async_with_compute_stream"])
        entries = []
        for place, (source, token) in enumerate(handle.came):
            slots_K = handle.slots[place]
            part = x[slots_K[slots_K >= 0]].float().sum(0).to(torch.bfloat16) if handle.do_expand else x[place]
            part_weights = None
            if weights is not None:
                part_weights = torch.zeros(ids.shape[1])
                routed_K = slots_K >= 0
                part_weights[routed_K] = weights[slots_K[routed_K]] if handle.do_expand else weights[place][routed_K]
            entries.append((source, token, part, part_weights))
        y, y_weights = add_partial_sums(gather(self.group, entries), self.rank, ids, x)
        return event.output(y), event.output(y_weights if weights is not None else None), event
