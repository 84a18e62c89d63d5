"""Word-level corpora: Python's own documentation, or a file of space-separated tokens.

Every CPython carries its reference manual (`pydoc_data.topics`) and the docstrings of its standard
library. Together they have half a million words and punctuation marks, and nothing is downloaded.
They differ a little from one Python version to the next.
"""

import ast
import collections
import re
import sysconfig
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from pydoc_data import topics
from typing import NamedTuple

import numpy as np

UNKNOWN, END = "<unk>", "<eos>"
Document = list[str]

_TOKEN = re.compile(r"[a-z]+(?:'[a-z]+)?|\d+|_+|[^\w\s]")
# Folders that some distributions leave out or add to.
_ELSEWHERE = {"site-packages", "dist-packages", "test", "tests", "lib2to3", "idlelib", "turtledemo"}


class Corpus(NamedTuple):
    """Two texts, each as one long row of word numbers. Every document ends with `END`."""

    train: np.ndarray  # int32[n]
    valid: np.ndarray  # int32[m]
    words: tuple[str, ...]  # by number: `UNKNOWN`, `END`, then the most frequent of train


def tokens(text: str) -> Document:
    """Lower-case words, numbers and single punctuation marks.

    >>> tokens("Don't use __init__(self, 2.5)!")
    ["don't", 'use', '__', 'init', '__', '(', 'self', ',', '2', '.', '5', ')', '!']
    """
    return _TOKEN.findall(text.lower())


def manual() -> list[Document]:
    """The topics of Python's reference manual, in the order of their names."""
    return [tokens(text) for _, text in sorted(topics.topics.items())]


def docstrings(root: Path | None = None) -> list[Document]:
    """The docstrings of each file below `root`, in the order of their paths. Imports nothing.

    Args:
        root: folder of Python sources. None: the standard library.
    """
    root = Path(sysconfig.get_path("stdlib")) if root is None else root
    documents = []
    for path in sorted(root.rglob("*.py")):
        if not _ELSEWHERE.intersection(path.relative_to(root).parts):
            text = "\n".join(_docstrings(path))
            if text:
                documents.append(tokens(text))
    return documents


def _docstrings(path: Path) -> Iterator[str]:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, kinds) and (text := ast.get_docstring(node)):
            yield text


def read(path: Path) -> list[Document]:
    """The lines that are not blank, split at spaces: the format of WikiText-2 and Penn Treebank.

    Raises:
        ValueError: the file has no tokens.
    """
    lines = map(str.split, path.read_text(encoding="utf-8").splitlines())
    documents = [line for line in lines if line]
    if not documents:
        raise ValueError(f"{path} has no tokens: give a text file of tokens separated by spaces")
    return documents


def split(documents: Sequence[Document], one_in: int = 10) -> tuple[list[Document], list[Document]]:
    """Documents to train on, and about one in `one_in` to validate on, by a hash of the words.

    The same document is always on the same side, whatever its neighbours and however often it
    occurs. So no copy of a training document is in the validation text.
    """
    train: list[Document] = []
    valid: list[Document] = []
    for document in documents:
        chosen = zlib.crc32(" ".join(document).encode()) % one_in == 0
        (valid if chosen else train).append(document)
    return train, valid


def build(train: Sequence[Document], valid: Sequence[Document], vocabulary: int) -> Corpus:
    """Numbers words by their frequency in `train`. The rarest become `UNKNOWN`.

    Args:
        train: documents to train on, and to take the vocabulary from.
        valid: documents to validate on.
        vocabulary: largest number of words to tell apart, `UNKNOWN` and `END` included.

    Raises:
        ValueError: `train` or `valid` has no tokens, or the vocabulary is below 3.
    """
    if vocabulary < 3:
        raise ValueError(f"vocabulary={vocabulary} must be at least 3: {UNKNOWN}, {END} and a word")
    for name, documents in (("train", train), ("valid", valid)):
        if not any(documents):
            raise ValueError(f"{name} has no tokens: give a longer text, or a file for each")
    counts = collections.Counter(word for document in train for word in document)
    for special in (UNKNOWN, END):
        counts.pop(special, None)
    by_frequency = sorted(counts, key=lambda word: (-counts[word], word))
    words = (UNKNOWN, END, *by_frequency[: vocabulary - 2])
    numbers = {word: number for number, word in enumerate(words)}

    def number(documents: Iterable[Document]) -> np.ndarray:
        text = [numbers.get(word, 0) for document in documents for word in (*document, END)]
        return np.array(text, np.int32)

    return Corpus(number(train), number(valid), words)


def batches(text: np.ndarray, windows: int, length: int, steps: int, seed: int) -> Iterator:
    """Random windows for all workers together, int32[windows, length + 1]: inputs and targets."""
    rng = np.random.default_rng(seed)
    for _ in range(steps):
        starts = rng.integers(len(text) - length, size=windows)
        yield text[starts[:, None] + np.arange(length + 1)]


def consecutive(text: np.ndarray, length: int) -> np.ndarray:
    """The whole text as windows, int32[n, length + 1]: inputs and targets.

    A window's last word, which is only a target, is the next window's first input. Fewer than
    `length` words at the end are left out.
    """
    starts = np.arange(0, len(text) - length, length)
    return text[starts[:, None] + np.arange(length + 1)]
