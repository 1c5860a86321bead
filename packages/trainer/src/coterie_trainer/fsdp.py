"""The same model under PyTorch's FSDP2, for comparison: every layer is gathered, experts included, and freed again.

Parameters, gradients and optimizer state are cut along the first dimension over the data axis. Gradients are summed,
not averaged, in fp32, and each micro-batch reduces its own.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from coterie_parallel import AdamWConfig, Axis, Chunk, Mesh, clip_gradients_, global_gradient_norm
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from coterie_trainer.model import Decoder

__all__ = ["FsdpOptimizer", "shard_model", "sharded_tensors"]


def shard_model(model: Decoder, mesh: Mesh, *, dtype: torch.dtype = torch.float32) -> None:
    """Cut every parameter over the data axis; from then on a forward gathers the layer that it is in.

    Args:
        model: fp32 and initialised, the same on all ranks, which hold all experts.
        mesh: its data axis must have more than one rank.
        dtype: that weights are gathered in and computed with; they stay fp32 where they are kept.
    """
    axis = mesh.axis("data")
    assert axis.group is not None, "the config refuses one rank"
    data = DeviceMesh.from_group(axis.group, mesh.device.type, mesh_dim_names=("data",))
    policy = MixedPrecisionPolicy(
        param_dtype=None if dtype == torch.float32 else dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    # The last norm, the embedding and the head are gathered once: the head is used after the forward of the model.
    for module, is_root in [*((layer, False) for layer in model.layers), (model, True)]:
        fully_shard(module, mesh=data, mp_policy=policy, reshard_after_forward=not is_root)
        assert isinstance(module, FSDPModule)
        # Together these are a plain sum with every back-end; a factor alone would ask gloo for NCCL's scaled sum.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)


def sharded_tensors(model: Decoder, mesh: Mesh, dtype: torch.dtype = torch.float32) -> dict[str, Tensor | Chunk]:
    """Return the state of the model by name, each parameter as a chunk: live if ``dtype`` is fp32, else rounded."""
    axis = mesh.axis("data")
    return {
        name: _chunk(tensor, tensor.to_local().to(dtype), axis) if isinstance(tensor, DTensor) else tensor
        for name, tensor in model.state_dict().items()
    }


def _chunk(parameter: DTensor, shard: Tensor, axis: Axis) -> Chunk:
    rows_of_rank = math.ceil(parameter.shape[0] / axis.size)
    first = min(axis.index * rows_of_rank, parameter.shape[0])
    return Chunk(tensor=shard, offsets=(first, *[0] * (parameter.ndim - 1)), global_shape=tuple(parameter.shape))


class FsdpOptimizer:
    """AdamW over the shards of `shard_model`, by the same rules as `coterie_parallel.Optimizer`.

    Clips by the norm of the whole gradient, decays and scales by name, and skips a step whose norm is not finite, all
    without a host read of device values.

    Args:
        model: after `shard_model`.
        mesh: the one of `shard_model`.
        config: settings; of those that a `Config` refuses with FSDP2 none is looked at.
        dtype: that weights are computed with; a checkpoint holds fp32 main weights besides, if it is another.
        reduce_each: sum gradients over ranks after each micro-batch, as FSDP2 does by itself. Else only once a step,
            and every rank keeps the whole gradient until then.

    Attributes:
        num_skipped: int64 scalar on the device, the steps that were skipped.
    """

    def __init__(
        self,
        model: Decoder,
        mesh: Mesh,
        config: AdamWConfig,
        *,
        dtype: torch.dtype = torch.float32,
        reduce_each: bool = True,
    ) -> None:
        self.config, self.reduce_each = config, reduce_each
        self._model, self._mesh, self._dtype = model, mesh, dtype
        self._parameters: list[tuple[DTensor, Tensor]] = []
        self._names: list[str] = []
        self._step = torch.zeros((), dtype=torch.int64, device=mesh.device)
        self.num_skipped = torch.zeros((), dtype=torch.int64, device=mesh.device)
        groups: dict[tuple[float, float], list[Tensor]] = {}
        for name, parameter in model.named_parameters():
            assert isinstance(parameter, DTensor), name
            shard = parameter.to_local().detach()
            self._parameters.append((parameter, shard))
            self._names.append(name)
            if shard.numel():
                setting = config.factor_of(name, parameter.ndim), config.decay_of(name, parameter.ndim)
                groups.setdefault(setting, []).append(shard)
        self._factors = [factor for factor, _ in groups]
        self._adamw = torch.optim.AdamW(
            [{"params": shards, "weight_decay": decay} for (_, decay), shards in groups.items()],
            betas=config.betas,
            eps=config.eps,
            fused=True,
        )
        for _, shard in self._parameters:
            self._adamw.state[shard] = {
                "step": torch.zeros((), dtype=torch.float32, device=mesh.device),
                "exp_avg": torch.zeros_like(shard),
                "exp_avg_sq": torch.zeros_like(shard),
            }

    @contextmanager
    def micro_batch(self, *, is_last: bool) -> Iterator[None]:
        """Say which micro-batch the one backward inside belongs to."""
        assert isinstance(self._model, FSDPModule)
        self._model.set_requires_gradient_sync(self.reduce_each or is_last)
        yield

    def zero_grad(self) -> None:
        """Forget the gradients of all parameters."""
        for parameter, shard in self._parameters:
            parameter.grad = shard.grad = None

    @torch.no_grad()
    def step(self, learning_rate: float | None = None, *, loss: Tensor | None = None) -> Tensor:
        """Update every parameter and return the global gradient norm before clipping, an fp64 scalar."""
        rate = self.config.learning_rate if learning_rate is None else learning_rate
        gradients = []
        for parameter, shard in self._parameters:
            summed = parameter.grad
            shard.grad = summed.to_local() if isinstance(summed, DTensor) else torch.zeros_like(shard)
            if shard.numel():
                gradients.append(shard.grad)
        norm = global_gradient_norm(gradients, self._mesh)
        is_skipped = ~norm.isfinite()
        self._step += ~is_skipped
        self.num_skipped += is_skipped
        if self.config.gradient_clip is not None:
            clip_gradients_(gradients, norm, self.config.gradient_clip)
        for group, factor in zip(self._adamw.param_groups, self._factors, strict=True):
            group["lr"] = rate * factor
        self._adamw.found_inf = is_skipped.float()  # type: ignore[attr-defined]
        self._adamw.step()
        return norm

    def wait_for_weights(self) -> None:
        """Do nothing: each forward gathers the weights that it needs."""

    def state_dict(self) -> dict[str, Tensor]:
        """Return what is the same on all ranks, live; the rest of `global_state` is live in the shards."""
        return {"step": self._step, "num_skipped": self.num_skipped}

    def global_state(self) -> dict[str, Tensor | Chunk]:
        """Return the state under the names of `coterie_parallel.Optimizer.global_state`, for any layout to read."""
        found: dict[str, Tensor | Chunk] = dict(self.state_dict())
        for name, (parameter, shard) in zip(self._names, self._parameters, strict=True):
            state = self._adamw.state[shard]
            kinds = {"exp_avg": state["exp_avg"], "exp_avg_sq": state["exp_avg_sq"]}
            if self._dtype != torch.float32:
                kinds["main"] = shard
            start = _chunk(parameter, shard, self._mesh.axis("data")).offsets[0] * math.prod(parameter.shape[1:])
            for kind, tensor in kinds.items():
                found[f"{kind}/{name}"] = Chunk(
                    tensor=tensor.view(-1), offsets=(start,), global_shape=(parameter.numel(),)
                )
        return found

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Copy what `state_dict` returned; the tensors of `global_state` are filled before."""
        self._step.copy_(state["step"])
        self.num_skipped.copy_(state["num_skipped"])
        for _, shard in self._parameters:
            self._adamw.state[shard]["step"].copy_(self._step)
