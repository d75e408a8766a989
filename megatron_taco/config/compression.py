"""Section `compression`: one section per parallel axis, each in its own file."""

from pydantic import Field

from megatron_taco.config.data_parallel import DataParallel
from megatron_taco.config.pipeline_parallel import PipelineParallel
from megatron_taco.config.section import Section
from megatron_taco.config.tensor_parallel import TensorParallel


class Compression(Section):
    """What is compressed, by the parallel axis it belongs to."""

    tensor_parallel: TensorParallel = Field(default_factory=TensorParallel)
    pipeline_parallel: PipelineParallel = Field(default_factory=PipelineParallel)
    data_parallel: DataParallel = Field(default_factory=DataParallel)

    @property
    def enabled(self) -> bool:
        """Whether anything is to be compressed on any axis."""
        axes = (self.tensor_parallel, self.pipeline_parallel, self.data_parallel)
        return any(axis.enabled for axis in axes)
