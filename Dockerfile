# An image for GPU nodes: the packages of requirements/gpu312.lock.txt, TransformerEngine built, and this checkout.
#
#   docker build -t megatron-dapo .
#   enroot import -o megatron-dapo.sqsh dockerd://megatron-dapo                           # for pyxis
#   apptainer build megatron-dapo.sif docker-daemon://megatron-dapo:latest
#
# A job that is submitted from a checkout runs that checkout's code: build anew when the locks change. CUDA is that of the
# lock's cuda-toolkit: SGLang compiles kernels at run time. libnuma is for its kernels, the verbs for NCCL over InfiniBand.
FROM nvidia/cuda:13.0.2-devel-ubuntu24.04

RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
        ca-certificates g++ git make python3.12-dev python3.12-venv libnuma1 libibverbs1 ibverbs-providers librdmacm1 \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/megatron-dapo
COPY . .
RUN PYTHON=python3.12 make install-gpu && rm -rf ~/.cache
ENV PATH=/opt/megatron-dapo/.venv/bin:$PATH
