# docker build --file scripts/docker/cuda.Dockerfile --tag draftsmith:cuda .
# docker run --rm --gpus all draftsmith:cuda doctor
#
# The checkout at /draftsmith, set up by `make setup`, with torch's build for CUDA. Runs lie in /draftsmith/runs, downloads in
# /cache: two volumes, written by user 1000. scripts/docker/compose.yaml runs the demo in this image, and
# scripts/cluster/kubernetes_job.yaml a training, as its IMAGE. The CUDA libraries come with torch's packages; the machine has
# the driver and the NVIDIA Container Toolkit. nvcc, which DeepSpeed's own kernels want (configs/accelerate/zero3_offload.yaml),
# is not in it.
FROM python:3.11-slim-bookworm

# --build-arg: an index in place of the public one
ARG PIP_INDEX_URL

# g++ for what torch.compile makes, git for the commit of a run in a checkout that is mounted over this one
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ git make \
    && rm -rf /var/lib/apt/lists/*
RUN useradd --create-home --uid 1000 draftsmith \
    && install --directory --owner draftsmith /draftsmith /draftsmith/runs /cache

USER draftsmith
WORKDIR /draftsmith
COPY --chown=draftsmith . .
RUN ALLOW_CUDA=1 PIP_NO_CACHE_DIR=1 make setup

# What the toolkit brings into the container where GPUs are not asked for by name
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
ENV PATH=/draftsmith/.venv/bin:$PATH DRAFTSMITH_CACHE=/cache/draftsmith HF_HOME=/cache/huggingface
VOLUME ["/draftsmith/runs", "/cache"]
ENTRYPOINT ["draftsmith"]
CMD ["--help"]
