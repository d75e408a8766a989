"""Which rank runs where: its namespace, its GPU, and what it has to be told.

A rank finds the variables that torchrun sets. Those of NCCL and gloo send all traffic over the
link: NCCL believes two ranks to be on one host unless ``NCCL_HOSTID`` differs, and takes two ranks
on one GPU only if it does.
"""

from __future__ import annotations

import os
import re
import socket
from typing import Final

from megatron_taco.lab import namespaces
from megatron_taco.lab.launch import Place
from megatron_taco.lab.link import LINK_VARIABLE, Lab, LabError, RankLink

GPU_MODES: Final = ("own", "share", "none")
"""A GPU for each rank where there are GPUs; all ranks on the first; no GPU for anyone."""


def free_port() -> int:
    """Returns a TCP port of this network namespace that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("0.0.0.0", 0))
        return int(probe.getsockname()[1])


def visible_gpus() -> list[str]:
    """Returns the GPUs that a process started here may use, as CUDA names them."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return [part.strip() for part in chosen.split(",") if part.strip() not in ("", "-1")]
    files = sorted(name for name in os.listdir("/dev") if re.fullmatch(r"nvidia\d+", name))
    return [str(index) for index in range(len(files))]


def loopback_places(ranks: int, *, gpus: str = "share") -> list[Place]:
    """Places for ranks that talk over the loopback interface, at the speed it has; no root needed.

    Args:
        ranks: How many.
        gpus: One of ``GPU_MODES``.

    Raises:
        LabError: There are fewer GPUs than ranks, and each is to have its own.
    """
    network = _network("127.0.0.1", free_port(), "lo")
    return [
        Place(environment={**network, **_position(rank, ranks, 0, ranks, gpus)})
        for rank in range(ranks)
    ]


def lab_places(lab: Lab, ranks_per_host: int, *, gpus: str = "own") -> list[Place]:
    """Places for ranks on the hosts of a lab, as many on each; rank 0 is on the first host.

    Args:
        lab: The lab, which is up.
        ranks_per_host: Ranks on every host.
        gpus: One of ``GPU_MODES``. Hosts take their GPUs one host after the other.

    Raises:
        LabError: There are fewer GPUs than ranks, and each is to have its own.
    """
    port = namespaces.inside(lab.namespaces[0], free_port)
    network = _network(lab.address(0), port, lab.interface)
    network[LINK_VARIABLE] = RankLink(
        link=lab.link,
        hosts=lab.hosts,
        ranks_per_host=ranks_per_host,
        shared_gpu=gpus == "share",
    ).dump()
    ranks = lab.hosts * ranks_per_host
    return [
        Place(
            netns=lab.namespaces[rank // ranks_per_host],
            environment={
                **network,
                **_position(rank, ranks, rank // ranks_per_host, ranks_per_host, gpus),
            },
        )
        for rank in range(ranks)
    ]


def _network(master: str, port: int, interface: str) -> dict[str, str]:
    return {
        "MASTER_ADDR": master,
        "MASTER_PORT": str(port),
        "NCCL_SOCKET_IFNAME": interface,
        "GLOO_SOCKET_IFNAME": interface,
        "NCCL_IB_DISABLE": "1",
        # One socket does not fill a fast link.
        "NCCL_SOCKET_NTHREADS": "4",
        "NCCL_NSOCKS_PERTHREAD": "4",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }


def _position(rank: int, ranks: int, host: int, per_host: int, gpus: str) -> dict[str, str]:
    local = rank - host * per_host
    found = visible_gpus() if gpus != "none" else []
    position = {
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_RANK": str(local),
        "LOCAL_WORLD_SIZE": str(per_host),
        "NCCL_HOSTID": f"megatron-taco-host{host}",
    }
    if gpus == "none":
        position["CUDA_VISIBLE_DEVICES"] = ""
    elif gpus == "share":
        position |= {
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "NCCL_HOSTID": f"megatron-taco-rank{rank}",
        }
    elif found:
        if len(found) < ranks:
            raise LabError(
                f"{ranks} ranks and {len(found)} GPU(s): --share-gpu puts all ranks on the first "
                "GPU, --cpu uses none"
            )
        mine = found[host * per_host : (host + 1) * per_host]
        position["CUDA_VISIBLE_DEVICES"] = ",".join(mine)
    return position
