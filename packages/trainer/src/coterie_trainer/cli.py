"""The command line: `coterie train`, `check`, `verify`, `tokenize`, `export`, `generate` and `bench`."""

import argparse
import importlib.metadata
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from coterie_trainer.arguments import count, loading
from coterie_trainer.bench import add_bench
from coterie_trainer.launch import (
    INTERRUPTED,
    USER_ERROR,
    Process,
    StopRequest,
    detect,
    exit_with_parent,
    launch_local,
    record_failure,
)
from coterie_trainer.verify.command import DETAILS, add_verify

if TYPE_CHECKING:  # each command imports what it needs, so that `coterie --help` answers at once
    from coterie_trainer.config import Config

__all__ = ["main", "make_parser"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0, 1 (a comparison failed), 2 (fault of the input), 130 (interrupt).

    Args:
        arguments: Command line without the program's name; None takes the process's own.
    """
    options = argparse.Namespace()
    try:
        make_parser().parse_args(arguments, options)
        code: int = options.run(options)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of our output, such as `head`, has gone; Python's own last flush must not fail as well.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        return _fail(error, options)


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line; ``run`` of a parsed command is the function that does it."""
    parser = argparse.ArgumentParser(
        prog="coterie",
        description="Train mixture-of-experts language models, from a laptop to a cluster.",
        epilog="example: coterie train configs/demo.toml\nhelp on one command: coterie train --help",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--version", action="version", version=f"coterie {importlib.metadata.version('coterie-trainer')}"
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def command(name: str, summary: str, details: str, example: str, usage: str = "") -> argparse.ArgumentParser:
        return commands.add_parser(
            name,
            usage=f"coterie {name} {usage}" if usage else None,
            help=summary,
            description=f"{summary[0].upper()}{summary[1:]}.\n\n{details}",
            epilog=f"example:\n  {example}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    train = command(
        "train",
        "train a model, or go on with a run that was stopped",
        "Everything the run leaves behind is in the run_folder of the config: checkpoints, progress as\n"
        "metrics.jsonl, and the config. Ctrl-C finishes the step and saves; the same command goes on.\n"
        "Under torchrun the processes are torchrun's, and --procs is not used.",
        "coterie train configs/demo.toml --set train.steps=100 run_folder=runs/short",
        usage="CONFIG [--set TABLE.KEY=VALUE ...] [--procs N]",
    )
    _add_config(train)
    train.add_argument(
        "--procs",
        type=count,
        metavar="N",
        help="processes to start on this machine (default: pipeline x data where the config gives both, else 1)",
    )
    train.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    train.add_argument("--world", type=int, help=argparse.SUPPRESS)
    train.add_argument("--store", type=Path, help=argparse.SUPPRESS)
    train.set_defaults(run=_train)

    check = command(
        "check",
        "check a config and show its plan, without training",
        "Shows how the ranks are arranged, the number of parameters, and the memory a rank needs for\n"
        "them; or lists everything that is wrong with the config.",
        "coterie check configs/demo.toml --world 8 --set model.num_experts=64",
        usage="CONFIG [--set TABLE.KEY=VALUE ...] [--world N]",
    )
    _add_config(check)
    check.add_argument(
        "--world",
        type=count,
        metavar="N",
        help="number of ranks to plan for (default: the smallest that the config allows)",
    )
    check.set_defaults(run=_check)

    verify = command(
        "verify",
        "compare layouts of a config, scaled down, with one process",
        DETAILS,
        'coterie verify configs/demo.toml --layouts "data=4 expert=2 dispatcher=rowwise" "data=2 recompute=block"',
        usage="CONFIG [--set TABLE.KEY=VALUE ...] [--layouts LAYOUT ...]",
    )
    _add_config(verify)
    add_verify(verify)

    tokenize = command(
        "tokenize",
        "turn text files into token files to train on",
        "Reads .txt, .jsonl, .jsonl.gz and .parquet. Without --tokenizer one is trained on the text.\n"
        "Put the folder into the config as data.path.",
        "coterie tokenize books/*.txt --out tokens/books --vocab-size 8192",
    )
    tokenize.add_argument("inputs", nargs="+", metavar="INPUT", help="text files, folders or patterns")
    tokenize.add_argument("--out", required=True, metavar="FOLDER", help="folder for the token files")
    tokenize.add_argument("--tokenizer", metavar="FILE", help="tokenizer.json to use (default: train one)")
    tokenize.add_argument(
        "--vocab-size", type=count, default=32768, metavar="N", help="size of a trained tokenizer (default: 32768)"
    )
    tokenize.add_argument(
        "--held-out",
        type=float,
        default=0.05,
        metavar="F",
        help="share of the documents that is kept for evaluation (default: 0.05)",
    )
    tokenize.add_argument(
        "--field", default="text", metavar="NAME", help="JSON field or Parquet column of the text (default: text)"
    )
    tokenize.set_defaults(run=_tokenize)

    export = command(
        "export",
        "write the model of a run as a Hugging Face folder",
        "The folder loads with transformers' AutoModelForCausalLM and AutoTokenizer. `coterie check` lists\n"
        "the families that can hold a model.",
        "coterie export runs/demo exported/demo --family qwen3_moe --check",
    )
    export.add_argument("run_folder", metavar="RUN", help="run folder")
    export.add_argument("out", metavar="OUT", help="folder to write; new or empty")
    export.add_argument("--family", required=True, metavar="NAME", help="architecture to write, such as qwen3_moe")
    export.add_argument("--step", type=int, metavar="N", help="step of the checkpoint (default: the newest)")
    export.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), help="number format of the files (default: the run's)"
    )
    export.add_argument(
        "--check", action="store_true", help="load the folder with transformers and compare its logits with ours"
    )
    export.set_defaults(run=_export)

    generate = command(
        "generate",
        "continue a text with a trained model",
        "Reads a run folder (its newest checkpoint) or an exported folder.",
        'coterie generate runs/demo --prompt "def main(" --temperature 0.8',
    )
    generate.add_argument("path", metavar="PATH", help="run folder or exported folder")
    generate.add_argument("--prompt", required=True, metavar="TEXT", help="text to continue")
    generate.add_argument(
        "--max-new-tokens", type=count, default=128, metavar="N", help="most tokens to add (default: 128)"
    )
    generate.add_argument(
        "--temperature",
        type=float,
        default=0.0,
        metavar="T",
        help="0 takes the likeliest token each time, 1 samples as the model says (default: 0)",
    )
    generate.add_argument("--seed", type=int, default=0, metavar="S", help="seed of the sampling (default: 0)")
    generate.set_defaults(run=_generate)

    add_bench(
        command(
            "bench",
            "compare back-ends on this machine",
            "Each kind of comparison has a help of its own: coterie bench WHAT --help",
            "coterie bench dispatch --ranks 4",
        )
    )
    return parser


def _add_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="CONFIG", help="TOML file; configs/demo.toml explains every key")
    parser.add_argument(
        "--set",
        action="extend",
        nargs="+",
        default=[],
        metavar="TABLE.KEY=VALUE",
        help="change values of the config; may be given many times",
    )


def _train(options: argparse.Namespace) -> int:
    with loading():
        from coterie_trainer.config import ConfigError, config_problems, load_config, smallest_world

    if options.store is not None:
        process = Process(rank=options.rank, world=options.world, local_rank=options.rank, store=options.store)
        exit_with_parent()
    else:
        process = detect()
    options.process = process
    is_launched = process.store is not None or process.port is not None
    if process.port is not None and options.procs is not None:
        raise ValueError("--procs starts processes, but torchrun has started them already; leave --procs out")
    config = load_config(options.config, options.set, process.world if is_launched else options.procs)
    procs = 1
    if not is_launched:
        procs = options.procs or (smallest_world(config) if config.parallel.data >= 1 else 1)
        if problems := config_problems(config, procs):
            raise ConfigError(problems, options.config)
    if process.store is None and process.local_rank == 0:
        _prepare_data(config)
    if procs > 1:
        arguments = ["train", options.config, *(f"--set={text}" for text in options.set)]
        return launch_local(arguments, procs, grace_s=config.checkpoint.grace_s)
    with loading():
        from coterie_trainer.training import train

    with StopRequest() as stop:
        train(config, process, stop)
    return INTERRUPTED if stop.requested else 0


def _prepare_data(config: "Config") -> None:
    """Make the built-in corpus if the config asks for it; the other ranks wait for this one when they meet."""
    if config.data.source == "stdlib":
        with loading():
            from coterie_trainer.data.tokenize import prepare_stdlib

        prepare_stdlib(config.data.path, config.data.vocab_size, _show)


def _check(options: argparse.Namespace) -> int:
    with loading():
        from coterie_trainer.check import report
        from coterie_trainer.config import load_config, smallest_world

    config = load_config(options.config, options.set, options.world)
    print(report(config, options.world or smallest_world(config)))
    return 0


def _tokenize(options: argparse.Namespace) -> int:
    with loading():
        from coterie_trainer.data.tokenize import tokenize_files

    summary = tokenize_files(
        options.inputs,
        options.out,
        tokenizer=options.tokenizer,
        vocab_size=options.vocab_size,
        held_out_fraction=options.held_out,
        text_field=options.field,
        progress=_show,
    )
    for split, documents in summary.documents.items():
        print(f"{split}: {documents:,} documents, {summary.tokens[split]:,} tokens")
    print(f"in the config: data.path = {str(summary.output)!r}")
    return 0


def _export(options: argparse.Namespace) -> int:
    with loading():
        import torch

        from coterie_trainer.exporting import check_export, export_run

    if options.check and options.dtype is not None:
        raise ValueError("--check compares the numbers of the run itself, and --dtype rounds them; give one of the two")
    dtype = None if options.dtype is None else getattr(torch, options.dtype)
    export_run(options.run_folder, options.out, family=options.family, step=options.step, dtype=dtype)
    print(f"wrote {options.out}")
    if options.check:
        difference = check_export(options.run_folder, options.out, step=options.step)
        print(f"transformers gives the same logits: largest relative difference {difference:.1e}")
    return 0


def _generate(options: argparse.Namespace) -> int:
    with loading():
        from coterie_trainer.generation import generate

    print(
        generate(
            options.path,
            options.prompt,
            max_new_tokens=options.max_new_tokens,
            temperature=options.temperature,
            seed=options.seed,
        )
    )
    return 0


def _show(text: str) -> None:
    print(text, flush=True)


def _fail(error: Exception, options: argparse.Namespace) -> int:
    """Report what a command could not do: one message for a fault of the input, a traceback for a fault of ours."""
    process: Process = getattr(options, "process", Process())
    is_user_error = _is_user_error(error)
    if process.store is not None:
        text = _message(error) if is_user_error else "".join(traceback.format_exception(error)).rstrip()
        record_failure(process, text, is_user_error=is_user_error)
        return USER_ERROR if is_user_error else 1
    if not is_user_error:
        raise error
    if process.rank == 0:
        print(_message(error), file=sys.stderr)
    elif not hasattr(error, "problems"):  # the problems of a config are the same on every rank
        print(f"[rank {process.rank}] {_message(error)}", file=sys.stderr)
    return USER_ERROR


def _is_user_error(error: Exception) -> bool:
    if isinstance(error, RuntimeError):
        from coterie_trainer.checkpoint import CheckpointError
        from coterie_trainer.exporting import ExportMismatchError

        return isinstance(error, CheckpointError | ExportMismatchError)
    return isinstance(error, ValueError | OSError | ImportError)


def _message(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename is not None and error.strerror is not None:
        return f"coterie: error: {error.strerror}: {error.filename}"
    return f"coterie: error: {error}"
