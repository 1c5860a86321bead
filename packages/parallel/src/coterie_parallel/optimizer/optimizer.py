"""The optimizer: reduce, judge, clip, update the shards, and bring the new weights to all ranks."""

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from coterie_parallel.background import Background, Ticket
from coterie_parallel.gradients import GradientReducer, clip_gradients_, global_gradient_norm, global_sums
from coterie_parallel.gradients.agreement import check_same_settings
from coterie_parallel.mesh import Mesh
from coterie_parallel.optimizer.adamw import MOMENTS as ADAMW_MOMENTS
from coterie_parallel.optimizer.adamw import AdamWStep
from coterie_parallel.optimizer.agreement import refuse_unequal_replicas, refuse_unused_patterns
from coterie_parallel.optimizer.config import AdamWConfig
from coterie_parallel.optimizer.muon import MatrixExchange
from coterie_parallel.optimizer.outliers import OutlierGuard
from coterie_parallel.optimizer.state import ShardState
from coterie_parallel.placement import Chunk, Placement

__all__ = ["Optimizer"]

MOMENTS = {"adamw": ADAMW_MOMENTS, "muon": ("momentum",)}


class Optimizer:
    """Sums gradients over ranks, clips them by the global norm, and updates the parameters with AdamW and Muon.

    State is sharded over the axis that replicates a parameter. A parameter that is not fp32 has an fp32 main weight,
    which is updated and then rounded to it; the main weight of an fp32 parameter is the parameter. Its gradients
    are added up over micro-batches in an fp32 ``main_grad``, unless they are sharded, when each is summed by itself.

    Args:
        named_parameters: local parameters by global name, in the order of the forward; those that need no gradient are
            left alone.
        placements: a placement for every name.
        mesh: all its ranks must construct and step together.
        config: settings, the same on all ranks.
        check_replicas: read the weights once and refuse replicas that do not start alike, by the sums of their bits.

    Attributes:
        reducer: holds the gradients.
        num_skipped: int64 scalar on the device, the steps that were skipped.

    Raises:
        ValueError: for settings with problems or that differ between ranks, for a pattern that matches no parameter of
            any rank, for replicas of different weights, and for what `GradientReducer` refuses.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, Tensor]],
        placements: Mapping[str, Placement],
        mesh: Mesh,
        config: AdamWConfig,
        *,
        check_replicas: bool = True,
    ) -> None:
        check_same_settings(config, mesh)
        if config.problems():
            raise ValueError("\n".join(config.problems()))
        self.config = config
        self._mesh = mesh
        self._placements = dict(placements)
        named = list(named_parameters)
        refuse_unused_patterns(config, [name for name, _ in named], mesh)
        shapes = {name: tuple(parameter.shape) for name, parameter in named}
        kinds = {name: config.kind_of(name, len(shape)) for name, shape in shapes.items()}
        self._factors = {name: config.factor_of(name, len(shape)) for name, shape in shapes.items()}
        self._decays = {name: config.decay_of(name, len(shape)) for name, shape in shapes.items()}
        self._scales = {
            name: config.muon.scale_of(*shape[-2:])
            for name, shape in shapes.items()
            if config.muon is not None and kinds[name] == "muon"
        }
        self.reducer = GradientReducer(named, placements, mesh, config.reduction, kinds)
        if check_replicas:
            refuse_unequal_replicas(self.reducer.parameters, placements, mesh)
        moments_dtype = getattr(torch, config.moments_dtype)
        self._states = [
            ShardState(bucket, MOMENTS[str(bucket.layout.kind)], moments_dtype) for bucket in self.reducer.buckets
        ]
        self._muon: list[tuple[MatrixExchange, list[ShardState]]] = []
        together: dict[tuple[str | None, torch.dtype], list[ShardState]] = {}
        for state in self._states:
            layout = state.bucket.layout
            if config.muon is not None and layout.kind == "muon":
                together.setdefault((layout.axis, config.muon.iteration_dtype(layout.dtype)), []).append(state)
        for states in together.values():
            layouts = [state.bucket.layout for state in states]
            self._muon.append((MatrixExchange(layouts, shapes, states[0].bucket.axis), states))
        self._step = torch.zeros((), dtype=torch.int64, device=mesh.device)
        self.num_skipped = torch.zeros((), dtype=torch.int64, device=mesh.device)
        self._guard = None if config.outliers is None else OutlierGuard(config.outliers, mesh.device)
        self._background = Background(mesh.device)
        self._arriving: dict[int, Ticket] = {}
        self._deferred: set[int] = set()

    def micro_batch(self, *, is_last: bool) -> AbstractContextManager[None]:
        """Say which micro-batch the one backward inside belongs to, see `GradientReducer.micro_batch`."""
        return self.reducer.micro_batch(is_last=is_last)

    @torch.no_grad()
    def step(self, learning_rate: float | None = None, *, loss: Tensor | None = None) -> Tensor:
        """Update every parameter and return the global gradient norm before clipping, an fp64 scalar.

        Bitwise repeatable, and without a host read of device values. A step whose norm is not finite, or that is an
        outlier, changes no weight and no moment, and is counted in ``num_skipped``. All ranks must call together.
        The gradients are used up (those of fp32 parameters of one rank alone may be clipped in ``grad``): `zero_grad`
        comes before the next ones.

        Args:
            learning_rate: of this step; None takes the one of the config.
            loss: this rank's share of the loss of the step, a scalar; the shares of all ranks add up to the loss.
                Needed with ``outliers``.
        """
        if self._guard is not None and loss is None:
            raise ValueError("a step that may be skipped as an outlier needs its loss; pass loss=")
        rate = self.config.learning_rate if learning_rate is None else learning_rate
        self.wait_for_weights()
        self.reducer.reduce()
        norm = global_gradient_norm([part for state in self._states for part in state.bucket.parts()], self._mesh)
        is_skipped = ~norm.isfinite()
        if self._guard is not None and loss is not None:
            is_skipped = is_skipped | self._guard.judge(global_sums([loss.detach().double()], self._mesh)[0], norm)
        self._step += ~is_skipped
        self.num_skipped += is_skipped
        if self._muon and self.config.gradient_clip is not None:
            # Padding is not clipped, as a norm of NaN would leave NaN there.
            pieces = [piece for _, states in self._muon for state in states for piece in state.bucket.pieces.values()]
            clip_gradients_([piece for piece in pieces if piece.numel()], norm, self.config.gradient_clip)
        for exchange, states in self._muon:
            self._update_muon(exchange, states, rate, is_skipped)
        adamw = AdamWStep(self.config, step=self._step, rate=rate, norm=norm, is_skipped=is_skipped)
        # The first layers last in the order of the gradients are the first ones that the next forward needs.
        for index in reversed(range(len(self._states))):
            is_rounded = False
            if self._states[index].bucket.layout.kind == "adamw":
                is_rounded = adamw.update_(self._states[index], self._factors, self._decays)
            self._publish(index, is_rounded=is_rounded)
        _wait(self._arriving, self._arriving.keys() - self._deferred)
        return norm

    def zero_grad(self) -> None:
        """Forget the gradients of all parameters; between any two steps, as a step refuses used ones."""
        self.reducer.zero()

    def overlap_with_forward(self, modules: Iterable[nn.Module]) -> None:
        """Let `step` return while new weights still arrive; the forward of each module waits for its own.

        A bucket is waited for in `step`, as without this, unless all its parameters belong to these modules. Whoever
        reads parameters outside of a forward calls `wait_for_weights` first. Call it once.
        """
        bucket_of = {
            id(parameter): index
            for index, state in enumerate(self._states)
            for parameter in state.bucket.parameters.values()
        }
        covered: set[int] = set()
        for module in modules:
            mine = [id(parameter) for parameter in module.parameters() if id(parameter) in bucket_of]
            covered.update(mine)
            indices = {bucket_of[one] for one in mine}
            # What is under way, and not the optimizer: weights still arrive when nobody else holds it, and it can end.
            module.register_forward_pre_hook(
                lambda module, args, arriving=self._arriving, indices=indices: _wait(arriving, indices)
            )
        self._deferred = {
            index
            for index, state in enumerate(self._states)
            if all(id(parameter) in covered for parameter in state.bucket.parameters.values())
        }

    def wait_for_weights(self) -> None:
        """Wait until the parameters hold the weights of the last step; the host does not wait for a GPU."""
        _wait(self._arriving, set(self._arriving))
        self._background.finish()

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state of this rank, live and not copied.

        Equal on all ranks: ``step``, ``num_skipped`` and, with outliers, ``outliers/values`` and ``outliers/num_seen``.
        This rank's pieces, 1-D and often empty: ``exp_avg/<name>`` and ``exp_avg_sq/<name>``, or ``momentum/<name>``
        with Muon, and ``main/<name>`` where the parameter is not fp32.
        """
        state = {"step": self._step, "num_skipped": self.num_skipped}
        if self._guard is not None:
            state["outliers/values"] = self._guard.values_2W
            state["outliers/num_seen"] = self._guard.num_seen
        for shard in self._states:
            state.update({f"{kind}/{name}": piece for kind, name, piece in shard.tensors()})
        return state

    def global_state(self) -> dict[str, Tensor | Chunk]:
        """Return `state_dict` with every piece as an interval of the flattened tensor of the whole model.

        These do not depend on the layout: a checkpoint of them can be read in any other.
        """
        state: dict[str, Tensor | Chunk] = dict(self.state_dict())
        for shard in self._states:
            for kind, name, piece in shard.tensors():
                state[f"{kind}/{name}"] = shard.chunk(name, piece, self._placements[name], self._mesh)
        return state

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Copy a state of the same layout; main weights are also written to their parameters; all ranks must call.

        The parameters that are fp32 are their own main weights and not part of it: load them before or after.

        Raises:
            ValueError: naming the keys that are missing, not known, or of another shape; nothing is changed then.
        """
        own = self.state_dict()
        problems = [f"{key} is missing" for key in sorted(own.keys() - state.keys())]
        problems += [f"{key} is not known" for key in sorted(state.keys() - own.keys())]
        problems += [
            f"{key} has shape {tuple(state[key].shape)}, expected {tuple(own[key].shape)}"
            for key in sorted(own.keys() & state.keys())
            if own[key].shape != state[key].shape
        ]
        if problems:
            raise ValueError("the optimizer state does not fit: " + "; ".join(problems))
        self.wait_for_weights()
        for key, tensor in own.items():
            tensor.copy_(state[key])
        for index, shard in enumerate(self._states):
            if not shard.is_fp32:
                self._publish(index)
        self.wait_for_weights()

    def _publish(self, index: int, *, is_rounded: bool = False) -> None:
        job = self._states[index].publish(is_rounded=is_rounded)
        if job is not None:
            self._arriving[index] = self._background.start(job)

    def _update_muon(self, exchange: MatrixExchange, states: list[ShardState], rate: float, is_skipped: Tensor) -> None:
        config = self.config.muon
        assert config is not None
        updates = []
        for state in states:
            kept, gradient = state.flat_moments["momentum"], state.bucket.joined()
            momentum = torch.lerp(kept.float(), gradient, 1 - config.momentum)
            update = torch.lerp(gradient, momentum, config.momentum) if config.nesterov else momentum
            updates.append(update.to(config.iteration_dtype(state.bucket.layout.dtype)))
            kept.copy_(torch.where(is_skipped, kept, momentum))
        result = exchange.orthogonalized(torch.cat(updates), num_iterations=config.num_iterations)
        lengths = [state.bucket.layout.shard_numel for state in states]
        for state, directions in zip(states, torch.split(result, lengths), strict=True):
            for name, direction in state.bucket.cut(directions).items():
                main, own_rate = state.main[name], rate * self._factors[name]
                moved = main * (1 - own_rate * self._decays[name])
                moved.add_(direction, alpha=-own_rate * self._scales[name])
                main.copy_(torch.where(is_skipped, main, moved))


def _wait(arriving: dict[int, Ticket], indices: Iterable[int]) -> None:
    for index in list(indices):
        ticket = arriving.pop(index, None)
        if ticket is not None:
            ticket.wait()
