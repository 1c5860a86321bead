"""Layout invariance: the same small model in many layouts, and every number compared with one process.

`layout` says what a layout is, `scaling` makes a user's config small, `running` runs some steps of one layout and
gathers all that they computed, `comparison` finds the first tensor that differs, and `command` is `coterie verify`.
"""

__all__: list[str] = []
