"""The sizes of the measurements on a GPU, and their tensors; run by the `gpu_*.py` beside this, as scripts."""

import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "packages" / "experts" / "src")]

import torch  # noqa: E402
from coterie_experts import ExpertsConfig, GroupedExperts  # noqa: E402
from torch import Tensor  # noqa: E402

__all__ = ["DEVICE", "ROOT", "SIZES", "Size", "build", "make", "random_ids"]

DEVICE = torch.device("cuda")


@dataclass(frozen=True)
class Size:
    """Tokens, model width, hidden width, experts, choices."""

    name: str
    T: int
    D: int
    H: int
    E: int
    K: int

    @property
    def flops(self) -> float:
        """Of the forward pass; three times that forward and backward."""
        return 6.0 * self.T * self.K * self.D * self.H


SIZES = {
    size.name: size
    for size in (
        Size("olmoe", 32768, 2048, 1024, 64, 8),
        Size("qwen3-30b", 32768, 2048, 768, 128, 8),
        Size("sweep-e8", 32768, 2048, 2048, 8, 4),
        Size("sweep-e32", 32768, 2048, 2048, 32, 4),
        Size("sweep-e128", 32768, 2048, 2048, 128, 4),
        Size("mixtral", 16384, 4096, 14336, 8, 2),
        Size("dsv3-local32", 8192, 7168, 2048, 32, 8),
        Size("sonic-30b", 32768, 4096, 1024, 128, 8),
        Size("fine", 32768, 4096, 256, 256, 16),
        Size("small-t", 8192, 2048, 768, 128, 8),
    )
}


def random_ids(size: Size, kind: str = "balanced", seed: int = 0) -> Tensor:
    """Return ids as a router gives them; "zipf": expert e has weight 1/(e+1); "one": one has 25 % of the rows.

    "even" gives each expert as many rows as the next.
    """
    if kind == "even":
        slots_TK = torch.arange(size.T * size.K, device=DEVICE).view(size.T, size.K)
        return slots_TK % size.E
    generator = torch.Generator(DEVICE).manual_seed(seed)
    noise_TE = torch.rand(size.T, size.E, generator=generator, device=DEVICE)
    if kind == "zipf":
        load_E = 1.0 / torch.arange(1, size.E + 1, device=DEVICE)
        noise_TE = noise_TE.log().neg().log().neg() + load_E.log()
    if kind == "one":
        share = min(1.0, 0.25 * size.K)
        noise_TE[torch.rand(size.T, generator=generator, device=DEVICE) < share, 0] = 2.0
    return noise_TE.topk(size.K).indices


def make(size: Size, kind: str = "balanced") -> list[Tensor]:
    """Return x, ids, weights, gate_up, down and the gradient of y."""
    generator = torch.Generator(DEVICE).manual_seed(1)

    def normal(*shape: int, std: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=generator, device=DEVICE) * std).bfloat16()

    return [
        normal(size.T, size.D),
        random_ids(size, kind),
        torch.rand(size.T, size.K, generator=generator, device=DEVICE) + 0.1,
        normal(size.E, 2 * size.H, size.D, std=size.D**-0.5),
        normal(size.E, size.D, size.H, std=size.H**-0.5),
        normal(size.T, size.D),
    ]


def build(size: Size, backend: str, gate_up: Tensor, down: Tensor) -> GroupedExperts:
    """Return a layer that holds these weights."""
    config = ExpertsConfig(d_model=size.D, d_hidden=size.H, num_experts=size.E, backend=backend)
    experts = GroupedExperts(config, device="meta", dtype=gate_up.dtype)
    experts.gate_up = torch.nn.Parameter(gate_up)
    experts.down = torch.nn.Parameter(down)
    return experts
