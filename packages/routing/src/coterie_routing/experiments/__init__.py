"""Experiments that anyone can repeat on a CPU; run one with `python -m coterie_routing.experiments.<name>`."""

__all__: list[str] = []
