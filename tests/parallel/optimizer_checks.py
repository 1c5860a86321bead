"""The optimizer's numbers on any device: against plain loops in fp64, against torch, and against itself.

Each check returns a sentence for everything that is wrong. `gpu_optimizer.py` runs them on a GPU, with our kernels,
`test_optimizer_checks.py` on a CPU.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from coterie_parallel import (
    DENSE,
    EXPERTS,
    AdamWConfig,
    Mesh,
    MuonConfig,
    Optimizer,
    ParallelConfig,
    Placement,
    ReductionConfig,
    make_plan,
)
from torch import Tensor, nn

from parallel.echo_mesh import EchoMesh, backward, echoing

__all__ = [
    "MUON_SHAPES",
    "SETTINGS",
    "Setting",
    "Trial",
    "check_adamw",
    "check_continued",
    "check_muon",
    "check_sharded",
    "check_skipped",
]

Shapes = Mapping[str, tuple[int, ...]]
RATE, STEPS = 1e-3, 4
UNIT = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}
"""Half the distance from 1 to the next number."""
MUON = MuonConfig(exclude=("embed*",))
MUON_SHAPES: Shapes = {
    "layer.q.weight": (96, 160),
    "layer.tall.weight": (320, 96),
    "layer.experts.up": (4, 128, 96),
    "embed.weight": (200, 96),
    "norm.weight": (96,),
}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One way to update parameters of one dtype."""

    name: str
    dtype: torch.dtype = torch.bfloat16
    config: AdamWConfig = field(default_factory=AdamWConfig)


_HALF = AdamWConfig(moments_dtype="bfloat16")
SETTINGS = [
    Setting(name="bf16"),
    Setting(name="bf16, no clip", config=AdamWConfig(gradient_clip=None)),
    Setting(name="bf16, bf16 moments", config=_HALF),
    Setting(name="fp32", dtype=torch.float32),
    Setting(name="fp32, bf16 moments, no clip", dtype=torch.float32, config=replace(_HALF, gradient_clip=None)),
    Setting(name="fp32, factors and decays", dtype=torch.float32, config=AdamWConfig(
        learning_rate_factors=(("embed*", 0.5),), weight_decays=(("norm*", 0.3),)
    )),
]  # fmt: skip


class Trial:
    """Parameters, their optimizer on one rank, and gradients that depend on the step alone."""

    def __init__(self, setting: Setting, shapes: Shapes, device: torch.device, *, seed: int = 0) -> None:
        self.setting, self.device = setting, device
        torch.manual_seed(seed)
        self.named = {
            name: nn.Parameter((0.02 * torch.randn(shape, device=device)).to(setting.dtype))
            for name, shape in shapes.items()
        }
        mesh = Mesh(make_plan(ParallelConfig(), 1), 0, timeout_s=60, device=device)
        self.optimizer = Optimizer(self.named.items(), dict.fromkeys(self.named, DENSE), mesh, setting.config)

    def gradients(self, step: int) -> dict[str, Tensor]:
        """Return the fp32 gradients of a step; those of the first steps are clipped, of the later ones not."""
        generator = torch.Generator(self.device).manual_seed(1 + step)
        count = sum(one.numel() for one in self.named.values())
        scale = (4.0, 1.5, 0.5, 0.25)[step % 4] / math.sqrt(count)  # times the largest norm, which is 1
        return {
            name: scale * torch.randn(one.shape, device=self.device, generator=generator)
            for name, one in self.named.items()
        }

    def step(self, number: int, *, spoil: bool = False) -> Tensor:
        """Give the gradients of a step, one of them infinite if they are to be spoiled, and update."""
        self.optimizer.zero_grad()
        gradients = self.gradients(number)
        if spoil:
            next(iter(gradients.values())).view(-1)[0] = torch.inf
        for name, parameter in self.named.items():
            if self.setting.dtype == torch.float32:
                parameter.grad = gradients[name]
            else:
                parameter.main_grad.copy_(gradients[name])  # type: ignore[attr-defined]
        return self.optimizer.step(RATE)

    def state(self) -> dict[str, Tensor]:
        """Return the live state, with the weights under their names."""
        return self.optimizer.state_dict() | {name: parameter.detach() for name, parameter in self.named.items()}

    def main(self, name: str) -> Tensor:
        """Return the live fp32 weight, 1-D."""
        parameter = self.named[name].detach().view(-1)
        return parameter if self.setting.dtype == torch.float32 else self.optimizer.state_dict()[f"main/{name}"]


def _copies(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {key: value.clone() for key, value in state.items()}


def _outside(what: str, found: Tensor, exact: Tensor, allowed: Tensor) -> list[str]:
    """Return a sentence if an element differs from an fp64 one by more than is allowed for it, or is not a number."""
    excess = (found.double() - exact).abs() / allowed
    largest = float(excess.max())
    return [] if largest <= 1 else [f"{what}: {largest:.3g} of what rounding allows"]


def check_adamw(setting: Setting, shapes: Shapes, device: torch.device) -> list[str]:
    """Compare every step with AdamW in fp64 from the state before it, rounded as the setting says."""
    trial, config, faults = Trial(setting, shapes, device), setting.config, []
    beta1, beta2 = config.betas
    eps32 = UNIT[torch.float32]
    for number in range(STEPS):
        before = _copies(trial.state())
        mains = {name: trial.main(name).double() for name in shapes}
        gradients = {name: one.double().view(-1) for name, one in trial.gradients(number).items()}
        expected_norm = float(torch.stack([one.square().sum() for one in gradients.values()]).sum().sqrt())
        norm = float(trial.step(number))
        what = f"AdamW, {setting.name}, step {number}"
        if not abs(norm / expected_norm - 1) < 1e-9:
            faults.append(f"{what}: norm {norm}, expected {expected_norm}")
        clip = 1.0 if config.gradient_clip is None else min(1.0, config.gradient_clip / expected_norm)
        after = trial.state()
        for name, shape in shapes.items():
            grad = clip * gradients[name]
            first, second = (before[f"{moment}/{name}"].double() for moment in ("exp_avg", "exp_avg_sq"))
            size = beta1 * first.abs() + (1 - beta1) * grad.abs()  # where both cancel, their roundings do not
            first = beta1 * first + (1 - beta1) * grad
            second = beta2 * second + (1 - beta2) * grad * grad
            rate = RATE * config.factor_of(name, len(shape))
            decay = config.decay_of(name, len(shape))
            divisor = (second / (1 - beta2 ** (number + 1))).sqrt() + config.eps
            main = mains[name] * (1 - rate * decay) - rate * first / (1 - beta1 ** (number + 1)) / divisor
            moved = rate * size / (1 - beta1 ** (number + 1)) / divisor
            unit = UNIT[torch.bfloat16] if config.moments_dtype == "bfloat16" else 0.0
            tiny = 2.0**-126
            for moment, exact, magnitude in (("exp_avg", first, size), ("exp_avg_sq", second, second)):
                allowed = unit * exact.abs() + 16 * eps32 * magnitude + tiny
                faults += _outside(f"{what}: {moment} of {name}", after[f"{moment}/{name}"], exact, allowed)
            found = trial.main(name)
            faults += _outside(f"{what}: {name}", found, main, 4 * eps32 * main.abs() + 32 * eps32 * moved + tiny)
            if not torch.equal(after[name].view(-1), found.to(setting.dtype)):
                faults.append(f"{what}: {name} is not its rounded main weight")
    return faults


def check_skipped(setting: Setting, shapes: Shapes, device: torch.device) -> list[str]:
    """Check that a step with an infinite gradient changes nothing, and leaves nothing behind for the next one."""
    trial, other = Trial(setting, shapes, device), Trial(setting, shapes, device)
    faults = []
    for number in range(2):
        trial.step(number)
        other.step(number)
    before = _copies(trial.state())
    norm = trial.step(2, spoil=True)
    changed = [key for key, value in trial.state().items() if not torch.equal(value, before[key])]
    if bool(norm.isfinite()) or changed != ["num_skipped"]:
        faults.append(f"skipped, {setting.name}: norm {float(norm)}, changed {', '.join(changed)}")
    trial.step(2)
    other.step(2)
    state = trial.state()
    differing = [key for key, value in other.state().items() if not torch.equal(value, state[key])]
    if differing != ["num_skipped"]:
        faults.append(f"skipped, {setting.name}: the next step differs in {', '.join(differing)}")
    return faults


def check_continued(setting: Setting, shapes: Shapes, device: torch.device) -> list[str]:
    """Check that a loaded state goes on to the bits of a run that was not interrupted."""
    whole, first = Trial(setting, shapes, device), Trial(setting, shapes, device)
    second = Trial(setting, shapes, device, seed=9)
    for number in range(STEPS):
        whole.step(number)
    for number in range(STEPS // 2):
        first.step(number)
    if setting.dtype == torch.float32:  # where the weights are no part of the state
        with torch.no_grad():
            for name, parameter in second.named.items():
                parameter.copy_(first.named[name])
    second.optimizer.load_state_dict(_copies(first.optimizer.state_dict()))
    faults = []
    if wrong := [name for name, one in first.named.items() if not torch.equal(one, second.named[name])]:
        faults.append(f"continued, {setting.name}: load_state_dict gives other weights: {', '.join(wrong)}")
    for number in range(STEPS // 2, STEPS):
        second.step(number)
    state = second.state()
    if differing := [key for key, value in whole.state().items() if not torch.equal(value, state[key])]:
        faults.append(f"continued, {setting.name}: differs in {', '.join(differing)}")
    return faults


def _newton_schulz(matrix_RC: Tensor) -> Tensor:
    """Return what five quintic steps make of a matrix, in its dtype, written plainly."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrix_RC / (matrix_RC.norm() + 1e-7)
    for _ in range(5):
        gram = x @ x.T if x.shape[0] <= x.shape[1] else x.T @ x
        change = b * gram + c * gram @ gram
        x = a * x + (change @ x if x.shape[0] <= x.shape[1] else x @ change)
    return x


def _exact_muon(weight_RC: Tensor, gradients: Sequence[Tensor], decay: float) -> Tensor:
    """Return a matrix after the steps of Keller Jordan's Muon with the scale of AdamW, in fp64."""
    weight_RC, average = weight_RC.double(), torch.zeros_like(weight_RC, dtype=torch.float64)
    for gradient in gradients:
        average = 0.95 * average + 0.05 * gradient.double()
        direction = _newton_schulz(0.05 * gradient.double() + 0.95 * average)
        weight_RC = weight_RC * (1 - RATE * decay) - RATE * 0.2 * math.sqrt(max(weight_RC.shape)) * direction
    return weight_RC


def check_muon(shapes: Shapes, device: torch.device) -> list[str]:
    """Compare Muon with fp64, in fp32, and with torch.optim.Muon, in bf16; every expert is a matrix of its own."""
    config = AdamWConfig(muon=replace(MUON, dtype="float32"), gradient_clip=None)
    trials = {}
    for dtype in ("float32", "bfloat16"):
        changed = replace(config, muon=replace(MUON, dtype=dtype))  # type: ignore[arg-type]
        trials[dtype] = Trial(Setting(name="muon", dtype=torch.float32, config=changed), shapes, device)
    start = {name: one.detach().clone() for name, one in trials["float32"].named.items()}
    gradients = [trials["float32"].gradients(number) for number in range(STEPS)]
    for number in range(STEPS):
        for trial in trials.values():
            trial.step(number)
    faults = []
    for name, shape in shapes.items():
        if config.kind_of(name, len(shape)) != "muon":
            continue
        for number, weight_RC in enumerate(start[name].view(-1, *shape[-2:])):
            of_matrix = [one[name].view(-1, *shape[-2:])[number] for one in gradients]
            exact = _exact_muon(weight_RC, of_matrix, config.weight_decay)
            moved = float((exact - weight_RC.double()).norm())
            errors = {
                dtype: float((trial.named[name].detach().view(-1, *shape[-2:])[number].double() - exact).norm()) / moved
                for dtype, trial in trials.items()
            }
            what = f"Muon, {name}, matrix {number}"
            # The iteration multiplies a rounding in what belongs to small singular values by up to 3.4445^5 = 485.
            if not errors["float32"] < 485 * UNIT[torch.float32]:
                faults.append(f"{what}: in fp32 off by {errors['float32']:.1e} of the change")
            if not hasattr(torch.optim, "Muon"):
                continue
            theirs = float((_torch_muon(weight_RC, of_matrix, config.weight_decay).double() - exact).norm()) / moved
            if not 0 < errors["bfloat16"] <= 2 * theirs:
                faults.append(f"{what}: in bf16 off by {errors['bfloat16']:.1e} of the change, torch by {theirs:.1e}")
    return faults


def _torch_muon(weight_RC: Tensor, gradients: Sequence[Tensor], decay: float) -> Tensor:
    parameter = nn.Parameter(weight_RC.clone())
    optimizer = torch.optim.Muon(
        [parameter], lr=RATE, weight_decay=decay, momentum=0.95, nesterov=True, adjust_lr_fn="match_rms_adamw"
    )
    for gradient in gradients:
        parameter.grad = gradient.clone()
        optimizer.step()
    return parameter.detach()


SHARDED_SHAPES: Shapes = {
    "embed.weight": (400, 64),
    **{
        f"layers.{number}.{name}": shape
        for number in range(3)
        for name, shape in {
            "q.weight": (130, 64),
            "experts.up": (4, 90, 64),
            "norm.weight": (64,),
            "experts.down": (4, 64, 45),
        }.items()
    },
}


def placements_of(shapes: Shapes) -> dict[str, Placement]:
    """Return where the parameters are: experts over the expert axis."""
    return {name: EXPERTS if ".experts." in name else DENSE for name in shapes}


@contextmanager
def without_host_waits(device: torch.device) -> Iterator[None]:
    """Raise where the host would wait for a GPU."""
    if device.type != "cuda":
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def check_sharded(
    device: torch.device, *, delay_cycles: int = 0, shapes: Shapes = SHARDED_SHAPES, bucket_bytes: int = 40_000
) -> list[str]:
    """Compare sharded gradients with whole ones, of a rank whose peers send what it sends: weights and state, all bits.

    With exchanges that are late, on a GPU, a buffer that is written while it is read shows. Sums of equal gradients
    of 2 or 4 ranks are exact in fp32, so both ways have the same bits.
    """
    plan = make_plan(ParallelConfig(expert=2), 4)
    found: dict[bool, dict[str, Tensor]] = {}
    faults = []
    for sharded in (False, True):
        generator = torch.Generator(device).manual_seed(5)
        named = {
            name: nn.Parameter(torch.randn(shape, device=device, generator=generator).bfloat16())
            for name, shape in shapes.items()
        }
        config = replace(_HALF, reduction=ReductionConfig(bucket_bytes=bucket_bytes, sharded=sharded))
        mesh = EchoMesh(plan, device)
        with echoing(delay_cycles if sharded else 0):
            optimizer = Optimizer(named.items(), placements_of(shapes), mesh, config)  # type: ignore[arg-type]
            for step in range(2):
                optimizer.zero_grad()
                with without_host_waits(device):
                    for number in range(3):
                        with optimizer.micro_batch(is_last=number == 2):
                            backward(list(named.values()), 10 * step + number)
                    optimizer.step(RATE)
            optimizer.wait_for_weights()
        left = [name for name, one in named.items() if one.grad is not None or (sharded and hasattr(one, "main_grad"))]
        if left:
            faults.append(f"sharded ({sharded}): gradients are left in {', '.join(left)}")
        found[sharded] = _copies(optimizer.state_dict()) | {name: one.detach() for name, one in named.items()}
        if len(optimizer.reducer.buckets) < 4:
            faults.append("too few buckets to take turns")
    if differing := [key for key, value in found[True].items() if not torch.equal(value, found[False][key])]:
        faults.append(f"sharded gradients give other bits than whole ones: {', '.join(differing)}")
    return faults


def faults_of(checks: Mapping[str, Callable[[], list[str]]]) -> list[str]:
    """Run checks, print how each went, and return all faults; what one raises is a fault."""
    faults = []
    for name, check in checks.items():
        try:
            found = check()
        except Exception as error:
            found = [f"{name}: {type(error).__name__}: {error}"]
        print(f"{name}: {found or 'right'}", flush=True)
        faults += found
    return faults


def all_checks(
    shapes: Shapes, device: torch.device, *, delay_cycles: int = 0, muon_shapes: Shapes = MUON_SHAPES
) -> dict[str, Callable[[], list[str]]]:
    """Return every check of this module by name."""
    muon = [
        Setting(name="Muon, bf16", config=AdamWConfig(muon=MUON, moments_dtype="bfloat16")),
        Setting(name="Muon, fp32", dtype=torch.float32, config=AdamWConfig(muon=MUON)),
    ]
    checks: dict[str, Callable[[], list[str]]] = {}
    for one in SETTINGS:
        checks[f"AdamW, {one.name}"] = lambda one=one: check_adamw(one, shapes, device)  # type: ignore[misc]
    for one in [SETTINGS[0], SETTINGS[2], SETTINGS[3], *muon]:
        sizes = muon_shapes if one in muon else shapes
        checks[f"skipped, {one.name}"] = lambda one=one, sizes=sizes: check_skipped(one, sizes, device)  # type: ignore[misc]
        checks[f"continued, {one.name}"] = lambda one=one, sizes=sizes: check_continued(one, sizes, device)  # type: ignore[misc]
    checks["Muon"] = lambda: check_muon(muon_shapes, device)
    checks["sharded gradients"] = lambda: check_sharded(device, delay_cycles=delay_cycles)
    return checks
