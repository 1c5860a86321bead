"""What can be chosen about DeepEP; apart from its dispatcher, so that a config need not import that."""

from dataclasses import dataclass
from typing import Literal

__all__ = ["SURFACES", "DeepEPOptions", "Payload", "Surface"]

Surface = Literal["auto", "EPBuffer", "ElasticBuffer", "Buffer"]
Payload = Literal["bf16", "fp8"]

SURFACES = ("EPBuffer", "ElasticBuffer", "Buffer")
"""The classes of DeepEP that this package can drive, the newest first: V2.5, V2.0 and V2.1, V1."""


@dataclass(frozen=True, kw_only=True)
class DeepEPOptions:
    """Options of the dispatcher "deep_ep" beside those that every dispatcher has.

    Attributes:
        surface: the class of DeepEP to use; "auto" takes the newest that is installed.
        max_tokens: most tokens of any rank in any batch, for which the buffers are sized once; None takes the largest
            batch of the axis at the first dispatch.
        payload: "fp8" sends the tokens of the forward dispatch as float8_e4m3fn with one fp32 scale for each 128
            columns of a token, at half the bytes; they arrive rounded to 3 bits behind the point. Gradients and
            combine stay bf16.
        deterministic: ask DeepEP for a fixed order of rows; it sorts them, and reads the host for it.
        hybrid: over several nodes, combine RDMA between them with NVLink inside them (``allow_hybrid_mode``).
        num_sms: streaming multiprocessors for communication, even; 0 leaves the choice to DeepEP.
    """

    surface: Surface = "auto"
    max_tokens: int | None = None
    payload: Payload = "bf16"
    deterministic: bool = False
    hybrid: bool = True
    num_sms: int = 0

    def problems(self) -> list[str]:
        """Return every fault of these options."""
        found = []
        if self.surface not in ("auto", *SURFACES):
            found.append(f"surface ({self.surface!r}) must be one of {', '.join(('auto', *SURFACES))}")
        if self.max_tokens is not None and self.max_tokens < 1:
            found.append(
                f"max_tokens ({self.max_tokens}) must be at least 1; leave it out for the first batch's largest"
            )
        if self.payload not in ("bf16", "fp8"):
            found.append(f"payload ({self.payload!r}) must be 'bf16' or 'fp8'")
        if self.num_sms < 0 or self.num_sms % 2:
            nearest = max(0, self.num_sms // 2 * 2)
            found.append(f"num_sms ({self.num_sms}) must be even and at least 0; nearest: {nearest} or {nearest + 2}")
        return found
