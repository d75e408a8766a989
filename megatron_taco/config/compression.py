"""Section `compression`: one section per parallel axis, each in its own file."""

from pydantic import Field

from megatron_taco.config.data_parallel import DataParallel
from megatron_taco.config.section import Section
from megatron_taco.config.tensor_parallel import TensorParallel


class Compression(Section):
    """What is compressed, by the parallel axis it belongs to."""

    tensor_parallel: TensorParallel = Field(default_factory=TensorParallel)
    data_parallel: DataParallel = Field(default_factory=DataParallel)

    @property
    def enabled(self) -> bool:
        """Whether anything is to be compressed on any axis."""
        return self.tensor_parallel.enabled or self.data_parallel.enabled
