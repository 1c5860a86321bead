"""Run a back-end on the cases and compare every output and every gradient with the ground truth."""

from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor

from coterie_experts.activation import Activation
from coterie_experts.config import Backend, ExpertsConfig
from coterie_experts.conformance.cases import CASES, TOKEN_CASES, Case, TokenCase, make_tensors, make_tokens
from coterie_experts.conformance.passes import use_problems
from coterie_experts.conformance.reference import plain_experts
from coterie_experts.conformance.runs import Function, Tensors, Trial, differences, run
from coterie_experts.conformance.sums import deferral_problems, main_grad_problems
from coterie_experts.deferred import Defer
from coterie_experts.grouped_swiglu import choose_backend, grouped_experts
from coterie_experts.module import GroupedExperts
from coterie_experts.token_rows import order_by_expert, rows_from_tokens, sum_over_choices

__all__ = ["case_problems", "conformance_problems", "refusal", "token_case_problems"]

_NAN = float("nan")


def conformance_problems(
    backend: Backend,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    repeats: int = 20,
    cases: Iterable[Case] = CASES,
    token_cases: Iterable[TokenCase] = TOKEN_CASES,
) -> list[str]:
    """Return a sentence for every way in which ``backend`` breaks the contract.

    Args:
        backend: any but ``auto``.
        device: where it runs.
        dtype: of rows and weights.
        repeats: runs that have to give the same bits.
        cases: of ``grouped_experts``; those that the back-end refuses (see ``refusal``) are left out, but it must
            take SwiGLU without biases.
        token_cases: of ``forward_tokens``, likewise.
    """
    found = []
    for case in cases:
        reason = refusal(backend, case, device=device, dtype=dtype)
        if reason is None:
            found += case_problems(backend, case, device=device, dtype=dtype, repeats=repeats)
        elif case.activation.name == "swiglu" and not case.bias:
            found.append(f"{case.name}: {reason}")
    for token_case in token_cases:
        if refusal(backend, token_case, device=device, dtype=dtype) is None:
            found += token_case_problems(backend, token_case, device=device, dtype=dtype)
    return found


def refusal(backend: Backend, case: Case | TokenCase, *, device: torch.device | str, dtype: torch.dtype) -> str | None:
    """Return why the back-end does not take a case, or None if it does."""
    try:
        choose_backend(
            backend,
            d_model=case.d_model,
            d_hidden=case.d_hidden,
            dtype=dtype,
            device=torch.device(device),
            activation=case.activation.name,
            bias=case.bias,
        )
    except ValueError as error:
        return str(error)
    return None


def case_problems(
    backend: Backend,
    case: Case,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    repeats: int = 20,
) -> list[str]:
    """Return a sentence for every way in which ``backend`` breaks the contract of ``grouped_experts`` on one case."""
    values = {name: _rounded(name, value, device, dtype) for name, value in make_tensors(case).items()}
    trial = Trial.of(partial(_ours, backend, case), _plain(case), values)
    ours, first = trial.ours(None), trial.first

    found = [f"values: {problem}" for problem in trial.beyond_rounding(first)]
    idle = [expert for expert, count in enumerate(case.counts) if count == 0]
    for name in ("up", "down", "up_bias", "down_bias"):
        if name in first and bool((first[name][idle] != 0).any()):
            found.append(f"values: the gradient of {name} is not zero for an expert without rows")
    strided = run(ours, {name: _strided(value) for name, value in values.items()})
    found += [f"strides: {problem}" for problem in trial.beyond_rounding(strided)]
    for _ in range(repeats):
        found += [f"repeated: {problem}" for problem in differences(run(ours, values), first)]
    found += main_grad_problems(trial)
    found += deferral_problems(trial)
    found += _padding_problems(ours, values, case)
    if case.all_uses:
        found += use_problems(trial, is_differentiable_twice=backend == "reference")
    # The same fault in twenty runs is one fault.
    return [f"{case.name}: {problem}" for problem in dict.fromkeys(found)]


def _padding_problems(ours: Function, values: Tensors, case: Case) -> list[str]:
    """Rows of weight zero, and rows past the end, hold NaN: everything is as if they held numbers."""
    used = sum(case.counts)
    is_zero_R = torch.zeros(values["rows"].shape[0], dtype=torch.bool, device=values["rows"].device)
    is_zero_R[:used:3] = True
    is_past_R = torch.arange(len(is_zero_R), device=is_zero_R.device) >= used
    clean = {**values, "row_weights": values["row_weights"].masked_fill(is_zero_R, 0)}
    dirty = {
        **clean,
        "rows": clean["rows"].masked_fill((is_zero_R | is_past_R)[:, None], _NAN),
        "grad_y": clean["grad_y"].masked_fill((is_zero_R | is_past_R)[:, None], _NAN),
        "row_weights": clean["row_weights"].masked_fill(is_past_R, _NAN),
    }
    expected, got = run(ours, clean), run(ours, dirty)
    # The weight of a clean row has a true gradient, that of a NaN row zero.
    expected["row_weights"] = expected["row_weights"].masked_fill(is_zero_R, 0)
    for name in ("y", "rows"):
        expected[name] = expected[name].masked_fill((is_zero_R | is_past_R)[:, None], 0)
    return [f"NaN in padding: {problem}" for problem in differences(got, expected)]


def token_case_problems(
    backend: Backend,
    case: TokenCase,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> list[str]:
    """Return a sentence for every way in which ``backend`` breaks the contract of ``forward_tokens`` on one case.

    It has to equal rows in the order (expert, token, choice), ``forward`` and a sum by choice bit for bit, and a loop
    over tokens in float64 up to rounding; what is not routed may hold NaN.
    """
    config = ExpertsConfig(
        d_model=case.d_model,
        d_hidden=case.d_hidden,
        num_experts=case.num_experts,
        backend=backend,
        activation=case.activation.name,
        swiglu_alpha=case.activation.alpha,
        swiglu_limit=case.activation.limit,
        bias=case.bias,
    )
    experts = GroupedExperts(config, device=device, dtype=dtype)
    tokens = make_tokens(case)
    ids_TK = tokens.ids_TK.to(device)
    values = {
        name: _rounded(name, value, device, dtype)
        for name, value in {
            "x": tokens.x_TD,
            "weights": tokens.weights_TK,
            **tokens.parameters,
            "grad_y": tokens.grad_y_TD,
        }.items()
    }

    def whole(defer: Defer | None) -> Function:
        return partial(forward_tokens, defer)

    def forward_tokens(defer: Defer | None, t: Tensors) -> Tensor:
        _set_weights(experts, t, tokens.parameters)
        experts.defer_weight_gradients = defer
        return experts.forward_tokens(t["x"], ids_TK, t["weights"])

    def in_steps(t: Tensors) -> Tensor:
        _set_weights(experts, t, tokens.parameters)
        order = order_by_expert(ids_TK, case.num_experts)
        row_weights_N = t["weights"].flatten().index_select(0, order.slot_of_row_N)
        return sum_over_choices(experts(rows_from_tokens(t["x"], order), row_weights_N, order.offsets_e), order)

    trial = Trial.of(whole, _token_loop(ids_TK, config.activation_function), values)
    found = [f"in steps: {problem}" for problem in differences(trial.first, run(in_steps, values))]
    found += [f"values: {problem}" for problem in trial.beyond_rounding(trial.first)]
    is_dropped_TK = ids_TK < 0
    dirty = {
        **values,
        "x": values["x"].masked_fill(is_dropped_TK.all(dim=1, keepdim=True), _NAN),
        "weights": values["weights"].masked_fill(is_dropped_TK, _NAN),
    }
    found += [f"NaN in what is not routed: {p}" for p in differences(run(whole(None), dirty), trial.first)]
    if case.all_uses:
        found += use_problems(trial, is_differentiable_twice=backend == "reference")
    return [f"{case.name}: {problem}" for problem in found]


def _set_weights(experts: GroupedExperts, t: Tensors, names: Iterable[str]) -> None:
    for name in names:
        setattr(experts, name, t[name])


def _token_loop(ids_TK: Tensor, activation: Activation) -> Function:
    """Run each expert on the tokens that chose it; the sum is in float32 at least."""

    def call(t: Tensors) -> Tensor:
        y_TD = torch.zeros_like(t["x"], dtype=t["weights"].dtype)
        up_name = "gate_up" if activation.is_gated else "up"
        biases = {name: t[given] for name, given in (("up_bias", f"{up_name}_bias"), ("down_bias",) * 2) if given in t}
        for expert in range(t["down"].shape[0]):
            token_R, choice_R = torch.where(ids_TK == expert)
            out_RD = plain_experts(
                t["x"][token_R],
                t["weights"][token_R, choice_R],
                [len(token_R)],
                t[up_name][expert, None],
                t["down"][expert, None],
                activation=activation,
                **{name: bias[expert, None] for name, bias in biases.items()},
            )
            y_TD = y_TD.index_add(0, token_R, out_RD.to(y_TD.dtype))
        return y_TD.to(t["x"].dtype)

    return call


def _ours(backend: Backend, case: Case, defer: Defer | None = None) -> Function:
    def call(t: Tensors) -> Tensor:
        offsets_e = torch.tensor(case.counts, device=t["rows"].device).cumsum(0).to(torch.int32)
        return grouped_experts(
            t["rows"],
            t["row_weights"],
            offsets_e,
            t["up"],
            t["down"],
            activation=case.activation,
            up_bias=t.get("up_bias"),
            down_bias=t.get("down_bias"),
            backend=backend,
            defer_weight_gradients=defer,
        )

    return call


def _plain(case: Case) -> Function:
    def call(t: Tensors) -> Tensor:
        biases = {"up_bias": t.get("up_bias"), "down_bias": t.get("down_bias")}
        return plain_experts(
            t["rows"], t["row_weights"], case.counts, t["up"], t["down"], activation=case.activation, **biases
        )

    return call


def _rounded(name: str, value: Tensor, device: torch.device | str, dtype: torch.dtype) -> Tensor:
    wide = name in ("row_weights", "weights")
    return value.to(device=device, dtype=torch.promote_types(dtype, torch.float32) if wide else dtype)


def _strided(value: Tensor) -> Tensor:
    """Return the same numbers with a gap after each of them."""
    return torch.stack((value, torch.full_like(value, _NAN)), dim=-1)[..., 0]
