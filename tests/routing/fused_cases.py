"""Cases of the fused router, and what it must give: held to `route` in fp64, with the error of fp32 as the measure."""

from dataclasses import dataclass, replace

import torch
from coterie_routing import RouterConfig, Routing, route
from coterie_routing.fused_router import FusedRouting, fused_route
from torch import Tensor

__all__ = ["CASES", "FusedCase", "assert_right", "fused", "inputs", "outputs", "reference"]


@dataclass(frozen=True, kw_only=True)
class FusedCase:
    """A router and tokens: random, "ties" of small whole numbers, or "equal" ones that are all zero."""

    tokens: int
    width: int
    experts: int
    top_k: int
    score: str = "softmax"
    renormalize: bool = True
    scale: float = 1.5
    biased: bool = False
    masked: bool = False
    kind: str = "random"
    x_dtype: torch.dtype = torch.float32
    weight_dtype: torch.dtype = torch.float32
    device: str = "cpu"

    def __str__(self) -> str:
        words = [f"T{self.tokens} D{self.width} E{self.experts} K{self.top_k} {self.score}"]
        words += ["plain"] * (not self.renormalize) + ["bias"] * self.biased + ["mask"] * self.masked
        if self.kind != "random":
            words.append(self.kind)
        if self.device != "cpu":
            words.append(f"{self.x_dtype}/{self.weight_dtype}".replace("torch.", ""))
        return " ".join(words)

    @property
    def config(self) -> RouterConfig:
        return RouterConfig(
            d_model=self.width,
            num_experts=self.experts,
            top_k=self.top_k,
            score_function=self.score,  # type: ignore[arg-type]
            renormalize=self.renormalize,
            route_scale=self.scale,
            selection_bias=self.biased,
        )


CASES = [
    # Widths that are and are not a multiple of 16 bytes and of a tile; sizes at the edges of a tile of tokens.
    *(FusedCase(tokens=tokens, width=20, experts=8, top_k=2) for tokens in (0, 1, 31, 32, 33, 63, 64, 65, 127, 129)),
    FusedCase(tokens=128, width=32, experts=16, top_k=3, score="sigmoid", biased=True, masked=True),
    FusedCase(tokens=5, width=1, experts=1, top_k=1, renormalize=False),
    FusedCase(tokens=33, width=19, experts=2, top_k=2, score="softmax_of_chosen"),
    FusedCase(tokens=33, width=33, experts=17, top_k=5, score="sigmoid"),
    FusedCase(tokens=9, width=64, experts=64, top_k=8, masked=True),
    FusedCase(tokens=9, width=12, experts=100, top_k=8, score="softmax_of_chosen", masked=True),
    FusedCase(tokens=7, width=20, experts=130, top_k=3, score="sigmoid", renormalize=False, biased=True),
    FusedCase(tokens=7, width=20, experts=40, top_k=20, renormalize=False),
    FusedCase(tokens=5, width=20, experts=33, top_k=33, score="softmax_of_chosen", biased=True),
    FusedCase(tokens=40, width=20, experts=24, top_k=4, biased=True),
    FusedCase(tokens=40, width=20, experts=24, top_k=4, renormalize=False, biased=True, masked=True),
    *(
        FusedCase(tokens=40, width=5, experts=24, top_k=top_k, score=score, kind="ties", biased=biased)
        for top_k, score, biased in ((3, "softmax", False), (8, "sigmoid", False), (12, "softmax", False))
    ),
    FusedCase(tokens=33, width=4, experts=20, top_k=9, kind="equal"),
    FusedCase(tokens=33, width=4, experts=8, top_k=2, kind="equal", score="sigmoid", biased=True, masked=True),
]


def inputs(case: FusedCase, seed: int = 0) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return tokens, weight, bias and mask; what is masked is NaN."""
    generator = torch.Generator().manual_seed(seed)
    x_TD = torch.randn(case.tokens, case.width, generator=generator)
    weight_ED = torch.randn(case.experts, case.width, generator=generator) * 2 / case.width**0.5
    if case.kind == "ties":
        x_TD, weight_ED = x_TD.round(), torch.randint(-1, 2, weight_ED.shape, generator=generator).float()
    elif case.kind == "equal":
        x_TD = torch.zeros_like(x_TD)
    bias_E = None
    if case.biased:
        # Sixteenths, so that all numbers of a tie are exact.
        bias_E = torch.randint(-4, 5, (case.experts,), generator=generator).float() / 16
    is_real_T = torch.rand(case.tokens, generator=generator) > 0.3 if case.masked else None
    if is_real_T is not None:
        x_TD = x_TD.masked_fill(~is_real_T[:, None], torch.nan)

    def to_device(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.to(case.device)

    x_TD, weight_ED = x_TD.to(case.device, case.x_dtype), weight_ED.to(case.device, case.weight_dtype)
    return x_TD.requires_grad_(), weight_ED.requires_grad_(), to_device(bias_E), to_device(is_real_T)


def fused(
    case: FusedCase, x_TD: Tensor, weight_ED: Tensor, bias_E: Tensor | None, is_real_T: Tensor | None
) -> FusedRouting:
    return fused_route(
        x_TD,
        weight_ED,
        top_k=case.top_k,
        score_function=case.score,
        renormalize=case.renormalize,
        weight_scale=case.scale,
        selection_bias_E=bias_E,
        is_real_T=is_real_T,
    )


def reference(
    case: FusedCase,
    x_TD: Tensor,
    weight_ED: Tensor,
    bias_E: Tensor | None,
    is_real_T: Tensor | None,
    dtype: torch.dtype,
) -> Routing:
    """Return the routing by plain torch in this dtype."""
    if is_real_T is not None:
        x_TD = x_TD.masked_fill(~is_real_T[:, None], 0)
    logits_TE = x_TD.to(dtype) @ weight_ED.to(dtype).T
    config = replace(case.config, renormalize=case.renormalize and case.top_k > 1)
    return route(logits_TE, config, selection_bias_E=None if bias_E is None else bias_E.to(dtype), is_real_T=is_real_T)


def _is_clear(case: FusedCase, x_TD: Tensor, weight_ED: Tensor, bias_E: Tensor | None, margin: float) -> Tensor:
    rank_TE = x_TD.detach().nan_to_num().double() @ weight_ED.detach().double().T
    if bias_E is not None:
        rank_TE = (rank_TE.sigmoid() if case.score == "sigmoid" else rank_TE.softmax(-1)) + bias_E
    best_TK = rank_TE.topk(min(case.top_k + 1, case.experts)).values
    return ((best_TK[:, :-1] - best_TK[:, 1:]) > margin).all(-1)


def outputs(routing: Routing | FusedRouting) -> list[Tensor]:
    """Return the outputs that have gradients: weights, scores, probability sums, z-sum."""
    sums = routing.sums if isinstance(routing, Routing) else routing
    return [routing.weights_TK, routing.scores_TE, sums.probability_sums_E, sums.z_sum]


def assert_right(case: FusedCase, seed: int = 0, only: int | None = None, margin: float = 0.0) -> None:
    """Hold every output and gradient of a case to fp64.

    Args:
        case: What is routed. A case of few tokens is drawn 8 times and its errors are added up: in one draw the
            reference may be off by much less than a rounding of its logits, by luck.
        seed: Of the inputs and of the gradients of the outputs.
        only: The one output that gets a gradient, of the four; None means all.
        margin: Tokens with two ranks this close, of those that matter, are masked: their order is up to rounding.
    """
    draws = [_errors(case, seed + draw, only, margin) for draw in range(8 if case.tokens < 16 else 1)]
    for name in draws[0]:
        ours, fp32, norm = (sum(found[name][i] ** 2 for found in draws) ** 0.5 for i in range(3))
        # Some roundings of fp32 are always allowed, since in a small case the reference may have no error at all; one
        # more for what is summed in fp32 over a block of tokens first, and in fp64 by the reference.
        allowed = 2 * max(fp32, (2.4e-7 if name == "probability sums" else 1.2e-7) * norm)
        assert ours <= allowed, f"{case}: {name}: error {ours:.2e}, allowed {allowed:.2e}"


def _errors(case: FusedCase, seed: int, only: int | None, margin: float) -> dict[str, tuple[float, float, float]]:
    """Return for each output and gradient our error, that of the reference in fp32, and the norm of the right value."""
    x_TD, weight_ED, bias_E, is_real_T = inputs(case, seed)
    if margin > 0:
        is_clear_T = _is_clear(case, x_TD, weight_ED, bias_E, margin)
        is_real_T = is_clear_T if is_real_T is None else is_real_T & is_clear_T
    ours = fused(case, x_TD, weight_ED, bias_E, is_real_T)
    used = range(4) if only is None else [only]
    generator = torch.Generator().manual_seed(seed + 1)
    grads = [torch.randn(one.shape, generator=generator).to(one.device, one.dtype) for one in outputs(ours)]
    torch.autograd.backward([outputs(ours)[i] for i in used], [grads[i] for i in used])

    results = []
    for dtype in (torch.float64, torch.float32):
        x, weight = x_TD.detach().clone().requires_grad_(), weight_ED.detach().clone().requires_grad_()
        wide_x, wide_weight = x.to(torch.float64), weight.to(torch.float64)
        if dtype == torch.float64:
            wide_x, wide_weight = wide_x.detach().requires_grad_(), wide_weight.detach().requires_grad_()
            x, weight = wide_x, wide_weight
        routing = reference(case, x, weight, bias_E, is_real_T, dtype)
        given = [grad.to(one.dtype) for grad, one in zip(grads, outputs(routing), strict=True)]
        torch.autograd.backward([outputs(routing)[i] for i in used], [given[i] for i in used])
        results.append((routing, [*outputs(routing), x.grad, weight.grad]))
    (exact, exact_values), (_, fp32_values) = results

    assert ours.ids_TK.dtype == ours.counts_E.dtype == ours.num_tokens.dtype == torch.int64
    assert torch.equal(ours.ids_TK, exact.ids_TK), case
    assert torch.equal(ours.counts_E, exact.counts_E), case
    assert torch.equal(ours.num_tokens, exact.sums.num_tokens), case
    assert torch.equal(ours.num_bad, exact.sums.num_bad), case
    our_values = [*outputs(ours), x_TD.grad, weight_ED.grad]
    dtypes = [torch.float32, torch.float32, torch.float64, torch.float64, case.x_dtype, case.weight_dtype]
    names = ["weights", "scores", "probability sums", "z sum", "gradient of x", "gradient of weight"]
    found = {}
    for name, our, right, fp32, dtype in zip(names, our_values, exact_values, fp32_values, dtypes, strict=True):
        assert our is not None, name
        assert our.dtype == dtype, name
        if right is not None:
            right = right.detach()
            found[name] = (
                float((our.detach() - right).norm()),
                float((fp32.detach() - right).norm()),
                float(right.norm()),
            )
    return found
