"""The memory of gradient methods in Megatron's distributed checkpoints, and out of them again.

Saving: while Megatron makes the state of a checkpoint, every rank adds its methods' tensors to it,
each a sharded tensor: residuals have the data-parallel rank as first dimension, what all ranks
share is there once. A manifest for each tensor- and pipeline-parallel rank says what there is, and
an attribute of Megatron's arguments which method it was, over how many ranks. A checkpoint with
memory loads without us.

Loading: before the first step, after Megatron has loaded its own. Residuals belong to one rank's
data, so memory that holds some is refused at another size. What all data-parallel ranks share is
taken over at another data-parallel size, if the buckets are the same; a method that keeps nothing
has nothing to refuse.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_taco.patching import stored_policy
from megatron_taco.patching.errors import PatchError
from megatron_taco.patching.registry import Registry
from megatron_taco.patching.run_facts import current_device

if TYPE_CHECKING:
    from megatron_taco.gradients import GradientMethod
    from megatron_taco.patching.data import DataParallelHooks
    from megatron_taco.patching.data_methods import BucketMethods

ATTRIBUTE = "megatron_taco_gradients"
KEY = "megatron_taco.gradients"
SECTION = "compression.data_parallel.gradients"
_FRESH = f"or start without it ({SECTION}.memory: fresh)"
_PARTS = ("local", "shared")

Entry = tuple[str, str, str]
"""Bucket, ``local`` or ``shared``, name."""
Manifest = dict[Entry, tuple[tuple[int, ...], torch.dtype]]
"""Shape and dtype of all that a tensor- and pipeline-parallel rank keeps."""
Hit = Callable[[], None]


class GradientMemory:
    """Saves and loads the memory of a run's gradient methods.

    Args:
        hooks: Of the data-parallel axis; they hold the methods.
        method: The method's name.
        fresh: Start without memory, whatever the checkpoint holds.
        say: Prints a line from rank 0.
    """

    def __init__(
        self,
        hooks: DataParallelHooks,
        method: str,
        *,
        fresh: bool,
        say: Callable[[str], None],
    ) -> None:
        self._hooks = hooks
        self._method = method
        self._fresh = fresh
        self._say = say

    def claim(self, registry: Registry) -> None:
        """Claim where Megatron makes the state of a checkpoint."""
        registry.claim("data.generate_state_dict", "compression.data_parallel", self._generate)

    def _generate(self, original: Callable[..., Any], hit: Hit) -> Callable[..., Any]:
        @functools.wraps(original)
        def generate_state_dict(args: Any, *rest: Any, **kwargs: Any) -> Any:
            state = original(args, *rest, **kwargs)
            # Megatron calls it to load as well, then with no iteration: see ``resume``.
            if kwargs.get("iteration") is None or args.no_save_optim:
                return state
            hit()
            local, done = self._hooks.local, kwargs["iteration"]
            if local is not None and not local.ends_round(done - 1):
                self._say(
                    f"checkpoint at iteration {done}: within a round of {self._method}, whose "
                    "replicas have weights of their own; resume it with its memory"
                )
            setattr(args, ATTRIBUTE, {"method": self._method, "ranks": _sizes()})
            state[ATTRIBUTE] = self._sharded()
            return state

        return generate_state_dict

    def _all(self) -> BucketMethods:
        assert self._hooks.methods is not None
        return self._hooks.methods

    def _methods(self) -> dict[str, GradientMethod]:
        return self._all().methods

    def _sharded(self) -> dict[str, Any]:
        manifest: Manifest = {}
        state: dict[str, Any] = {}
        for bucket in self._methods():
            found = self._all().state_of(bucket)
            for part in _PARTS:
                for name, tensor in found[part].items():
                    entry = (bucket, part, name)
                    manifest[entry] = (tuple(tensor.shape), tensor.dtype)
                    state[_path(entry)] = _sharded_tensor(entry, tensor)
        state["manifest"] = _sharded_manifest(manifest, _place(), _data_rank())
        return state

    def resume(self, args: argparse.Namespace) -> None:
        """Take over a checkpoint's memory, if this run goes on from one; a collective call.

        Args:
            args: Megatron's arguments after it has loaded.

        Raises:
            PatchError: The memory is of another number of ranks, or of other buckets.
        """
        folder = stored_policy.resumed_from(args)
        if folder is None:
            return
        remark = "gradients.memory: fresh" if self._fresh else None
        if args.no_load_optim:
            remark = "no_load_optim"
        if remark is None:
            found, remark = self._found(folder)
        if remark is not None:
            self._say(f"{self._method} starts without memory: {remark}")
            return
        manifest = self._fitting(found["ranks"], folder)
        if manifest is not None:
            self._load(manifest, folder)

    def _found(self, folder: str) -> tuple[dict[str, Any], str | None]:
        """What the checkpoint's memory is of, and why it is not used, if it is not."""
        said: list[Any] = [None]
        if dist.get_rank() == 0:
            said = [stored_policy.read_attribute(folder, ATTRIBUTE)]
        dist.broadcast_object_list(said, src=0, device=current_device())
        found, why = said[0]
        if found is None:
            return {}, str(why)
        if found["method"] != self._method:
            return {}, f"the checkpoint's is of {found['method']}"
        return dict(found), None

    def _fitting(self, saved: dict[str, int], folder: str) -> Manifest | None:
        """What to load of memory that was saved at these sizes; None if no rank kept anything."""
        here = _sizes()
        if saved == here:
            return self._manifests([_place()], _data_rank(), folder)[_place()]
        manifests = self._manifests(_places(saved), dist.get_rank(), folder)
        parts = {part for manifest in manifests.values() for _, part, _ in manifest}
        if not parts:
            return None
        why = None
        if "local" in parts:
            why = "residuals belong to one rank's data and cannot be spread anew"
        elif any(saved[axis] != here[axis] for axis in ("tensor", "pipeline")):
            why = "it is of the part of the model that a rank holds"
        if why is not None:
            raise PatchError(
                f"{SECTION}.compressor: {self._method}: the memory in {folder} is of "
                f"{_shown(saved)} and this run has {_shown(here)}: {why}; resume at the same "
                f"sizes, {_FRESH}"
            )
        return manifests[_place()]

    @staticmethod
    def _manifests(places: list[str], replica: int, folder: str) -> dict[str, Manifest]:
        wanted = {place: _sharded_manifest(None, place, replica) for place in places}
        found = _read(wanted, folder)
        return {place: found[place] for place in places}

    def _load(self, manifest: Manifest, folder: str) -> None:
        self._make_methods()
        self._refuse_other_buckets({entry[0] for entry in manifest}, folder)
        wanted = {
            _path(entry): _sharded_tensor(
                entry, torch.empty(shape, dtype=dtype, device=current_device())
            )
            for entry, (shape, dtype) in manifest.items()
        }
        tensors = _read(wanted, folder)
        for bucket, method in self._methods().items():
            state = method.state_dict()
            for part in _PARTS:
                state[part] = {
                    entry[2]: tensors[_path(entry)]
                    for entry in manifest
                    if entry[:2] == (bucket, part)
                }
            self._all().load(bucket, state)
        self._say(f"{self._method} goes on with the memory in the checkpoint")

    def _make_methods(self) -> None:
        for bucket, plan, group in self._hooks.buckets("grad_data"):
            if plan.compresses:
                self._all().of(bucket, plan, group)

    def _refuse_other_buckets(self, found: set[str], folder: str) -> None:
        """All ranks find out together, so that none waits for one that has left."""
        missing = sorted(found - set(self._methods()))
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, missing)
        for rank, names in enumerate(every):
            if names:
                raise PatchError(
                    f"{SECTION}.compressor: {self._method}: the memory in {folder} is of the "
                    f"bucket {names[0]}, which rank {rank} does not have; set "
                    "megatron.ddp_bucket_size, overlap_grad_reduce and "
                    f"compression.data_parallel.min_bytes as in that run, {_FRESH}"
                )


def _sizes() -> dict[str, int]:
    from megatron.core import parallel_state as mpu

    return {
        "tensor": mpu.get_tensor_model_parallel_world_size(),
        "pipeline": mpu.get_pipeline_model_parallel_world_size(),
        "data": mpu.get_data_parallel_world_size(with_context_parallel=True),
    }


def _shown(sizes: dict[str, int]) -> str:
    return " x ".join(f"{name} parallel {size}" for name, size in sizes.items())


def _place() -> str:
    from megatron.core import parallel_state as mpu

    return _key(mpu.get_tensor_model_parallel_rank(), mpu.get_pipeline_model_parallel_rank())


def _places(sizes: dict[str, int]) -> list[str]:
    pipeline = range(sizes["pipeline"])
    return [_key(t, p) for t in range(sizes["tensor"]) for p in pipeline]


def _key(tensor: int, pipeline: int) -> str:
    return f"{KEY}.tensor{tensor}.pipeline{pipeline}"


def _data_rank() -> int:
    from megatron.core import parallel_state as mpu

    return int(mpu.get_data_parallel_rank(with_context_parallel=True))


def _path(entry: Entry) -> str:
    return "/".join(entry)


def _sharded_tensor(entry: Entry, tensor: Tensor) -> Any:
    from megatron.core.dist_checkpointing import ShardedTensor

    key = f"{_place()}.{_path(entry)}"
    if entry[1] == "shared":
        return ShardedTensor.from_rank_offsets(key, tensor, replica_id=_data_rank())
    place = (0, _data_rank(), _sizes()["data"])
    return ShardedTensor.from_rank_offsets(key, tensor, place, prepend_axis_num=1)


def _sharded_manifest(manifest: Manifest | None, place: str, replica: int) -> Any:
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    return ShardedObject(f"{place}.manifest", manifest, (1,), (0,), replica_id=replica)


def _read(wanted: dict[str, Any], folder: str) -> Any:
    from megatron.core import dist_checkpointing

    return dist_checkpointing.load(wanted, folder)
