"""Training throughput in the set-up of the TACO paper: 2 nodes of 8 GPUs, configs/paper.

For each model the plain step, all axes compressed, each axis alone, and uncompressed FP32
tensor-parallel messages take turns in one run; beside each ratio stands its limit
1 / (1 - f + f / k). Published: up to 1.87 times the throughput (the paper's abstract, on 16 H100
with 400 Gb/s InfiniBand; against which communication it does not say).

Start taco_throughput.sh on every node, with torchrun's arguments; the first node has the results:

    scripts/reproduce/taco_throughput.sh --node-rank 0 --master-addr HOST0     # on HOST0
    scripts/reproduce/taco_throughput.sh --node-rank 1 --master-addr HOST0     # on the other
    scripts/reproduce/taco_throughput.sh --nnodes 1 --small                    # on one, CPUs
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import replace

from several_parts import ARMS, CUT, NO_MULTICAST, RESULTS, ROOT, SHORT

from megatron_taco.cli.lab_arguments import count
from megatron_taco.lab.link import LINK_VARIABLE, RankLink
from megatron_taco.lab.part import Part
from megatron_taco.lab.part_order import Nodes
from megatron_taco.lab.results import main

PUBLISHED = "published: up to 1.87 (end to end, 3D, 2 × 8 H100, 400 Gb/s InfiniBand)"
HEADING = """\
# Throughput in the paper's set-up

Limit: 1 / (1 − f + f / k), with f the exposed share of all communication and k raw / wire bytes; no
step without overlap can gain more. The arm fp32 sends the tensor-parallel messages uncompressed in
FP32, the other baseline in use; gradients are reduced in FP32 in all arms, Megatron's default.
Published: up to 1.87 times the throughput (arXiv 2604.24088, abstract)."""
CONFIGS = ROOT / "configs" / "paper"
MODELS = {
    # Title, vocabulary of the mock data, overrides. The batch of 2M tokens of the 6.7B model would
    # take half a minute a step.
    "gpt-350m": ("GPT-350M", 50257, ()),
    "gpt-6.7b": ("GPT-6.7B", 50257, ("megatron.global_batch_size=128",)),
    "qwen2.5-7b": ("Qwen2.5-7B", 151643, ()),
}
SMALL_LAYOUT = (
    "megatron.tensor_model_parallel_size=2",
    "megatron.pipeline_model_parallel_size=2",
    *("model.num_layers=4", "megatron.micro_batch_size=1", "megatron.global_batch_size=8"),
    *CUT,
)
SMALL_OWN = {"qwen2.5-7b": ("model.ffn_hidden_size=256",)}


def parts(args: argparse.Namespace) -> list[Part]:
    """The parts of all models, each in the paper's form and in the small one."""
    replicas = args.nnodes * args.nproc_per_node // 4
    found = []
    for name, (words, vocabulary, more) in MODELS.items():
        step = ("-m", "megatron_taco.cli", "bench", "step", "--axis", "all")
        arms = ("--formats", "e4m3,fp32", *ARMS["all"][4:])
        config = ("--config", str(CONFIGS / f"{name}.yaml"))
        data = f"data={{source: mock, tokenizer: {{null: {vocabulary}}}}}"
        small = "data={source: mock, tokenizer: {null: 250}}"
        cut = (*SMALL_LAYOUT, *SMALL_OWN.get(name, ()))
        found.append(
            Part(
                name=name,
                title=words,
                command=(*torchrun(args), *step, *arms, *config, data, *more, "--cycles", "3"),
                environment={**NO_MULTICAST, "CUDA_DEVICE_MAX_CONNECTIONS": "1"},
                aim=PUBLISHED,
                gpus=args.nproc_per_node,
                small=(*torchrun(args), *step, *arms, *config, small, *cut, *SHORT),
                small_title=f"{words}, cut, TP 2 × PP 2 × DP {replicas}",
            )
        )
    return found


def torchrun(args: argparse.Namespace) -> tuple[str, ...]:
    """Torchrun's own arguments."""
    return (
        *("-m", "torch.distributed.run", "--nnodes", str(args.nnodes)),
        *("--node-rank", str(args.node_rank), "--nproc-per-node", str(args.nproc_per_node)),
        *("--master-addr", args.master_addr, "--master-port", str(args.master_port)),
    )


def parse(argv: Sequence[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
    """Torchrun's arguments, and the rest, which are those of all lists of parts."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    env = os.environ
    nodes = parser.add_argument_group("machines, as torchrun takes them")
    nodes.add_argument("--nnodes", type=count, default=int(env.get("NNODES", "2")))
    rank = env.get("NODE_RANK", env.get("SLURM_NODEID"))
    nodes.add_argument("--node-rank", type=int, default=None if rank is None else int(rank))
    nodes.add_argument("--nproc-per-node", type=count, default=8)
    nodes.add_argument("--master-addr", default=env.get("MASTER_ADDR", ""))
    nodes.add_argument(
        "--master-port",
        type=count,
        default=int(env.get("MASTER_PORT", "29500")),
        help="of the first machine; the next one is taken too",
    )
    args, rest = parser.parse_known_args(argv)
    if {"-h", "--help"} & set(rest):
        parser.print_help()
        print()
        return argparse.Namespace(**{**vars(args), "nnodes": 1, "node_rank": 0}), rest
    if args.nnodes == 1:
        args.node_rank, args.master_addr = 0, args.master_addr or "127.0.0.1"
    if args.node_rank is None or not 0 <= args.node_rank < args.nnodes:
        parser.error(
            f"--node-rank (or NODE_RANK): the number of this machine is needed, 0 to "
            f"{args.nnodes - 1}, found {args.node_rank}"
        )
    if not args.master_addr:
        parser.error("--master-addr (or MASTER_ADDR): the address of machine 0 is needed")
    return args, rest


def meet(args: argparse.Namespace) -> Nodes | None:
    """The machines, if there are several."""
    if args.nnodes == 1:
        return None
    return Nodes(
        count=args.nnodes,
        rank=args.node_rank,
        address=args.master_addr,
        port=args.master_port + 1,
    )


def tell_link(args: argparse.Namespace) -> None:
    """In a lab: tells the ranks how many of them share a host's link, which the lab cannot know."""
    link = RankLink.from_environment()
    if link is not None:
        os.environ[LINK_VARIABLE] = replace(link, ranks_per_host=args.nproc_per_node).dump()


def run(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    args, rest = parse(argv)
    tell_link(args)
    page = RESULTS / "taco-throughput.md"
    return main(parts(args), page, __doc__, rest, heading=HEADING, meet=lambda: meet(args))


if __name__ == "__main__":
    sys.exit(run())
