"""The engine's own work, without KVHearth: text, a transformer, and a paged pool of its KV.

The transformer is Hugging Face's ``LlamaForCausalLM`` with random weights from a seed, so nothing
is downloaded and two processes with one seed hold equal weights. Its attention reads and writes a
paged pool through a page table, as in a serving engine: the location of a block of tokens in the
pool differs from process to process.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.cache_utils import Cache, CacheLayerMixin

from kvhearth.model import I64

SEED = 7
THREADS = 2
CHARS_PER_TOKEN_MAX = 8
"""Characters of text per requested token: about twice the average length of a token."""


@dataclass(frozen=True)
class Sizes:
    """Geometry of the transformer and of its KV pool.

    Attributes:
        init_std: standard deviation of the weights. Llama's usual 0.02 gives attention that is
            nearly flat and looks at no token in particular; three times that makes it look, so that
            wrong KV far away shows in the logits (the demo checks it), and rounding stays at 1e-5.
        block_tokens: tokens in one block, which is one page of the pool and one block of KVHearth.
        chunk_tokens: tokens in one prefill step; whole blocks.
    """

    layers: int = 16
    hidden: int = 768
    heads: int = 12
    kv_heads: int = 4
    head_dim: int = 64
    intermediate: int = 2048
    vocab: int = 4096
    init_std: float = 0.06
    block_tokens: int = 64
    chunk_tokens: int = 512

    @property
    def token_bytes(self) -> int:
        """Bytes of K and V of one token in one layer, float32."""
        return 2 * self.kv_heads * self.head_dim * 4

    @property
    def page_bytes(self) -> int:
        """Bytes of K and V of one block in all layers."""
        return self.layers * self.block_tokens * self.token_bytes

    @property
    def digest(self) -> str:
        """Identity of the weights: a digest of all inputs that they are drawn from."""
        versions = [torch.__version__, transformers.__version__]
        recipe = json.dumps([asdict(self), SEED, *versions], sort_keys=True)
        return hashlib.sha256(recipe.encode()).hexdigest()


def text() -> str:
    """Return English text that every CPython carries: the manual's topics, in a fixed order."""
    return "\n\n".join(topics[name] for name in sorted(topics))


def load_tokenizer(path: Path, vocab: int) -> Tokenizer:
    """Load the BPE tokenizer in ``path``; train it on ``text()`` and save it if there is none."""
    if not path.exists():
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.train_from_iterator(
            [text()],
            trainers.BpeTrainer(vocab_size=vocab, show_progress=False, initial_alphabet=alphabet),
        )
        tokenizer.save(str(path))
    return Tokenizer.from_file(str(path))


def prompt_tokens(tokenizer: Tokenizer, count: int) -> list[int]:
    """Return the first ``count`` token ids of the text."""
    tokens: list[int] = tokenizer.encode(text()[: count * CHARS_PER_TOKEN_MAX]).ids[:count]
    if len(tokens) < count:
        raise SystemExit(f"the text has {len(tokens)} tokens, not {count}: lower --tokens")
    return tokens


class PagedPool:
    """KV pages of all layers, float32.

    Pages are handed out in an order drawn from ``order_seed``, as a busy engine's free list would.

    Attributes:
        layers: one tensor [pages, 2, block_tokens, kv_heads, head_dim] per layer.
    """

    def __init__(self, sizes: Sizes, pages: int, order_seed: int) -> None:
        shape = (sizes.layers, pages, 2, sizes.block_tokens, sizes.kv_heads, sizes.head_dim)
        self.sizes = sizes
        # fill_ instead of zeros: the memory must be there before the first request, as in an
        # engine.
        self.layers = list(torch.empty(shape).fill_(0.0))
        self._free = np.random.default_rng(order_seed).permutation(pages).astype(np.int64)

    def take(self, count: int) -> I64:
        """Return ``count`` page indices, int64, which are no longer free."""
        if count > len(self._free):
            raise RuntimeError(f"{count} pages wanted, {len(self._free)} are free")
        pages, self._free = self._free[:count], self._free[count:]
        return pages


class Sequence:
    """One request: its page table, and the number of its tokens with KV in the pool."""

    def __init__(self, pool: PagedPool, tokens_max: int) -> None:
        block = pool.sizes.block_tokens
        self.pool = pool
        self.pages = pool.take(-(-tokens_max // block))
        self.table = torch.from_numpy(self.pages)
        self.length = 0


class _PagedLayer(CacheLayerMixin):
    """One layer's cache for transformers: writes new K and V into pages, reads all back."""

    is_sliding = False

    def __init__(self, sequence: Sequence, layer: int) -> None:
        super().__init__()
        self._sequence = sequence
        self._pool = sequence.pool.layers[layer]
        self.is_initialized = True

    def lazy_initialization(self, *_: object) -> None:
        """Do nothing: the pool is there already."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: object, **__: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store K and V [1, kv_heads, new, head_dim]; return those of all tokens so far."""
        start, new = self._sequence.length, key_states.shape[2]
        block = self._pool.shape[2]
        position = torch.arange(start, start + new)
        page, offset = self._sequence.table[position // block], position % block
        self._pool[page, 0, offset] = key_states[0].transpose(0, 1)
        self._pool[page, 1, offset] = value_states[0].transpose(0, 1)
        return self._gather(0, start + new), self._gather(1, start + new)

    def _gather(self, which: int, length: int) -> torch.Tensor:
        used = -(-length // self._pool.shape[2])
        pages = self._pool[self._sequence.table[:used], which]
        return pages.flatten(0, 1)[:length].transpose(0, 1).unsqueeze(0)

    def get_seq_length(self, *_: object) -> int:
        """Return the number of tokens before this step."""
        return self._sequence.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return length and offset of the keys that this step's queries see."""
        return self._sequence.length + query_length, 0

    def get_max_length(self) -> int:
        """Return -1: the layer sets no bound."""
        return -1


class Transformer:
    """A decoder-only transformer in float32 on ``THREADS`` CPU threads, weights from ``SEED``."""

    def __init__(self, sizes: Sizes) -> None:
        torch.set_num_threads(THREADS)
        torch.manual_seed(SEED)
        config = LlamaConfig(
            vocab_size=sizes.vocab,
            hidden_size=sizes.hidden,
            intermediate_size=sizes.intermediate,
            num_hidden_layers=sizes.layers,
            num_attention_heads=sizes.heads,
            num_key_value_heads=sizes.kv_heads,
            head_dim=sizes.head_dim,
            initializer_range=sizes.init_std,
            max_position_embeddings=1 << 17,
            tie_word_embeddings=False,
            attn_implementation="sdpa",
        )
        self.sizes = sizes
        self._model = LlamaForCausalLM(config).eval()
        self.parameters = sum(weight.numel() for weight in self._model.parameters())

    @torch.inference_mode()
    def step(self, tokens: list[int], sequence: Sequence) -> torch.Tensor:
        """Compute ``tokens`` after those in ``sequence``; return the last one's logits."""
        cache = Cache(layers=[_PagedLayer(sequence, layer) for layer in range(self.sizes.layers)])
        # By position: transformers renamed the cache's argument (past_key_values, cache).
        output = self._model(
            torch.tensor([tokens]), None, None, cache, use_cache=True, logits_to_keep=1
        )
        sequence.length += len(tokens)
        return output.logits[0, -1]

    def prefill(
        self, tokens: list[int], sequence: Sequence, after_chunk: Callable[[], None]
    ) -> torch.Tensor:
        """Compute the ``tokens`` missing in ``sequence`` chunk by chunk; return the last logits."""
        chunk = self.sizes.chunk_tokens
        while True:
            start = sequence.length
            # Chunks end at multiples of their size, wherever the first one begins.
            logits = self.step(tokens[start : start - start % chunk + chunk], sequence)
            after_chunk()
            if sequence.length == len(tokens):
                return logits

    def decode(self, logits: torch.Tensor, sequence: Sequence, count: int) -> list[int]:
        """Return the ``count`` tokens that greedily follow ``logits``."""
        tokens = [int(logits.argmax())]
        while len(tokens) < count:
            tokens.append(int(self.step(tokens[-1:], sequence).argmax()))
        return tokens
