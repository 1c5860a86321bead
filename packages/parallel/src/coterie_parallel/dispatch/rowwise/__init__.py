"""The row-wise back-end: rows go straight from their source to their final place in a peer's buffer."""

__all__: list[str] = []
