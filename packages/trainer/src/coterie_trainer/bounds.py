"""The simplest rules for numbers in a config, in the words of every report."""

__all__ = ["above_zero", "at_least", "nearest"]


def at_least(config: object, minimum: int, *names: str) -> list[str]:
    """Return a sentence for each attribute that is below ``minimum``."""
    values = ((name, getattr(config, name)) for name in names)
    return [f"{name} ({value}) must be at least {minimum}" for name, value in values if value < minimum]


def above_zero(config: object, *names: str) -> list[str]:
    """Return a sentence for each attribute that is not above zero."""
    values = ((name, getattr(config, name)) for name in names)
    return [f"{name} ({value}) must be above 0" for name, value in values if not value > 0]


def nearest(value: int, step: int) -> str:
    """Return the multiples of ``step`` on both sides of ``value``, as "56 or 64"."""
    below = value // step * step
    return f"{below} or {below + step}" if below >= step else str(step)
