# GPUs: on NVIDIA's PyTorch image, which brings CUDA, NCCL, torch, Triton and Transformer Engine.
# Not built by this project's tests, which have no container runtime; `make lint` runs hadolint.
# Choose a release of the image with torch 2.11 or newer and Python 3.12 or newer (its release notes
# say; the build checks it):
#   docker build --build-arg BASE=nvcr.io/nvidia/pytorch:YY.MM-py3 -t megatron-taco .
#   docker run --gpus all --ipc host --network host -v "$PWD:/work" -w /work megatron-taco \
#       torchrun --standalone --nproc-per-node gpu -m megatron_taco.pretrain --config configs/gpt-350m.yaml
ARG BASE
FROM ${BASE}

WORKDIR /opt/megatron_taco
COPY pyproject.toml setup.py README.md ./
COPY megatron_taco ./megatron_taco
COPY configs ./configs
COPY examples ./examples
COPY patches ./patches
COPY scripts ./scripts

# Without dependencies, so that nothing of the image, torch and Triton least of all, is replaced;
# ranges of versions, of which pip takes what fits the image.
# hadolint ignore=DL3013
RUN pip install --no-cache-dir --no-deps . 'megatron-core>=0.18,<0.20' \
    && pip install --no-cache-dir \
        psutil 'pydantic>=2.9' 'pyyaml>=6' 'rich>=13' 'transformers>=4.45' tensorboard wandb pyroute2 \
    && python -c "import torch; assert tuple(map(int, torch.__version__.split('.')[:2])) >= (2, 11)" \
    && megatron-taco --version

# Megatron asks for one hardware queue with tensor parallelism before the Blackwell generation.
ENV CUDA_DEVICE_MAX_CONNECTIONS=1
CMD ["megatron-taco", "doctor"]
