"""The codebook of one boundary: the table in force, and how it moves at both ends.

    warm-up      Z crosses as it is. In the last step of the warm-up both ends, which see the same
                 Z, sample it; the samples are summed over the replicas and k-means on the sum gives
                 all of them the same table.
    afterwards   the *table in force* is constant within a step. The sender keeps running counts
                 and sums; every micro-batch carries the sender's newer vectors of one of S parts
                 (K / S codes of all groups and rounds), and the parts of step t take effect at
                 the end of t at both ends. S successive micro-batches refresh the whole table.
    dead codes   used less than ``dead`` times the mean are put on vectors of the batch.

A skipped step updates no statistics and does not count; the parts that it carried take effect.
"""

from typing import Any

import torch
from torch import Tensor

from megatron_taco.boundaries.codebook_statistics import Statistics
from megatron_taco.boundaries.projector import ENDS
from megatron_taco.boundaries.random import permutation, stream_key
from megatron_taco.boundaries.rvq_settings import RvqSettings
from megatron_taco.boundaries.state import FixedPrecision


class Codebook(FixedPrecision):
    """Tables [R, G, K, w] and their life as described above.

    Args:
        rank: Coordinates of a token r = G * w.
        settings: Sizes and rates.
        seed: Of the run.
        boundary: Number of the boundary.
        ends: Which halves this process holds: both, sender or receiver. A receiver keeps no counts
            and sums.

    Attributes:
        table: In force, FP32 [R, G, K, w]; zeros during the warm-up.
        counts: Running use of each code, FP32 [R, G, K]; sender only.
        sums: Running sum of its vectors, FP32 [R, G, K, w]; sender only.
        step: Steps taken and not skipped.
        learned: The statistics of this step.
    """

    table: Tensor
    counts: Tensor | None
    sums: Tensor | None

    def __init__(
        self, rank: int, settings: RvqSettings, seed: int, boundary: int, ends: str = "both"
    ) -> None:
        super().__init__()
        if ends not in ENDS:
            raise ValueError(f"rvq: ends is {ends!r}, allowed are {', '.join(ENDS)}")
        self.settings, self.seed, self.boundary, self.ends = settings, seed, boundary, ends
        self.step, self._carried = 0, 0
        self._received: list[Tensor] = []
        groups = settings.group_count(rank)
        shape = (settings.rounds, groups, settings.codes, settings.width)
        self.learned = Statistics(settings, shape, seed, boundary)
        self.register_buffer("table", torch.zeros(shape))
        sends = ends != "receiver"
        self.register_buffer("counts", torch.zeros(shape[:3]) if sends else None)
        self.register_buffer("sums", torch.zeros(shape) if sends else None)

    @property
    def warming(self) -> bool:
        """Whether Z crosses as it is in this step."""
        return self.step < self.settings.warmup_steps

    @property
    def sampling(self) -> bool:
        """Whether this step's Z makes the first table."""
        return self.step == self.settings.warmup_steps - 1

    @property
    def part_values(self) -> int:
        """Numbers in a part, R * r * K / S."""
        return self.table.numel() // self.settings.part_count

    def observe(self, z: Tensor) -> None:
        """Take the sample from a micro-batch FP32 [n, r], where one is due."""
        if self.sampling:
            self.learned.observe(z, self.step)

    def part_to_send(self, micro_batch: int) -> Tensor:
        """Return what micro-batch ``micro_batch`` of this step carries: FP32 [part_values].

        Raises:
            ValueError: If this is a receiver.
        """
        (number,) = self._part_numbers(micro_batch, 1)
        return self._in_parts(self._newest())[:, :, number].reshape(-1)

    def receive_part(self, micro_batch: int, values: Tensor) -> None:
        """Keep a part FP32 [part_values] for the end of the step.

        Raises:
            ValueError: If it is not the next one, or of another size.
        """
        expected = (len(self._received), self.part_values)
        if (micro_batch, values.numel()) != expected:
            raise ValueError(
                f"rvq of boundary {self.boundary}: got part {micro_batch} of {values.numel()} "
                f"values, expected part {expected[0]} of {expected[1]}"
            )
        self._received.append(values)

    @property
    def received(self) -> int:
        """Parts received in this step."""
        return len(self._received)

    def statistics(self, replica: int = 0, replicas: int = 1) -> Tensor | None:
        """Return what has to be summed over the replicas before ``end_step``: FP32, one vector.

        Replicas are the processes that see different tokens at this boundary: DP x CP, and TP under
        sequence parallelism.

        Args:
            replica: Number of this one.
            replicas: How many there are.

        Returns:
            None if this step needs nothing: a warm-up step but the last, or a receiver afterwards.
        """
        if self.sampling:
            return self.learned.sample(self.step, replica, replicas)
        if self.warming or self.counts is None:
            return None
        return self.learned.vector(self.step, replica, replicas)

    def discard(self) -> None:
        """Drop this step's statistics and parts."""
        self.learned.clear()
        self._received = []

    def end_step(self, reduced: Tensor | None, skipped: bool = False) -> None:
        """End the step: parts take effect, the sender learns, the warm-up may end.

        Args:
            reduced: What ``statistics`` returned, summed over the replicas.
            skipped: Whether the optimiser skipped this step, at both ends; ``reduced`` is ignored.

        Raises:
            ValueError: If ``reduced`` is missing.
        """
        if not self.warming:
            self._apply_parts()
        if not skipped:
            self._take(reduced)
            self.step += 1
        self.discard()

    def _take(self, reduced: Tensor | None) -> None:
        if not self.sampling and (self.warming or self.counts is None):
            return
        if reduced is None:
            raise ValueError(f"rvq of boundary {self.boundary}: step {self.step} has no statistics")
        if self.sampling:
            table, counts = self.learned.first_table(reduced)
            self.table.copy_(table)
            if self.counts is not None and self.sums is not None:
                self.counts.copy_(counts)
                self.sums.copy_(table * counts.unsqueeze(3))
        elif self.counts is not None and self.sums is not None:
            self.learned.update(self.counts, self.sums, reduced)

    def _apply_parts(self) -> None:
        """Put the step's parts in force: the sender knows what it sent, the receiver has it."""
        sends = self.ends != "receiver"
        carried = self.learned.micro_batches if sends else self.received
        numbers = self._part_numbers(0, carried)
        if sends:
            newest = self._in_parts(self._newest())
            fresh = {number: newest[:, :, number] for number in numbers}
        else:
            shape = self._in_parts(self.table)[:, :, 0].shape
            parts = zip(numbers, self._received, strict=True)
            fresh = {number: values.view(shape) for number, values in parts}
        if fresh:
            index = torch.tensor(list(fresh), device=self.table.device)
            self._in_parts(self.table).index_copy_(2, index, torch.stack(list(fresh.values()), 2))
        self._carried += carried

    def _newest(self) -> Tensor:
        """Return the sender's own table as of the last step's end: sums / counts."""
        if self.counts is None or self.sums is None:
            raise ValueError(f"rvq of boundary {self.boundary}: a receiver has no parts to send")
        return self.sums / self.counts.unsqueeze(3).clamp_min(torch.finfo(torch.float32).tiny)

    def _in_parts(self, table: Tensor) -> Tensor:
        """Return the view [R, G, S, K / S, w] of a table."""
        return table.unflatten(2, (self.settings.part_count, -1))

    def _part_numbers(self, first: int, count: int) -> list[int]:
        """Return the parts that micro-batches ``first`` .. of this step carry.

        Parts come in an order drawn anew for every S of them, so none waits for 2 S micro-batches.
        """
        parts = self.settings.part_count
        numbers: list[int] = []
        while len(numbers) < count:
            cycle, place = divmod(self._carried + first + len(numbers), parts)
            key = stream_key("codebook parts", self.seed, self.boundary, cycle)
            order: list[int] = permutation(key, parts).tolist()
            numbers += order[place : place + count - len(numbers)]
        return numbers

    def get_extra_state(self) -> dict[str, int]:
        """Return the counters for ``state_dict``."""
        return {"step": self.step, "carried": self._carried}

    def set_extra_state(self, state: Any) -> None:
        """Take the counters of a ``state_dict``."""
        self.step, self._carried = int(state["step"]), int(state["carried"])
