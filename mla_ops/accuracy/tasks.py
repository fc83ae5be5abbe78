"""What is asked: every item is a prompt of tokens, and says how its answer is scored."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from mla_ops.accuracy.problems import DATA, PROBLEMS_FILE, SHOTS_FILE, load, prompt

__all__ = [
    "ARITHMETIC",
    "NEEDLE",
    "PERPLEXITY",
    "ByteCodec",
    "Codec",
    "Item",
    "Sizes",
    "TokenizerCodec",
    "build_items",
]

PERPLEXITY, ARITHMETIC, NEEDLE = "constitution", "word_problems", "needle"
TEXT_FILE = DATA / "constitution.txt"
ARITHMETIC_TOKENS, NEEDLE_TOKENS = 20, 16
PLACES = ("house", "boat", "garden", "bridge", "tower", "market", "school", "mill")
COLOURS = ("blue", "green", "red", "white", "yellow", "grey", "brown")


class Codec(Protocol):
    """Text to tokens and back."""

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, nothing added."""

    def chat(self, message: str) -> list[int]:
        """Return a prompt that asks for the answer to a message."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of generated tokens."""


class TokenizerCodec:
    """The tokenizer of a transformers model."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, nothing added."""
        return list(self._tokenizer.encode(text, add_special_tokens=False, verbose=False))

    def chat(self, message: str) -> list[int]:
        """Return the message in the model's chat template."""
        messages = [{"role": "user", "content": message}]
        text = self._tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=False
        )
        return self.encode(text)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, special ones left out."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))


class ByteCodec:
    """Bytes as tokens, for a model that nobody has trained."""

    def encode(self, text: str) -> list[int]:
        """Return the bytes of a text."""
        return list(text.encode("utf-8"))

    def chat(self, message: str) -> list[int]:
        """Return the bytes of a message."""
        return self.encode(message)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text; a token that is no byte becomes a question mark."""
        return bytes(token if token < 256 else 63 for token in tokens).decode("utf-8", "replace")


@dataclass(frozen=True)
class Item:
    """One question.

    Attributes:
        task: `constitution`, `word_problems` or `needle`.
        name: what it is, within the task.
        prompt: its tokens.
        new_tokens: most tokens of an answer; 0 where the prompt itself is scored.
        expected: the right answer; empty where the prompt is scored.
    """

    task: str
    name: str
    prompt: tuple[int, ...]
    new_tokens: int = 0
    expected: str = ""


@dataclass(frozen=True)
class Sizes:
    """How much is asked.

    Attributes:
        windows: pieces of the text whose perplexity is taken.
        window_tokens: tokens of a piece.
        problems: arithmetic problems.
        needle_lengths: prompt lengths of the needle task, in tokens.
        needle_depths: where the needle stands, from 0 (start) to 1 (end).
    """

    windows: int
    window_tokens: int
    problems: int
    needle_lengths: tuple[int, ...]
    needle_depths: tuple[float, ...]


def build_items(codec: Codec, sizes: Sizes) -> list[Item]:
    """Return all items, task by task.

    Args:
        codec: the model's.
        sizes: how many and how long.
    """
    return [*_perplexity(codec, sizes), *_arithmetic(codec, sizes), *_needles(codec, sizes)]


def _perplexity(codec: Codec, sizes: Sizes) -> list[Item]:
    tokens, size = codec.encode(TEXT_FILE.read_text("utf-8")), sizes.window_tokens
    starts = range(0, len(tokens) - size + 1, size)[: sizes.windows]
    return [
        Item(PERPLEXITY, f"tokens {start} to {start + size}", tuple(tokens[start : start + size]))
        for start in starts
    ]


def _arithmetic(codec: Codec, sizes: Sizes) -> list[Item]:
    shots = load(SHOTS_FILE)
    return [
        Item(
            ARITHMETIC,
            problem.question,
            tuple(codec.encode(prompt(shots, problem))),
            ARITHMETIC_TOKENS,
            problem.result,
        )
        for problem in load(PROBLEMS_FILE)[: sizes.problems]
    ]


def _needles(codec: Codec, sizes: Sizes) -> list[Item]:
    sentences = re.findall(r"[^.;:]+[.;:]\s*", TEXT_FILE.read_text("utf-8"))
    costs = [len(codec.encode(sentence)) for sentence in sentences]
    rng = random.Random(0)
    items = []
    for length in sizes.needle_lengths:
        for depth in sizes.needle_depths:
            what = f"{rng.choice(COLOURS)} {rng.choice(PLACES)}"
            code = str(rng.randint(1000, 9999))
            chat = _needle_chat(codec, what, code, depth)
            room, used = length - len(chat([])), 0
            taken: list[str] = []
            # From another place each time: the model must not know where the needle is.
            first = rng.randrange(len(sentences))
            while used + costs[(first + len(taken)) % len(sentences)] <= room:
                index = (first + len(taken)) % len(sentences)
                taken.append(sentences[index])
                used += costs[index]
            while len(chat(taken)) > length:  # tokens may split otherwise where sentences meet
                taken.pop()
            name = f"{length} tokens, depth {depth:g}"
            items.append(Item(NEEDLE, name, tuple(chat(taken)), NEEDLE_TOKENS, code))
    return items


def _needle_chat(
    codec: Codec, what: str, code: str, depth: float
) -> Callable[[list[str]], list[int]]:
    """Return what makes a prompt of the sentences around the needle."""
    fact = f"The secret code of the {what} is {code}. "
    question = f"What is the secret code of the {what}?"

    def chat(sentences: list[str]) -> list[int]:
        where = round(len(sentences) * depth)
        document = "".join([*sentences[:where], fact, *sentences[where:]])
        return codec.chat(
            f"Here is a document:\n\n{document}\n\n"
            f"Answer this question using only the document: {question}"
        )

    return chat
