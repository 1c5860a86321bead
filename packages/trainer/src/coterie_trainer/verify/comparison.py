"""Compare what a layout computed with what one process computed, tensor by tensor, in the order of the computation."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from coterie_trainer.verify.running import Outcome, Owners, StepOutcome

__all__ = ["Comparison", "Difference", "compare"]

_NEAR_TIE = 4  # one token that chose otherwise, and one more that followed it
KINDS = ("loss", "balance loss", "norm", "gradients", "parameters")


@dataclass(frozen=True, kw_only=True)
class Difference:
    """How far one tensor or number is from the expected one.

    Attributes:
        step: from 1.
        kind: one of `KINDS`, or "load".
        name: of the tensor, or of the number.
        relative: norm of the difference over the norm of the expected; infinite for a zero that is none, or for NaN.
        largest: the largest difference of an element.
        where: index of that element, what it is and what it should be, and who has it; empty for a number.
    """

    step: int
    kind: str
    name: str
    relative: float
    largest: float
    where: str

    def __str__(self) -> str:
        return f"step {self.step}, {self.name}: relative difference {self.relative:.1e}; {self.where}"


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The verdict on one layout.

    Attributes:
        largest: by kind, the largest relative difference of a tensor or number.
        largest_element: by kind, the largest difference of an element.
        wrong: all that differ by more than the tolerance, in the order in which a step computes them: loads, loss,
            gradients from the last layer to the first, norm, parameters.
        num_compared: tensors and numbers.
        replica_problems: see `Outcome`.
    """

    largest: dict[str, float]
    largest_element: dict[str, float]
    wrong: tuple[Difference, ...]
    num_compared: int
    replica_problems: tuple[str, ...]

    @property
    def agrees(self) -> bool:
        """Whether everything is the same."""
        return not self.wrong and not self.replica_problems

    def problems(self) -> list[str]:
        """Return what is wrong, in sentences: the first difference, how many there are, and replicas that differ."""
        found = []
        if self.wrong:
            found.append(f"first difference: {self.wrong[0]}")
            found.append(f"{len(self.wrong)} of {self.num_compared} tensors and numbers differ")
        if self.replica_problems:
            found.append(f"replicas differ: {self.replica_problems[0]}")
            if len(self.replica_problems) > 1:
                found.append(f"and {len(self.replica_problems) - 1} more replicas")
        return found


def compare(expected: Outcome, found: Outcome, *, tolerance: float = 1e-5) -> Comparison:
    """Compare every tensor and number of all steps; tensors by name, and a name on one side only is a difference."""
    differences = [
        difference
        for number, (a, b) in enumerate(zip(expected.steps, found.steps, strict=True), start=1)
        for difference in _step_differences(number, a, b, found.owners)
    ]
    largest, largest_element = dict.fromkeys(KINDS, 0.0), dict.fromkeys(KINDS, 0.0)
    for one in differences:
        if one.kind in largest:
            largest[one.kind] = max(largest[one.kind], one.relative)
            largest_element[one.kind] = max(largest_element[one.kind], one.largest)
    return Comparison(
        largest=largest,
        largest_element=largest_element,
        wrong=tuple(one for one in differences if not one.relative <= (0.0 if one.kind == "load" else tolerance)),
        num_compared=len(differences),
        replica_problems=found.replica_problems,
    )


def _step_differences(step: int, expected: StepOutcome, found: StepOutcome, owners: Owners) -> Iterator[Difference]:
    yield _load_difference(step, expected.load_LE, found.load_LE)
    yield _number(step, "loss", "loss", expected.loss, found.loss)
    yield _number(step, "balance loss", "balance loss", expected.balance_loss, found.balance_loss)
    backwards = dict(reversed(expected.gradients.items()))
    yield from _tensors(step, "gradients", "gradient of ", backwards, found.gradients, owners)
    yield _number(step, "norm", "gradient norm", expected.gradient_norm, found.gradient_norm)
    yield from _tensors(step, "parameters", "", expected.state, found.state, owners)


def _load_difference(step: int, expected_LE: Tensor, found_LE: Tensor) -> Difference:
    """Compare counts, which have no rounding; only a router that was near a tie may choose otherwise after rounding."""
    off_LE = (found_LE - expected_LE).abs()
    largest = int(off_LE.max())
    where = ""
    if largest:
        layer, expert = (int(at) for at in torch.unravel_index(off_LE.argmax(), off_LE.shape))
        where = (
            f"expert {expert} of MoE layer {layer} got {int(found_LE[layer, expert])} tokens instead of "
            f"{int(expected_LE[layer, expert])}"
        )
        if int(off_LE.sum()) <= _NEAR_TIE:
            where += "; rounding can do that to a token that was near a tie: if another --set seed=N agrees, it was one"
    relative = float(off_LE.sum()) / max(1.0, float(expected_LE.sum()))
    return Difference(
        step=step, kind="load", name="load of experts", relative=relative, largest=float(largest), where=where
    )


def _number(step: int, kind: str, name: str, expected: float, found: float) -> Difference:
    off = abs(found - expected)
    return Difference(
        step=step,
        kind=kind,
        name=name,
        relative=_ratio(off, abs(expected)),
        largest=off,
        where=f"{found:.9g} instead of {expected:.9g}",
    )


def _tensors(
    step: int, kind: str, prefix: str, expected: dict[str, Tensor], found: dict[str, Tensor], owners: Owners
) -> Iterator[Difference]:
    for name in [*expected, *(name for name in found if name not in expected)]:
        a, b = expected.get(name), found.get(name)
        if a is None or b is None or a.shape != b.shape:
            shapes = ["none" if one is None else str(tuple(one.shape)) for one in (b, a)]
            where = f"shape {shapes[0]} instead of {shapes[1]}"
            yield Difference(step=step, kind=kind, name=prefix + name, relative=math.inf, largest=math.inf, where=where)
            continue
        a, b = a.double(), b.double()
        off = (b - a).abs().nan_to_num(nan=math.inf)
        place = int(off.argmax())
        index = tuple(int(at) for at in torch.unravel_index(torch.tensor(place), off.shape))
        largest = float(off.flatten()[place])
        shown = ", ".join(map(str, index))
        yield Difference(
            step=step,
            kind=kind,
            name=prefix + name,
            relative=_ratio(float(off.norm()), float(a.norm())),
            largest=largest,
            where=f"most at [{shown}] by {largest:.1e}: {float(b[index]):.9g} instead of {float(a[index]):.9g}; "
            f"{owners.describe(name, tuple(a.shape), index)}",
        )


def _ratio(off: float, expected: float) -> float:
    if off == 0.0:
        return 0.0
    return off / expected if expected > 0.0 and math.isfinite(off) else math.inf
