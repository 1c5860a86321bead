"""A feed-forward that every token visits, on the kernels of the experts."""

import torch
from torch import Tensor, nn

from coterie_experts.activation import ActivationName
from coterie_experts.config import Backend, ExpertsConfig
from coterie_experts.deferred import Defer
from coterie_experts.grouped_swiglu import choose_backend, grouped_experts
from coterie_experts.initialisation import init_shared_expert
from coterie_experts.tables import load_table

__all__ = ["SharedExpert"]


class SharedExpert(nn.Module):
    """Hold one dense expert that takes every token, whatever the router says.

    Several shared experts of width H are one of width n * H: their outputs are added without weights. The parameters
    are those of one expert: ``gate_up`` (2H, D), gate rows first, or ``up`` (H, D) where the activation has no gate,
    and ``down`` (D, H); with biases also ``gate_up_bias`` (2H) or ``up_bias`` (H), and ``down_bias`` (D). Gradients go
    to ``main_grad`` where it exists. Start values are as in ``GroupedExperts``; ``init_shared_expert`` replaces them.

    Args:
        d_model: width D of a token.
        d_hidden: hidden width H.
        activation: see ``Activation``; so are alpha and limit.
        swiglu_alpha: of ``swiglu_clamped``.
        swiglu_limit: of ``swiglu_clamped``.
        bias: with biases in both projections.
        backend: as in ``ExpertsConfig``; so is tiles.
        tiles: a file of tiles.
        device: ``meta`` builds without memory.
        dtype: of the parameters and of the tokens.

    Attributes:
        defer_weight_gradients: as in ``GroupedExperts``, for parameters that have a ``main_grad``.

    Raises:
        ValueError: sizes or names are wrong, the file of tiles is not one, or the named back-end cannot run.
    """

    gate_up: nn.Parameter
    up: nn.Parameter
    down: nn.Parameter
    gate_up_bias: nn.Parameter
    up_bias: nn.Parameter
    down_bias: nn.Parameter

    def __init__(
        self,
        *,
        d_model: int,
        d_hidden: int,
        activation: ActivationName = "swiglu",
        swiglu_alpha: float = 1.702,
        swiglu_limit: float = 7.0,
        bias: bool = False,
        backend: Backend = "auto",
        tiles: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.config = ExpertsConfig(
            d_model=d_model,
            d_hidden=d_hidden,
            num_experts=1,
            backend=backend,
            activation=activation,
            swiglu_alpha=swiglu_alpha,
            swiglu_limit=swiglu_limit,
            bias=bias,
            tiles=tiles,
        )
        problems = self.config.problems()
        if problems:
            raise ValueError("\n".join(problems))
        self._table = None if tiles is None else load_table(tiles)
        self.defer_weight_gradients: Defer | None = None
        is_gated = self.config.activation_function.is_gated
        self._up_name, d_pre = ("gate_up", 2 * d_hidden) if is_gated else ("up", d_hidden)

        def add(name: str, *shape: int) -> None:
            self.register_parameter(name, nn.Parameter(torch.empty(shape, device=device, dtype=dtype)))

        add(self._up_name, d_pre, d_model)
        add("down", d_model, d_hidden)
        if bias:
            add(f"{self._up_name}_bias", d_pre)
            add("down_bias", d_model)
        choose_backend(
            backend,
            d_model=d_model,
            d_hidden=d_hidden,
            dtype=self.down.dtype,
            device=self.down.device,
            activation=activation,
            bias=bias,
            table=self._table,
        )
        if not self.down.is_meta:
            init_shared_expert(self, seed=0, name="shared", std=d_model**-0.5, down_std=d_hidden**-0.5)

    def forward(self, x_TD: Tensor) -> Tensor:
        """Return down(act(up(x))) of every token, (..., D) in and out.

        Raises:
            ValueError: the last size is not D, the dtype or the device is not that of the parameters, or a gradient
                is to be deferred that has no ``main_grad``.
        """
        if x_TD.dim() < 1 or x_TD.shape[-1] != self.config.d_model:
            raise ValueError(f"x must have shape (..., {self.config.d_model}), but has {tuple(x_TD.shape)}")
        if self.defer_weight_gradients is not None and torch.is_grad_enabled():
            without = [
                name
                for name, one in self.named_parameters()
                if one.requires_grad and getattr(one, "main_grad", None) is None
            ]
            if without:
                raise ValueError(
                    f"to defer its weight gradients a shared expert needs a main_grad of {', '.join(without)}"
                )
        rows_RD = x_TD.reshape(-1, self.config.d_model)
        weight_dtype = torch.float64 if rows_RD.dtype == torch.float64 else torch.float32
        y_RD = grouped_experts(
            rows_RD,
            torch.ones(rows_RD.shape[0], dtype=weight_dtype, device=rows_RD.device),
            torch.full((1,), rows_RD.shape[0], dtype=torch.int32, device=rows_RD.device),
            self._as_layer_of_one(self._up_name),
            self._as_layer_of_one("down"),
            activation=self.config.activation_function,
            up_bias=self._as_layer_of_one(f"{self._up_name}_bias") if self.config.bias else None,
            down_bias=self._as_layer_of_one("down_bias") if self.config.bias else None,
            backend=self.config.backend,
            table=self._table,
            defer_weight_gradients=self.defer_weight_gradients,
        )
        return y_RD.view(x_TD.shape)

    def extra_repr(self) -> str:
        """Return the sizes for ``print(module)``."""
        config = self.config
        sizes = f"d_model={config.d_model}, d_hidden={config.d_hidden}"
        return f"{sizes}, activation={config.activation}, bias={config.bias}"

    def _as_layer_of_one(self, name: str) -> Tensor:
        parameter = self.get_parameter(name)
        view = parameter[None]
        # A view forgets the attribute of its parameter.
        main_grad: Tensor | None = getattr(parameter, "main_grad", None)
        if main_grad is not None:
            view.main_grad = main_grad[None]  # type: ignore[attr-defined]
        return view
