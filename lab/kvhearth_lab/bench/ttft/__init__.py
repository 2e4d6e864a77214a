"""``kvhearth bench ttft``: time to the first token on real engines, ours and a peer's, in turns.

Engines are ``vllm serve`` processes of another environment, called over HTTP as users do; nothing
of them is imported here.
"""
