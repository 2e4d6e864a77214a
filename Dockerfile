# The daemon: no torch, no CUDA, no compiler, no root. deploy/docker/rootfs.py follows these stages
# without a container engine, and tests/integration/test_rootfs.py runs the daemon from the result.
# The builder is not the slim image, because the native module needs its C compiler.
ARG PYTHON_VERSION=3.12

FROM python:${PYTHON_VERSION} AS builder
WORKDIR /src
COPY pyproject.toml hatch_build.py README.md LICENSE ./
COPY client ./client
COPY server ./server
COPY deploy/docker ./deploy/docker
# `--build-arg EXTRAS=server,remote`: with the client libraries of remote tiers (some 35 MB more).
ARG EXTRAS=server
RUN ./deploy/docker/install.sh /src /image

# No distribution below: install.sh puts the interpreter and the libraries that it loads beside the
# packages. What is not there needs no update and no scan.
FROM scratch
LABEL org.opencontainers.image.title="kvhearth" \
      org.opencontainers.image.description="A daemon that keeps the KV caches of LLM inference engines warm" \
      org.opencontainers.image.licenses="Apache-2.0"
COPY --from=builder /image/root /
COPY --from=builder --chown=65532:65532 /image/run/kvhearth /run/kvhearth
COPY --from=builder --chown=65532:65532 /image/arena /arena
ENV PATH=/opt/kvhearth/bin:/usr/local/bin \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1
USER 65532:65532
EXPOSE 9460
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s --retries=3 CMD ["kvhearth", "health"]
ENTRYPOINT ["kvhearth"]
CMD ["serve"]
