"""The experts of one layer as a module."""

from collections.abc import Callable
from numbers import Integral
from typing import Any

import torch
from torch import Tensor, nn

from coterie_experts.config import ExpertsConfig
from coterie_experts.deferred import Defer
from coterie_experts.grouped_swiglu import (
    BackendChoice,
    choose_backend,
    experts_of_tokens,
    grouped_experts,
    misfits,
)
from coterie_experts.initialisation import init_experts
from coterie_experts.tables import load_table
from coterie_experts.token_rows import id_problems, order_by_expert, rows_from_tokens, sum_over_choices

__all__ = ["GroupedExperts"]


class GroupedExperts(nn.Module):
    """Hold the experts of one layer, or the part of them that lives on this rank.

    The parameters are ``gate_up`` (e, 2H, D), H gate rows and then H up rows for each expert, and ``down`` (e, D, H):
    the [out, in] layout of ``nn.Linear`` and of the fused experts of Hugging Face. An activation without a gate has
    ``up`` (e, H, D) in place of ``gate_up``. With biases there are ``gate_up_bias`` (e, 2H), or ``up_bias`` (e, H), and
    ``down_bias`` (e, D). Weights start with seeded normal numbers of standard deviation 1/sqrt(width in), biases with
    zeros; ``init_experts`` replaces them.

    Args:
        config: sizes of the whole layer and the back-end.
        first_expert: global id of the first expert held here.
        num_local_experts: how many are held here; all if not given.
        device: ``meta`` builds without memory.
        dtype: of the parameters and of the rows.

    Attributes:
        defer_weight_gradients: None, or a callable for schedules that compute weight gradients later. Each backward
            pass then gives it a function in place of them; that function computes the gradients of all parameters,
            the same bits, and adds them to ``main_grad`` where there is one, else to ``grad``, which is made if it is
            None. It is to be called once (again is a ``RuntimeError``), and lets go of what it kept. Until then rows,
            row weights and the gradient of the output must stay as they are. It is called by autograd's thread; where
            no parameter wants a gradient it is not called.

    Raises:
        ValueError: the config has problems, the share is not within the layer, the file of tiles is not one or not of
            this GPU, or the named back-end cannot run with these sizes, this dtype and this device.
    """

    # Which of these exist depends on the activation and the biases.
    gate_up: nn.Parameter
    up: nn.Parameter
    down: nn.Parameter
    gate_up_bias: nn.Parameter
    up_bias: nn.Parameter
    down_bias: nn.Parameter

    def __init__(
        self,
        config: ExpertsConfig,
        *,
        first_expert: int = 0,
        num_local_experts: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        num_local = config.num_experts if num_local_experts is None else num_local_experts
        problems = config.problems()
        share: dict[str, Any] = {"first_expert": first_expert, "num_local_experts": num_local}
        wrong = {name: value for name, value in share.items() if type(value) is bool or not isinstance(value, Integral)}
        problems += [f"{name} ({value!r}) must be a whole number" for name, value in wrong.items()]
        if not (problems or (first_expert >= 0 and num_local >= 1 and first_expert + num_local <= config.num_experts)):
            problems.append(
                f"first_expert ({first_expert}) and num_local_experts ({num_local}) must name at least one expert and "
                f"stay within num_experts ({config.num_experts})"
            )
        if problems:
            raise ValueError("\n".join(problems))
        self.config = config
        self._table = None if config.tiles is None else load_table(config.tiles)
        self.defer_weight_gradients: Defer | None = None
        self.first_expert = first_expert
        self.num_local_experts = num_local
        d_model, d_hidden = config.d_model, config.d_hidden
        is_gated = config.activation_function.is_gated
        up_name, d_pre = ("gate_up", 2 * d_hidden) if is_gated else ("up", d_hidden)

        def add(name: str, *shape: int) -> None:
            self.register_parameter(name, nn.Parameter(torch.empty(num_local, *shape, device=device, dtype=dtype)))

        add(up_name, d_pre, d_model)
        add("down", d_model, d_hidden)
        if config.bias:
            add(f"{up_name}_bias", d_pre)
            add("down_bias", d_model)
        self._choice()
        if not self.down.is_meta:
            init_experts(self, seed=0, name="experts", std=d_model**-0.5, down_std=d_hidden**-0.5)

    @property
    def up_projection(self) -> Tensor:
        """Return the parameter of the first projection, ``gate_up`` or ``up``."""
        return self.gate_up if self.config.activation_function.is_gated else self.up

    @property
    def up_projection_bias(self) -> Tensor | None:
        """Return its bias, if the experts have biases."""
        if not self.config.bias:
            return None
        return self.gate_up_bias if self.config.activation_function.is_gated else self.up_bias

    @property
    def backend(self) -> str:
        """Name the back-end that runs, with ``auto`` resolved for the present device and dtype."""
        return self._choice().name

    @property
    def backend_reason(self) -> str:
        """Say in one sentence why that back-end runs."""
        return self._choice().reason

    def forward(
        self,
        rows_RD: Tensor,
        row_weights_R: Tensor,
        offsets_e: Tensor,
        *,
        ask_out: Callable[[], Tensor | None] | None = None,
        ask_grad_rows: Callable[[], Tensor | None] | None = None,
    ) -> Tensor:
        """Send rows that lie in expert order through their experts.

        Args:
            rows_RD: rows of local expert i at [offsets[i-1], offsets[i]); rows past the last end are not read, and
                their output is zero.
            row_weights_R: float32 (float64 if the rows are float64), multiplies the activation before the down
                projection, and the bias of that.
            offsets_e: int32, inclusive ends.
            ask_out: called when the output is about to be written, also in a recomputed forward pass; it may return
                memory for it, of the shape and dtype of the rows and contiguous. The back-end ``triton`` writes and
                returns that; the others do not ask and return a tensor of their own. No output is saved for a backward
                pass.
            ask_grad_rows: likewise for the gradient of the rows, called in each backward pass that needs it. Where
                rows have another use besides, the memory must not be given a second time before they are summed.

        Raises:
            ValueError: see ``grouped_experts``; memory that does not fit.
        """
        return grouped_experts(
            rows_RD,
            row_weights_R,
            offsets_e,
            self.up_projection,
            self.down,
            activation=self.config.activation_function,
            up_bias=self.up_projection_bias,
            down_bias=self.down_bias if self.config.bias else None,
            backend=self.config.backend,
            table=self._table,
            defer_weight_gradients=self.defer_weight_gradients,
            ask_out=ask_out,
            ask_grad_rows=ask_grad_rows,
        )

    def forward_tokens(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """Send tokens through the experts they chose and add up what comes back.

        Equals, bit for bit, putting the rows in the order (expert, token, choice), ``forward``, and for each token the
        sum of its K rows in the order of k.

        Args:
            x_TD: the dtype of the parameters.
            ids_TK: int64, 0 to E-1, or -1 for a choice that is not routed and adds nothing. On a GPU nobody looks at
                the values, and an id that no expert has counts as -1.
            weights_TK: float32 (float64 if x is float64).

        Raises:
            ValueError: this rank does not hold all experts, or shapes, dtypes or (on the CPU) ids do not fit.
        """
        problems = self._token_problems(x_TD, ids_TK, weights_TK)
        if problems:
            raise ValueError("\n".join(problems))
        backend = self.backend
        if backend in ("triton", "quack"):
            return experts_of_tokens(
                x_TD,
                ids_TK,
                weights_TK,
                self.up_projection,
                self.down,
                backend=backend,
                activation=self.config.activation_function,
                up_bias=self.up_projection_bias,
                down_bias=self.down_bias if self.config.bias else None,
                table=self._table,
                defer_weight_gradients=self.defer_weight_gradients,
            )
        order = order_by_expert(ids_TK, self.num_local_experts)
        row_weights_N = weights_TK.flatten().index_select(0, order.slot_of_row_N)
        return sum_over_choices(self(rows_from_tokens(x_TD, order), row_weights_N, order.offsets_e), order)

    def extra_repr(self) -> str:
        """Return sizes and back-end for ``print(module)``."""
        held = f"{self.first_expert} to {self.first_expert + self.num_local_experts - 1} of {self.config.num_experts}"
        config = self.config
        sizes = f"d_model={config.d_model}, d_hidden={config.d_hidden}"
        try:
            backend = self.backend
        except ValueError:
            # Parameters that were moved or cast since. It is an error to run them, and none to print them.
            backend = f"{config.backend}, which cannot run"
        return f"experts {held}, {sizes}, activation={config.activation}, bias={config.bias}, backend={backend}"

    def _choice(self) -> BackendChoice:
        return choose_backend(
            self.config.backend,
            d_model=self.config.d_model,
            d_hidden=self.config.d_hidden,
            dtype=self.down.dtype,
            device=self.down.device,
            activation=self.config.activation,
            bias=self.config.bias,
            table=self._table,
        )

    def _token_problems(self, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> list[str]:
        found = []
        if self.num_local_experts != self.config.num_experts:
            found.append(
                f"forward_tokens needs all {self.config.num_experts} experts on one rank, "
                f"but {self.num_local_experts} are here; dispatch the tokens and call forward"
            )
        if x_TD.dim() != 2 or ids_TK.dim() != 2 or len(x_TD) != len(ids_TK) or ids_TK.shape != weights_TK.shape:
            found.append(
                "shapes must be x (T, D), ids (T, K) and weights (T, K), but are "
                f"{tuple(x_TD.shape)}, {tuple(ids_TK.shape)} and {tuple(weights_TK.shape)}"
            )
        elif x_TD.shape[1] != self.config.d_model:
            found.append(f"x must have the width of the experts, {self.config.d_model}, but has {x_TD.shape[1]}")
        elif ids_TK.shape[1] == 0:
            found.append("ids (T, K) must have at least one choice a token, but K is 0")
        if ids_TK.device != x_TD.device:
            found.append(f"ids are on {ids_TK.device} but x is on {x_TD.device}; move them there")
        if ids_TK.dim() == 2:
            found += id_problems(ids_TK, self.config.num_experts)
        found += misfits("x", x_TD, self.down)
        weight_dtype = torch.float64 if self.down.dtype == torch.float64 else torch.float32
        if weights_TK.dtype != weight_dtype:
            found.append(f"weights must be {weight_dtype} where x is {self.down.dtype}, but are {weights_TK.dtype}")
        if weights_TK.device != x_TD.device:
            found.append(f"weights are on {weights_TK.device} but x is on {x_TD.device}; move them there")
        return found
