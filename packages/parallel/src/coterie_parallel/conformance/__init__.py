"""The conformance suite of dispatchers: run it on a back-end of your own.

On every rank of an expert axis call ``conformance_problems("my_backend", axis)``. An empty list on every rank means
that the back-end keeps the contract bit for bit, or where `Dispatcher.guarantees` declares less, what it declares;
`claims` says that in words. Or run ``python -m coterie_parallel.conformance module:Class``.
"""

from coterie_parallel.conformance.cases import CASES, Case, Tokens, make_tokens
from coterie_parallel.conformance.checks import case_problems, conformance_problems
from coterie_parallel.conformance.fitting import claims
from coterie_parallel.conformance.reference import Layout, reference_combine, reference_layout, reference_rows

__all__ = [
    "CASES",
    "Case",
    "Layout",
    "Tokens",
    "case_problems",
    "claims",
    "conformance_problems",
    "make_tokens",
    "reference_combine",
    "reference_layout",
    "reference_rows",
]
