"""Which rows a compressed collective hands to its compressor, so that kernels can be compiled."""

from __future__ import annotations

from megatron_taco.collectives.all_reduce import choose_algorithm
from megatron_taco.collectives.traffic import slice_elements


def warm_up_shapes(
    collective: str, numel: int, world_size: int, *, algorithm: str, block: int
) -> list[tuple[int, int]]:
    """Returns the (rows, elements of a row) with which the compressor is called.

    Args:
        collective: ``all_reduce``, ``reduce_scatter`` or ``all_gather``.
        numel: Elements of the whole tensor.
        world_size: Number of ranks of the group, P.
        algorithm: ``auto``, ``one_shot`` or ``two_shot``; read for ``all_reduce`` only.
        block: The compressor's block, in elements.

    Raises:
        ValueError: ``collective`` or ``algorithm`` is unknown.
    """
    if world_size == 1 or numel == 0:
        return []
    if collective == "all_reduce":
        if choose_algorithm(world_size, algorithm) == "one_shot":
            return [(1, numel), (world_size, numel)]
        return [(world_size, slice_elements(numel, world_size, block))]
    if collective == "reduce_scatter":
        return [(world_size, numel // world_size)]
    if collective == "all_gather":
        return [(1, numel // world_size), (world_size, numel // world_size)]
    raise ValueError(
        f"collective: got {collective!r}, allowed: all_reduce, reduce_scatter, all_gather"
    )


def encoded_elements(collective: str, numel: int, world_size: int) -> int:
    """Returns how many elements a rank gives to a collective of a tensor of ``numel`` elements."""
    return numel // world_size if collective == "all_gather" else numel
