"""The conformance suite of the experts' back-ends: run it where a back-end is to be trusted.

``conformance_problems("triton", device="cuda", dtype=torch.bfloat16)`` returns a sentence for every way in which the
back-end breaks the contract there; an empty list means that it keeps it.
"""

from coterie_experts.conformance.cases import CASES, TOKEN_CASES, Case, TokenCase
from coterie_experts.conformance.checks import case_problems, conformance_problems, refusal, token_case_problems
from coterie_experts.conformance.reference import plain_experts

__all__ = [
    "CASES",
    "TOKEN_CASES",
    "Case",
    "TokenCase",
    "case_problems",
    "conformance_problems",
    "plain_experts",
    "refusal",
    "token_case_problems",
]
