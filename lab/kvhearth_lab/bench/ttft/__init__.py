"""``kvhearth bench ttft``: time to the first token on real engines, ours and a peer's, in turns.

Engines are ``vllm serve`` processes of another environment; nothing of them is imported here. They
are asked over HTTP, as users ask them.
"""
