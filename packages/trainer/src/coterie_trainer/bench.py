"""The command `coterie bench`: back-ends side by side on this machine."""

import argparse
import dataclasses
import json
from pathlib import Path

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
    _add_data_parallel(benches)


def _add_data_parallel(benches: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = benches.add_parser(
        "data-parallel",
        help="resident experts against PyTorch's FSDP2, on CPU ranks",
        description=(
            "Runs whole training steps of one model on the same tokens, in turn: with resident experts, spread over\n"
            "all ranks or on each of them, and with FSDP2, which gathers every layer for each micro-batch; its\n"
            "gradients are summed over ranks in each micro-batch, or once in a step.\n\n"
            "tokens/s     of all ranks, at the median time of a step\n"
            "speed        time of fsdp over the time of this way, median over the rounds\n"
            "sent         bytes of one rank in one step, counted at the collectives\n"
            "predicted    the same by a formula\n"
            "peak memory  most bytes of live tensors in a step: weights, gradients, optimizer, activations\n"
            "losses       whether each is that of the first way, to a relative 1e-5"
        ),
        epilog="example:\n  coterie bench data-parallel --ranks 4 --experts 128 --top-k 4 --json out.json",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    for name, default, what in (
        ("ranks", 4, "processes"),
        ("experts", 128, "experts of a layer"),
        ("top-k", 4, "choices of a token"),
        ("width", 128, "numbers of a token"),
        ("hidden", 256, "hidden width of an expert"),
        ("layers", 1, "layers, each with experts"),
        ("tokens", 512, "tokens of a rank in a micro-batch"),
        ("accumulation", 4, "micro-batches of a step"),
        ("repeats", 5, "timed steps of each way"),
    ):
        parser.add_argument(f"--{name}", type=count, default=default, metavar="N", help=f"{what} (default: {default})")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers there too")
    parser.set_defaults(run=_bench_data_parallel)


def _bench_data_parallel(options: argparse.Namespace) -> int:
    with loading():
        import torch
        from coterie_parallel.local_ranks import run_on_local_ranks

        from coterie_trainer.data_parallel_bench import (
            DataParallelSizes,
            compare_data_parallel,
            data_parallel_table,
        )

    sizes = DataParallelSizes(
        num_experts=options.experts,
        top_k=options.top_k,
        width=options.width,
        expert_hidden=options.hidden,
        num_layers=options.layers,
        num_tokens=options.tokens,
        accumulation=options.accumulation,
    )
    if problems := sizes.problems(options.ranks):
        raise ValueError("\n".join(problems))
    print(
        f"{options.ranks} CPU ranks; {sizes.num_layers} layers of {sizes.num_experts} experts of width "
        f"{sizes.expert_hidden}, {sizes.top_k} for each token of width {sizes.width}, fp32; a step is "
        f"{sizes.accumulation} x {sizes.num_tokens} tokens on each rank",
        flush=True,
    )
    rows = run_on_local_ranks(compare_data_parallel, options.ranks, sizes, options.repeats)[0]
    print(data_parallel_table(rows))
    if options.json is not None:
        record = {
            "torch": torch.__version__,
            "ranks": options.ranks,
            "sizes": dataclasses.asdict(sizes),
            "rows": [dataclasses.asdict(row) for row in rows],
        }
        options.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return 0 if all(row.agrees for row in rows) else 1


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
