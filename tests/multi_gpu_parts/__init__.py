"""The parts of `tests/multi_gpu.py`: each has a function `run(bench)` that all ranks call together."""

__all__: list[str] = []
