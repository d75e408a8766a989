"""``megatron-taco prepare-data``: text, JSON lines and source trees to Megatron's format."""

import argparse
import io
import sys
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``prepare-data`` to its parser."""
    parser.add_argument(
        "inputs",
        nargs="+",
        type=Path,
        metavar="INPUT",
        help="text file (one document), .jsonl or .jsonl.gz (one document a line), or folder",
    )
    parser.add_argument(
        "--output",
        required=True,
        type=Path,
        metavar="PREFIX",
        help="writes PREFIX_text_document.bin and .idx (folders are made)",
    )
    parser.add_argument(
        "--tokenizer",
        default="bytes",
        metavar="bytes|hf:PATH",
        help="bytes (257 ids, the default) or a Hugging Face tokenizer in a local folder",
    )
    parser.add_argument(
        "--jsonl-key",
        default="text",
        metavar="KEY",
        help="field of a JSON line that holds the text; part of the output name (default: text)",
    )
    parser.add_argument(
        "--append-eod",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="end every document with the end-of-document id (default: yes)",
    )
    parser.add_argument(
        "--workers",
        type=_workers,
        default=1,
        metavar="N",
        help="processes that encode; of use with hf: tokenizers (default: 1)",
    )
    parser.add_argument(
        "--valid-fraction",
        type=_fraction,
        default=0.0,
        metavar="F",
        help="hold out about this share of the documents, by a hash of their text, and write "
        "PREFIX_train_text_document and PREFIX_valid_text_document (default: 0, no split)",
    )
    parser.add_argument(
        "--include",
        action="append",
        metavar="GLOB",
        help="files to take from folders, e.g. '*.py'; repeatable (default: text-like suffixes)",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace existing output")


def run(args: argparse.Namespace) -> int:
    """Runs the command.

    Args:
        args: What the parser of :func:`add_arguments` gives.

    Returns:
        Exit code: 0; 2 after printing one message for input or output that cannot be used; 130
        after Ctrl-C.
    """
    from megatron_taco.data import DataError

    try:
        _prepare(args)
    except DataError as error:
        print(f"megatron-taco prepare-data: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("megatron-taco prepare-data: interrupted", file=sys.stderr)
        return 130
    return 0


def _prepare(args: argparse.Namespace) -> None:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    from megatron_taco.data import load_tokenizer
    from megatron_taco.data.prepare import prepare
    from megatron_taco.data.readers import find_files
    from megatron_taco.training.quiet import quiet

    files = find_files(args.inputs, args.include)
    tokenizer = load_tokenizer(args.tokenizer)
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with (
        quiet(io.StringIO()),  # Megatron's import warns of what only training needs
        Progress(*columns, console=console, disable=not console.is_terminal) as bar,
    ):
        task = bar.add_task("", total=sum(file.stat().st_size for file in files))
        report = prepare(
            files,
            args.output,
            tokenizer,
            key=args.jsonl_key,
            append_eod=args.append_eod,
            workers=args.workers,
            valid_fraction=args.valid_fraction,
            overwrite=args.overwrite,
            progress=lambda consumed: bar.advance(task, consumed),
        )

    for prefix, documents, tokens in zip(
        report.prefixes, report.documents, report.tokens, strict=True
    ):
        print(f"{prefix}: {documents:,} documents, {tokens:,} tokens")
    if report.empty_documents:
        print(f"{report.empty_documents:,} of the documents are empty and hold no token")
    seconds = max(report.seconds, 1e-3)
    print(
        f"{report.text_bytes:,} bytes of text in {seconds:.2f} s: "
        f"{report.text_bytes / seconds:,.0f} bytes/s, {sum(report.tokens) / seconds:,.0f} tokens/s"
    )
    named = f"{{hf: {args.tokenizer[3:]}}}" if args.tokenizer.startswith("hf:") else args.tokenizer
    keys = ["path"] if len(report.prefixes) == 1 else ["train_path", "valid_path"]
    paths = ", ".join(f"{k}: {p}" for k, p in zip(keys, report.prefixes, strict=True))
    print(f"In a configuration:  data: {{{paths}, tokenizer: {named}}}")
    arguments = tokenizer.megatron_arguments()
    print(
        "On Megatron's command line: ",
        *(f"--{name.replace('_', '-')} {value}" for name, value in arguments.items()),
    )


def _workers(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"at least 1 is needed, found {value}")
    return value


def _fraction(text: str) -> float:
    value = float(text)
    if not 0.0 <= value < 1.0:
        raise argparse.ArgumentTypeError(f"0 <= F < 1 is needed, found {text}")
    return value
