"""The command `coterie bench`: back-ends side by side on this machine."""

import argparse

from coterie_trainer.arguments import count, loading, names

__all__ = ["add_bench"]


def add_bench(parser: argparse.ArgumentParser) -> None:
    """Add what can be compared to the parser of `coterie bench`."""
    benches = parser.add_subparsers(title="what to compare", metavar="WHAT", required=True)
    dispatch = benches.add_parser(
        "dispatch",
        help="dispatchers on equal tokens, on CPU ranks",
        description=(
            "Runs dispatch and combine, forward and backward, with each dispatcher in turn, on the same tokens.\n\n"
            "time        median of the slowest rank\n"
            "to others   bytes of rows and weights that must go to other ranks, whatever the dispatcher\n"
            "written     bytes that torch operations wrote\n"
            "passes      written, in units of the rows that arrive\n"
            "host reads  times that the host read a tensor: a synchronisation on a GPU, where rowwise has none\n"
            "agreement   of outputs and all gradients with the first dispatcher"
        ),
        epilog="example:\n  coterie bench dispatch --dispatchers all_to_all,rowwise --ranks 4 --routing random,skewed",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    dispatch.add_argument(
        "--dispatchers", type=names, default=["all_to_all", "rowwise"], metavar="NAME,...", help="what to compare"
    )
    dispatch.add_argument("--ranks", type=count, default=2, metavar="N", help="processes (default: 2)")
    dispatch.add_argument(
        "--routing",
        type=names,
        default=["balanced", "random", "skewed"],
        metavar="NAME,...",
        help="balanced, random, skewed (default: all three)",
    )
    for name, default, what in (
        ("tokens", 1024, "tokens of a rank"),
        ("width", 256, "numbers of a token"),
        ("experts", 16, "experts in all"),
        ("top-k", 4, "choices of a token"),
        ("repeats", 10, "timed calls of each dispatcher"),
    ):
        dispatch.add_argument(
            f"--{name}", type=count, default=default, metavar="N", help=f"{what} (default: {default})"
        )
    dispatch.add_argument(
        "--shared",
        type=count,
        default=0,
        metavar="H",
        help="also run a shared expert of this hidden width, after the others and overlapped with the exchange",
    )
    dispatch.set_defaults(run=_bench_dispatch)


def _bench_dispatch(options: argparse.Namespace) -> int:
    with loading():
        from coterie_parallel.comparison import (
            DispatchSizes,
            compare_dispatchers,
            comparison_problems,
            comparison_table,
        )
        from coterie_parallel.local_ranks import run_on_local_ranks

    sizes = DispatchSizes(
        num_tokens=options.tokens,
        width=options.width,
        num_experts=options.experts,
        top_k=options.top_k,
        shared_hidden=options.shared,
    )
    problems = comparison_problems(options.dispatchers, options.routing, sizes, options.ranks)
    if problems:
        raise ValueError("\n".join(problems))
    print(
        f"{options.ranks} CPU ranks; {sizes.num_tokens} tokens of width {sizes.width} (fp32) on each, "
        f"{sizes.num_experts} experts, {sizes.top_k} choices; dispatch and combine, forward and backward",
        flush=True,
    )
    by_rank = run_on_local_ranks(
        compare_dispatchers, options.ranks, options.dispatchers, options.routing, sizes, options.repeats
    )
    print(comparison_table(by_rank[0]))
    return 0 if all(row.agrees for row in by_rank[0]) else 1
