# docker build --file scripts/docker/cpu.Dockerfile --tag draftsmith:cpu .
# docker run --rm draftsmith:cpu doctor
#
# The checkout at /draftsmith, set up by `make setup`, with torch's build for CPUs. Runs lie in /draftsmith/runs, downloads in
# /cache: two volumes, written by user 1000. scripts/docker/compose.yaml runs the demo in this image, and
# scripts/cluster/kubernetes_job.yaml a training, as its IMAGE.
FROM python:3.11-slim-bookworm

# --build-arg: indexes in place of the public ones, as scripts/setup.sh reads them
ARG PIP_INDEX_URL
ARG TORCH_INDEX_URL

# g++ for what torch.compile makes, git for the commit of a run in a checkout that is mounted over this one
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ git make \
    && rm -rf /var/lib/apt/lists/*
RUN useradd --create-home --uid 1000 draftsmith \
    && install --directory --owner draftsmith /draftsmith /draftsmith/runs /cache

USER draftsmith
WORKDIR /draftsmith
COPY --chown=draftsmith . .
RUN PIP_NO_CACHE_DIR=1 make setup

ENV PATH=/draftsmith/.venv/bin:$PATH DRAFTSMITH_CACHE=/cache/draftsmith HF_HOME=/cache/huggingface
VOLUME ["/draftsmith/runs", "/cache"]
ENTRYPOINT ["draftsmith"]
CMD ["--help"]
