"""What the model is asked: a short question, and one whose answer hides in a long text."""

from __future__ import annotations

import bisect
from dataclasses import dataclass
from itertools import cycle
from typing import Any

from torch import Tensor

from mla_ops.errors import InvalidInputError

__all__ = ["Prompt", "needle_prompt", "question_prompt"]

QUESTION = "What is the capital of Japan?"
ANSWER = "Tokyo"
SECRET = "7314"
NEEDLE = f"The secret code of the blue house is {SECRET}."
NEEDLE_QUESTION = "What is the secret code of the blue house?"
DEPTH = 0.9
"""Where the fact stands in the text: a 135M model overlooks it in the first half of a long one."""
SHORTEST_PARAGRAPH = 80


@dataclass(frozen=True)
class Prompt:
    """One question, ready for `generate`.

    Attributes:
        input_ids: the whole prompt, `[1, S]`.
        question: what is asked, in words.
        expected: what a right answer contains.
    """

    input_ids: Tensor
    question: str = ""
    expected: str = ""


def question_prompt(tokenizer: Any) -> Prompt:
    """Return the short question.

    Args:
        tokenizer: the model's, with a chat template.
    """
    return Prompt(_encode(tokenizer, QUESTION), QUESTION, ANSWER)


def needle_prompt(tokenizer: Any, filler: str, tokens: int) -> Prompt:
    """Return a question about one sentence inside a long text.

    Args:
        tokenizer: the model's, with a chat template.
        filler: the text; repeated when it is too short.
        tokens: length of the prompt; it is cut between words, so it may be a few tokens shorter.

    Raises:
        InvalidInputError: not even the question fits.
    """

    def encode(num_words: int) -> Tensor:
        return _encode(tokenizer, _message(paragraphs, num_words))

    paragraphs = _paragraphs(filler)
    shortest = encode(0).shape[1]
    if tokens < shortest:
        raise InvalidInputError(f"context must be at least {shortest} tokens, got {tokens}")
    # A word has at least one token: `tokens` words are never too few.
    lengths = range(tokens + 1)
    fitting = bisect.bisect_right(lengths, tokens, key=lambda words: encode(words).shape[1])
    return Prompt(encode(lengths[fitting - 1]), NEEDLE_QUESTION, SECRET)


def _encode(tokenizer: Any, message: str) -> Tensor:
    ids: Tensor = tokenizer.apply_chat_template(
        [{"role": "user", "content": message}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )["input_ids"]
    return ids


def _paragraphs(text: str) -> list[list[str]]:
    """Split a text into paragraphs of words; headings are left out."""
    return [part.split() for part in text.split("\n\n") if len(part.strip()) > SHORTEST_PARAGRAPH]


def _message(paragraphs: list[list[str]], num_words: int) -> str:
    taken: list[str] = []
    left = num_words
    for words in cycle(paragraphs):
        if left <= 0:
            break
        taken.append(" ".join(words[:left]))
        left -= len(words)
    taken.insert(round(len(taken) * DEPTH), NEEDLE)
    document = "\n\n".join(taken)
    return (
        f"Here is a document:\n\n{document}\n\n"
        f"Answer this question using only the document: {NEEDLE_QUESTION}"
    )
