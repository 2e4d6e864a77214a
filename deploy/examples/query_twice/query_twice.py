"""Asks a ``vllm serve`` the same long prompt twice, streamed, and times the first token.

    python deploy/examples/query_twice/query_twice.py --url http://127.0.0.1:8000

Between the two the engine forgets its own prefix cache if it lets us (VLLM_SERVER_DEV_MODE=1), so
that the second answer's KV comes from KVHearth. Needs the ``openai`` package, which vLLM brings.
"""

import argparse
import pydoc_data.topics
import time
import urllib.error
import urllib.request
from dataclasses import dataclass

import openai

TOKENS = 16


@dataclass(frozen=True)
class Answer:
    """One streamed answer: its text, seconds to its first token, prompt tokens and cached ones."""

    text: str
    first_token_s: float
    prompt_tokens: int
    cached_tokens: int


def ask(client: openai.OpenAI, model: str, prompt: str) -> Answer:
    """Stream a greedy completion of ``prompt``."""
    text, first_token_s, usage = "", 0.0, None
    started = time.monotonic()
    for event in client.completions.create(
        model=model,
        prompt=prompt,
        max_tokens=TOKENS,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    ):
        if event.choices:
            first_token_s = first_token_s or time.monotonic() - started
            text += event.choices[0].text
        usage = event.usage or usage
    if usage is None:
        raise SystemExit("the server reported no usage")
    details = usage.prompt_tokens_details
    cached = (details.cached_tokens or 0) if details else 0
    return Answer(text, first_token_s, usage.prompt_tokens, cached)


def forget(url: str) -> bool:
    """Make the engine forget its own prefix cache; False if it does not offer that."""
    request = urllib.request.Request(f"{url}/reset_prefix_cache", method="POST")
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return bool(answer.status == 200)
    except urllib.error.HTTPError:
        return False


def main() -> None:
    """Ask twice and print what the first token took."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--url", default="http://127.0.0.1:8000")
    options.add_argument("--characters", type=int, default=12_000, help="length of the prompt")
    options.add_argument("--pause", type=float, default=2.0, help="seconds between the two")
    given = options.parse_args()
    client = openai.OpenAI(base_url=f"{given.url}/v1", api_key="none", max_retries=0)
    model = client.models.list().data[0].id
    prompt = "".join(pydoc_data.topics.topics.values())[: given.characters]

    first = ask(client, model, prompt)
    time.sleep(given.pause)  # stores run beside the engine
    forgotten = forget(given.url)
    second = ask(client, model, prompt)
    for name, answer in (("first", first), ("second", second)):
        print(
            f"{name:7} first token after {answer.first_token_s:7.3f} s, "
            f"{answer.cached_tokens} of {answer.prompt_tokens} prompt tokens cached"
        )
    whose = "KVHearth" if forgotten else "the engine's own cache (VLLM_SERVER_DEV_MODE is not set)"
    ratio = first.first_token_s / second.first_token_s
    print(f"{ratio:.1f} times faster, from {whose}; the answers are", end=" ")
    print("equal" if first.text == second.text else "DIFFERENT")


if __name__ == "__main__":
    main()
