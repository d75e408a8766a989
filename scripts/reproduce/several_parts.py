"""What the lists of parts for two, four and eight GPUs, and for two machines, have in common.

Every part has a small form: the same benchmark on CPU ranks over gloo, with messages of some
kilobytes and models of four layers of hidden size 128.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_taco.lab.part import Part

ROOT = Path(__file__).resolve().parent.parent.parent
RESULTS = ROOT / "docs" / "results"
BENCH = ("-m", "megatron_taco.cli", "bench")
NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
SMALL_SIZES = ("--sizes", "16KiB,256KiB", "--repeats", "2", "--silence", "5ms")
SHORT = ("--cycles", "1", "--steps", "1", "--settle", "0")
ARMS = {
    "tensor": ("--axis", "tensor", "--formats", "e4m3,int8,int4"),
    "all": (
        *("--axis", "all", "--formats", "e4m3", "--boundaries", "int8_hadamard"),
        *("--compressors", "sdp4bit"),
    ),
}
""""all" has arms for all axes together and for each alone."""


@dataclass(frozen=True, kw_only=True)
class Link:
    """What joins the ranks of a part.

    Attributes:
        name: In the names of parts.
        words: In titles.
        small_words: In titles of the small form.
        rate: Between two emulated hosts; empty for what the GPUs have.
        environment: Variables of NCCL.
    """

    name: str
    words: str
    small_words: str
    rate: str = ""
    environment: tuple[tuple[str, str], ...] = tuple(NO_MULTICAST.items())

    def ranks(self, count: int) -> tuple[str, ...]:
        """Returns the arguments for so many ranks, on two hosts where the link has a rate."""
        if not self.rate:
            return ("--ranks", str(count))
        hosts = ("--hosts", "2", "--rate", self.rate)
        return hosts if count == 2 else (*hosts, "--ranks-per-host", str(count // 2))


NVLINK = Link(name="nvlink", words="over NVLink", small_words="over loopback")
HOST_MEMORY = Link(
    name="host-memory",
    words="through host memory",
    small_words="over loopback",
    environment=(*NO_MULTICAST.items(), ("NCCL_P2P_DISABLE", "1")),
)
LOOPBACK = "between ranks on one host gloo has nothing but the loopback: the same as over NVLink"


def rate(number: str, unit: str = "Gbit") -> Link:
    """Returns an emulated link of so many Gbit/s, or Mbit/s."""
    words = f"at {number} {unit}/s"
    name = f"{number}{unit.lower()}"
    return Link(name=name, words=words, small_words=words, rate=f"{number}{unit}")


def collectives(
    gpus: int, link: Link, name: str, title: str, words: Sequence[str], *, aim: str = ""
) -> Part:
    """Returns a part of ``bench collectives``.

    Args:
        gpus: Ranks, one on each.
        link: Between them.
        name: Of the part.
        title: Of its section.
        words: Arguments; those that the small form takes over come first, up to ``--sizes``.
        aim: What it is to reach.
    """
    ranks = link.ranks(gpus)
    kept = tuple(words[: words.index("--sizes")])
    return Part(
        name=name,
        title=f"{title} {link.words}",
        command=(*BENCH, "collectives", *ranks, *words),
        environment=dict(link.environment),
        aim=aim,
        gpus=gpus,
        small=(*BENCH, "collectives", *ranks, "--cpu", *kept, *SMALL_SIZES),
        small_title=f"{title} {link.small_words}".replace("GPUs", "ranks"),
    )


def step(
    gpus: int,
    link: Link,
    name: str,
    title: str,
    words: Sequence[str],
    *,
    small: Sequence[str],
    small_title: str,
    aim: str = "",
    more: Sequence[str] = (),
) -> Part:
    """Returns a part of ``bench step``.

    Args:
        gpus: Ranks, one on each.
        link: Between them.
        name: Of the part.
        title: Of its section.
        words: Arguments that the small form has too; overrides, if there are any, come last.
        small: Overrides of the small form alone.
        small_title: Of the small form's section.
        aim: What it is to reach.
        more: Arguments that the small form does not have.
    """
    ranks = link.ranks(gpus)
    return Part(
        name=name,
        title=f"{title} {link.words}",
        command=(*BENCH, "step", *words, *more, *ranks),
        environment=dict(link.environment),
        aim=aim,
        gpus=gpus,
        small=(*BENCH, "step", *words, *small, *SHORT, *ranks, "--cpu"),
        small_title=f"{small_title} {link.small_words}",
    )


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model of configs/, with fewer layers, and cut further for the small form.

    Attributes:
        name: Of its configuration.
        words: In titles.
        family: Its name in titles of the small form.
        layers: Layers that are measured.
        micro_batch: Sequences.
        vocabulary: Of the mock data.
        small: Overrides of its own in the small form.
    """

    name: str
    words: str
    family: str
    layers: int
    micro_batch: int
    vocabulary: int
    small: tuple[str, ...] = ()

    def config(self, layout: Layout) -> tuple[str, ...]:
        """Returns the configuration and the overrides for a layout."""
        return (
            *("--config", str(ROOT / "configs" / f"{self.name}.yaml")),
            *layout.overrides,
            f"data={{source: mock, tokenizer: {{null: {self.vocabulary}}}}}",
            f"model.num_layers={self.layers}",
            f"megatron.micro_batch_size={self.micro_batch}",
            f"megatron.global_batch_size={self.micro_batch * layout.data * MICRO_BATCHES}",
        )

    def small_config(self, layout: Layout) -> tuple[str, ...]:
        """Returns the same for the small form."""
        return (
            *replace(self, layers=4, micro_batch=1, vocabulary=250).config(layout),
            *CUT,
            *self.small,
        )


MICRO_BATCHES = 4
"""A step and replica: enough to keep two stages busy half of the time, few enough for 9 minutes."""
CUT = (
    "model.hidden_size=128",
    "model.num_attention_heads=8",
    "model.max_position_embeddings=32",
    "model.vocab_size=null",
    "megatron.seq_length=32",
    "compression.tensor_parallel.min_bytes=1KiB",
    "compression.data_parallel.min_bytes=1KiB",
)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Parallel sizes."""

    tensor: int
    pipeline: int = 1
    data: int = 1

    @property
    def name(self) -> str:
        """In the names of parts: ``tp4pp2``."""
        return f"tp{self.tensor}" + "".join(
            f"{axis}{size}" for axis, size in (("pp", self.pipeline), ("dp", self.data)) if size > 1
        )

    @property
    def words(self) -> str:
        """In titles: ``TP 4 × PP 2``."""
        sizes = (("TP", self.tensor), ("PP", self.pipeline), ("DP", self.data))
        return " × ".join(f"{axis} {size}" for axis, size in sizes if size > 1)

    @property
    def ranks(self) -> int:
        """All ranks."""
        return self.tensor * self.pipeline * self.data

    @property
    def overrides(self) -> tuple[str, ...]:
        """For the trainer; the data-parallel size follows from the ranks."""
        return (
            f"megatron.tensor_model_parallel_size={self.tensor}",
            f"megatron.pipeline_model_parallel_size={self.pipeline}",
        )


MODELS = (
    Model(
        name="gpt-1.3b",
        words="GPT-1.3B",
        family="GPT-1.3B",
        layers=24,
        micro_batch=4,
        vocabulary=50257,
    ),
    Model(
        name="gpt-6.7b",
        words="GPT-6.7B with 8 of its 32 layers",
        family="GPT-6.7B",
        layers=8,
        micro_batch=2,
        vocabulary=50257,
    ),
    Model(
        name="qwen2.5-7b",
        words="Qwen2.5-7B with 8 of its 28 layers",
        family="Qwen2.5-7B",
        layers=8,
        micro_batch=8,
        vocabulary=151643,
        small=("model.ffn_hidden_size=256",),
    ),
)
QWEN_HEADS = 28


def model_steps(layouts: Sequence[Layout], link: Link) -> list[Part]:
    """Returns the parts of all models in some layouts, where Megatron can divide their heads."""
    return [
        step(
            layout.ranks,
            link,
            f"step-{model.name}-{layout.name}" + (f"-{link.name}" if link.rate else ""),
            f"Training step of {model.words}, {layout.words},",
            ARMS["tensor" if layout.pipeline == layout.data == 1 else "all"],
            more=model.config(layout),
            small=model.small_config(layout),
            small_title=f"Training step of {model.family}, cut, {layout.words},",
        )
        for model in MODELS
        for layout in layouts
        if model.name != "qwen2.5-7b" or QWEN_HEADS % layout.tensor == 0
    ]


def operations(gpus: int) -> list[Part]:
    """Returns the collectives of 1 to 256 MiB, and the hierarchical ones between two hosts."""
    found = [
        collectives(
            gpus,
            NVLINK,
            "collectives",
            f"Collectives of {gpus} GPUs",
            ("--formats", "e4m3,int8,int4", "--sizes", "1MiB,4MiB,16MiB,64MiB,256MiB"),
        ),
        peer_reads(gpus, sizes="1MiB,4MiB,16MiB,64MiB,256MiB"),
    ]
    for gbit in ("25", "100"):
        words = ("--operations", "all_reduce", "--formats", "e4m3,int4", "--rotation", "hadamard")
        algorithms = ("--algorithms", "two_shot,hierarchical")
        found.append(
            collectives(
                gpus,
                rate(gbit),
                f"hierarchical-{gbit}gbit",
                f"All-reduce of {gpus} GPUs on two hosts",
                (*words, *algorithms, "--sizes", "1MiB,16MiB,64MiB", "--repeats", "4"),
            )
        )
    return found


def peer_reads(gpus: int, *, sizes: str, aim: str = "") -> Part:
    """Returns the all-reduce by direct peer reads."""
    words = ("--operations", "all_reduce", "--algorithms", "two_shot,peer_read", "--sizes", sizes)
    part = collectives(
        gpus,
        NVLINK,
        "collectives-peer-read",
        f"All-reduce of {gpus} GPUs by direct peer reads",
        words,
        aim=aim,
    )
    return replace(part, small=(), no_small="a CPU rank cannot read a peer's memory")


def losses(gpus: int, layout: Layout, *, steps: int = 500) -> Part:
    """Returns the losses of GPT-350M with all axes on beside those of the uncompressed run."""
    script = str(Path(__file__).with_name("axes_losses.py"))
    arms = ("--arms", "all", *layout.overrides)
    return Part(
        name=f"losses-gpt-350m-{layout.name}",
        title=f"Losses of GPT-350M over {steps} steps, {layout.words}",
        command=(
            *(script, "--ranks", str(gpus), "--steps", str(steps), *arms),
            *("megatron.micro_batch_size=4", "megatron.global_batch_size=16"),
        ),
        environment=dict(NVLINK.environment),
        aim="within 1% of the uncompressed run",
        gpus=gpus,
        small=(
            *(script, "--ranks", str(gpus), "--steps", "40", "--cpu", *arms, *CUT),
            *("model.num_layers=4", "megatron.micro_batch_size=2", "megatron.global_batch_size=8"),
        ),
        small_title=f"Losses of a cut GPT-350M over 40 steps, {layout.words}",
    )
