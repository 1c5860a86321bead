"""A stand-in for the module deep_ep on the CPU: the recorded signatures, the host assertions, and none of the favours.

Rows inside an expert come in another order every time, padding and unused rows hold NaN, and so does every output until
its event was waited for. Calls and reads of the host are counted.
"""

import ast
import inspect
import json
import random
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch import Tensor

from parallel.fake_deep_ep_syncs import unwatched

SNAPSHOT = Path(__file__).with_name("deep_ep_signatures.json")
GARBAGE = -1_000_003
NUM_SMS = 24
SURFACES = ("Buffer", "ElasticBuffer", "EPBuffer")


class FakeDeepEP(ModuleType):
    """The module of one version, with what happened to it; ``asked`` holds the settings of the last buffer."""

    def __init__(self, version: str) -> None:
        super().__init__("deep_ep")
        self.__version__ = version
        self.calls: list[str] = []
        self.asked: dict[str, Any] = {}
        self.host_reads = 0
        self.events_started = 0
        self.events_waited = 0
        self.random = random.Random(0)
        if version != "1.2.1":
            self.topk_idx_t = torch.int64


def make_fake(version: str) -> FakeDeepEP:
    """Return the module of ``version``, with the classes and signatures that the snapshot has for it."""
    # Imported here, because these files need the tools below.
    from parallel.fake_deep_ep_elastic import FakeElastic
    from parallel.fake_deep_ep_legacy import FakeLegacy

    module = FakeDeepEP(version)
    for name, methods in signatures(version).items():
        if name in SURFACES:
            base = FakeLegacy if name == "Buffer" else FakeElastic
            made = {method: _enforced(getattr(base, method), signature) for method, signature in methods.items()}
            for method in ("get_dispatch_config", "get_combine_config"):
                if method in made:
                    made[method] = staticmethod(made[method])
            setattr(module, name, type(name, (base,), {"module": module, "version": version, **made}))
    return module


def signatures(version: str) -> dict[str, dict[str, inspect.Signature]]:
    """Return the recorded signature of each method of each class."""
    recorded = json.loads(SNAPSHOT.read_text(encoding="utf-8"))[version]
    return {
        name: {method: _signature(parameters) for method, parameters in methods.items()}
        for name, methods in recorded.items()
        if name != "source"
    }


def _signature(parameters: list[str]) -> inspect.Signature:
    made = []
    for text in parameters:
        name, equals, default = text.partition("=")
        value = ast.literal_eval(default) if equals else inspect.Parameter.empty
        made.append(inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=value))
    return inspect.Signature(made)


def _enforced(function: Callable[..., Any], signature: inspect.Signature) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given = dict(bound.arguments)
        instance = [given.pop("self")] if "self" in given else []
        with unwatched():
            return function(*instance, **given)

    call.__signature__ = signature  # type: ignore[attr-defined]
    return call


class FakeEvent:
    """Writes the outputs of a call when the current stream waits for it."""

    def __init__(self, module: FakeDeepEP, inputs: tuple[Any, ...], *, asynchronous: bool) -> None:
        self._module = module
        self._asynchronous = asynchronous
        self._outputs: list[tuple[Tensor, Tensor]] = []
        self._inputs = [(tensor, tensor._version) for tensor in inputs if isinstance(tensor, Tensor)]
        module.events_started += asynchronous

    def output(self, value: Tensor | None) -> Tensor | None:
        """Return a tensor that will hold ``value``; until the event has been waited for it holds garbage."""
        if value is None or not self._asynchronous:
            return value
        garbage = torch.full_like(value, torch.nan if value.is_floating_point() else GARBAGE)
        self._outputs.append((garbage, value))
        return garbage

    def current_stream_wait(self) -> None:
        assert self._asynchronous, "this event has nothing to wait for"
        for tensor, version in self._inputs:
            assert tensor._version == version, "an input was changed while it was sent"
        with unwatched():
            self._module.events_waited += bool(self._outputs)
            for garbage, value in self._outputs:
                garbage.copy_(value)
        self._outputs = []


def gather(group: Any, value: Any) -> list[Any]:
    """Return the values of all ranks."""
    values: list[Any] = [None] * group.size()
    dist.all_gather_object(values, _packed(value), group=group)
    return [_unpacked(value) for value in values]


def _packed(value: Any) -> Any:
    # As arrays tensors are pickled several times faster; there is none of bf16.
    if isinstance(value, Tensor):
        return (value.float() if value.dtype == torch.bfloat16 else value).numpy()
    return type(value)(map(_packed, value)) if isinstance(value, (tuple, list)) else value


def _unpacked(value: Any) -> Any:
    if isinstance(value, numpy.ndarray):
        return torch.from_numpy(value)
    return type(value)(map(_unpacked, value)) if isinstance(value, (tuple, list)) else value


def check_tokens(x: Tensor, scales: Tensor | None, width: int) -> None:
    """Hold tokens to the host assertions: shape, dtype, width, scales."""
    assert x.ndim == 2
    assert x.is_contiguous()
    assert not x.requires_grad or not torch.is_grad_enabled(), "the package has no backward"
    assert x.shape[1] == width
    assert x.shape[1] % 256 == 0
    if scales is None:
        assert x.dtype == torch.bfloat16
    else:
        assert x.dtype == torch.float8_e4m3fn
        assert scales.dtype == torch.float32
        assert scales.shape == (x.shape[0], x.shape[1] // 128)


def check_choices(ids: Tensor, weights: Tensor | None, num_tokens: int, num_experts: int) -> None:
    """Hold ids and weights to the assertions of host and device."""
    assert ids.dtype == torch.int64
    assert ids.is_contiguous()
    assert ids.ndim == 2
    assert ids.shape[0] == num_tokens
    assert ids.shape[1] <= 32
    for row in ids.tolist():
        chosen = [expert for expert in row if expert != -1]
        assert all(0 <= expert < num_experts for expert in chosen)
        assert len(set(chosen)) == len(chosen), "a token names an expert twice"
    if weights is not None:
        assert weights.dtype == torch.float32
        assert weights.is_contiguous()
        assert weights.shape == ids.shape


def local_ids(ids: Tensor, num_experts: int, rank: int, num_ranks: int) -> Tensor:
    """Return ids counted from this rank's first expert, -1 for other ranks' experts."""
    num_local = num_experts // num_ranks
    local = ids - rank * num_local
    return torch.where((ids >= 0) & (local >= 0) & (local < num_local), local, -1)


def add_partial_sums(
    partials: list[list[tuple[int, int, Tensor, Tensor | None]]], rank: int, ids: Tensor, x: Tensor
) -> Any:
    """Return the tokens and weights that come home to ``rank``: each (source, token, sum, weights) of every rank.

    Sums are added in fp32 and rounded once; weights of pairs that are not routed are zero.
    """
    sums = torch.zeros(ids.shape[0], x.shape[1])
    weights = torch.zeros(ids.shape, dtype=torch.float32)
    for entries in partials:
        for source, token, part, part_weights in entries:
            if source == rank:
                sums[token] += part.float()
                if part_weights is not None:
                    weights[token] += part_weights
    return sums.to(x.dtype), weights
