# An engine with the connector, from this checkout:
#   docker build -t vllm-kvhearth -f deploy/engine.Dockerfile .
#   docker build -t vllm-kvhearth-cpu -f deploy/engine.Dockerfile \
#     --build-arg BASE=public.ecr.aws/q9t5s3a7/vllm-cpu-release-repo:v0.32.0 .
ARG BASE=vllm/vllm-openai:v0.32.0
FROM ${BASE}
COPY pyproject.toml hatch_build.py README.md LICENSE /src/
COPY client /src/client
COPY server /src/server
# The interpreter that the image's `vllm` runs in: its own, or that of a virtual environment.
RUN uv pip install --python "$(command -v python3)" --break-system-packages /src
