"""Pipeline parallelism: stages of consecutive layers on the ranks of one axis."""
