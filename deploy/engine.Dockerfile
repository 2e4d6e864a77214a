# An engine with the connector: docker build -t vllm-kvhearth -f deploy/engine.Dockerfile deploy
FROM vllm/vllm-openai:v0.32.0
RUN uv pip install --system kvhearth==0.1.0
