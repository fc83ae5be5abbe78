"""Arithmetic word problems in the form of GSM8K: a seeded generator, and the file it has written.

The file is what is used, so that scores of different machines and Python versions compare; the
generator says where it comes from.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

__all__ = [
    "DATA",
    "NUM_PROBLEMS",
    "NUM_SHOTS",
    "PROBLEMS_FILE",
    "SHOTS_FILE",
    "Problem",
    "generate",
    "load",
    "prompt",
    "to_jsonl",
]

DATA = Path(__file__).parent / "data"
PROBLEMS_FILE, SHOTS_FILE = DATA / "word_problems.jsonl", DATA / "shots.jsonl"
NUM_PROBLEMS, NUM_SHOTS = 120, 5
SEED = 1729

NAMES = (
    "Anna", "Ben", "Clara", "David", "Emma", "Frank", "Grace", "Henry",
    "Irene", "Jack", "Kate", "Leo", "Mia", "Noah", "Olga", "Paul",
)  # fmt: skip
THINGS = (
    "apples", "books", "buttons", "cards", "coins",
    "marbles", "pencils", "shells", "stamps", "stickers",
)  # fmt: skip
# Numbers up to which a model of 135M parameters is right about half of the time.
MOST, MOST_FACTOR = 40, 12


class Problem(NamedTuple):
    """One word problem.

    Attributes:
        question: in words.
        answer: the calculation, a line break, `####` and the result.
    """

    question: str
    answer: str

    @property
    def result(self) -> str:
        """The number after `####`."""
        return self.answer.rpartition("#### ")[2]


def generate(seed: int = SEED) -> tuple[list[Problem], list[Problem]]:
    """Return the examples that prompts start with, and the problems; no question is twice in them.

    Args:
        seed: of Python's generator.

    Example:
        >>> shots, problems = generate()
        >>> len(shots), len(problems)
        (5, 120)
    """
    rng = random.Random(seed)
    kinds = (_gets, _loses, _together, _more, _boxes, _two_steps)
    made: dict[str, Problem] = {}
    # The kinds take turns: the examples show each form but the last one.
    while len(made) < NUM_SHOTS + NUM_PROBLEMS:
        problem = kinds[len(made) % len(kinds)](rng)
        made.setdefault(problem.question, problem)
    problems = list(made.values())
    return problems[:NUM_SHOTS], problems[NUM_SHOTS:]


def load(path: Path) -> list[Problem]:
    """Read problems from a file.

    Args:
        path: JSON lines with `question` and `answer`.
    """
    lines = path.read_text("utf-8").splitlines()
    return [Problem(**json.loads(line)) for line in lines]


def to_jsonl(problems: Iterable[Problem]) -> str:
    """Return problems as JSON lines.

    Args:
        problems: what to write.
    """
    return "".join(json.dumps(problem._asdict()) + "\n" for problem in problems)


def prompt(shots: Iterable[Problem], problem: Problem) -> str:
    """Return a problem behind solved examples, as lm-evaluation-harness writes GSM8K.

    Args:
        shots: the examples.
        problem: what is asked.
    """
    solved = "".join(f"Question: {shot.question}\nAnswer: {shot.answer}\n\n" for shot in shots)
    return f"{solved}Question: {problem.question}\nAnswer:"


def _draw(rng: random.Random) -> tuple[str, str, str, int, int]:
    name, other = rng.sample(NAMES, 2)
    return name, other, rng.choice(THINGS), rng.randint(3, MOST), rng.randint(2, MOST)


def _solved(question: str, calculation: str, result: int) -> Problem:
    return Problem(question, f"{calculation} = {result}\n#### {result}")


def _gets(rng: random.Random) -> Problem:
    name, _, things, a, b = _draw(rng)
    text = f"{name} has {a} {things} and gets {b} more. How many are there now?"
    return _solved(text, f"{a} + {b}", a + b)


def _loses(rng: random.Random) -> Problem:
    name, _, things, a, b = _draw(rng)
    a, b = max(a, b) + 1, min(a, b)
    text = f"{name} has {a} {things} and loses {b}. How many are left?"
    return _solved(text, f"{a} - {b}", a - b)


def _together(rng: random.Random) -> Problem:
    name, other, things, a, b = _draw(rng)
    text = f"{name} has {a} {things} and {other} has {b}. How many together?"
    return _solved(text, f"{a} + {b}", a + b)


def _more(rng: random.Random) -> Problem:
    name, other, things, a, b = _draw(rng)
    text = f"{name} has {a} {things} and {other} has {b} more. How many has {other}?"
    return _solved(text, f"{a} + {b}", a + b)


def _boxes(rng: random.Random) -> Problem:
    name, _, things, _, _ = _draw(rng)
    a, b = rng.randint(2, MOST_FACTOR), rng.randint(2, MOST_FACTOR)
    text = f"{name} has {a} boxes of {b} {things}. How many {things}?"
    return _solved(text, f"{a} * {b}", a * b)


def _two_steps(rng: random.Random) -> Problem:
    name, _, things, a, b = _draw(rng)
    c = rng.randint(2, a + b - 1)
    text = f"{name} has {a} {things}, gets {b} more, then loses {c}. How many are left?"
    return _solved(text, f"{a} + {b} - {c}", a + b - c)
