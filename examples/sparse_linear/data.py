"""Sparse rows with labels: the standard library's own source, or a file in libsvm's format."""

import dataclasses
import sysconfig
import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from scipy.sparse import csr_matrix
from sklearn.datasets import load_svmlight_file
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import normalize

STDLIB = Path(sysconfig.get_path("stdlib"))
# Packages of CPython with several files each; some distributions leave out the last two.
PACKAGES = (
    "asyncio",
    "email",
    "http",
    "importlib",
    "multiprocessing",
    "unittest",
    "urllib",
    "xml",
    "idlelib",
    "tkinter",
)
SMALL_PACKAGES = ("email", "http", "unittest")
CHUNK_LINES = 8


@dataclasses.dataclass(frozen=True)
class Rows:
    """Sparse rows and their labels.

    Attributes:
        features: float32[n, features], rows of length 1.
        labels: int32[n], numbers of classes.
    """

    features: csr_matrix
    labels: np.ndarray


@dataclasses.dataclass(frozen=True)
class Dataset:
    """Rows to train on, rows to test on, and the names of their classes."""

    train: Rows
    test: Rows
    classes: tuple[str, ...]

    @property
    def majority(self) -> float:
        """The test accuracy of a guess that is always the commonest class of the training set."""
        guess = np.bincount(self.train.labels).argmax()
        return float(np.mean(self.test.labels == guess))


def source_chunks(features: int, packages: Sequence[str] = PACKAGES) -> Dataset:
    """Chunks of source code, with the package of the standard library that each comes from.

    Test chunks come from other files than training chunks. A chunk that also occurs in training is
    not tested.

    Args:
        features: number of features, to which trigrams are hashed.
        packages: names of the classes. Packages of fewer than two files in this Python are left
            out.

    Raises:
        ValueError: fewer than two packages remain.
    """
    present = [name for name in packages if len(python_files(name)) > 1]
    if len(present) < 2:
        raise ValueError(f"{STDLIB} has the source of {present} only: give --libsvm FILE instead")
    train: list[tuple[str, int]] = []
    test: list[tuple[str, int]] = []
    for label, name in enumerate(present):
        for files, part in zip(split_files(python_files(name)), (train, test)):
            part.extend((chunk, label) for file in files for chunk in chunks(file))
    seen = {chunk for chunk, _ in train}
    test = [(chunk, label) for chunk, label in test if chunk not in seen]
    return Dataset(_rows(train, features), _rows(test, features), tuple(present))


def python_files(package: str) -> list[Path]:
    """The package's own source, in a fixed order, without its tests."""
    root = STDLIB / package
    files = [path.relative_to(root) for path in root.rglob("*.py")]
    return [root / f for f in sorted(files) if not any("test" in part for part in f.parts[:-1])]


def split_files(files: Sequence[Path]) -> tuple[list[Path], list[Path]]:
    """Files to train on, and one in four to test on: of all sizes, and the same for every seed."""
    order = sorted(files, key=lambda path: (path.stat().st_size, path))
    return [f for i, f in enumerate(order) if i % 4 != 1], order[1::4]


def chunks(file: Path) -> list[str]:
    """The file's text in chunks of a few lines, with uniform white space and no blank lines.

    A last chunk that is too short for a trigram, such as a bracket, has no features, and is left
    out.
    """
    lines = [" ".join(line.split()) for line in file.read_text("utf-8").splitlines()]
    lines = [line for line in lines if line]
    starts = range(0, len(lines), CHUNK_LINES)
    found = ["\n".join(lines[start : start + CHUNK_LINES]) for start in starts]
    return [chunk for chunk in found if len(chunk) > 2]


def hashed_trigrams(text: str, features: int) -> Counter[int]:
    """Counts of a text's features. A feature is the CRC-32 of a trigram, modulo `features`."""
    found = Counter(text[i : i + 3] for i in range(len(text) - 2))
    counts: Counter[int] = Counter()
    for trigram, count in found.items():
        counts[zlib.crc32(trigram.encode()) % features] += count  # str's own hash is salted
    return counts


def _rows(examples: Iterable[tuple[str, int]], features: int) -> Rows:
    columns: list[int] = []
    values: list[int] = []
    ends, labels = [0], []
    for text, label in examples:
        counts = hashed_trigrams(text, features)
        columns.extend(counts)
        values.extend(counts.values())
        ends.append(len(columns))
        labels.append(label)
    matrix = csr_matrix(
        (np.array(values, np.float32), np.array(columns, np.int32), np.array(ends, np.int32)),
        shape=(len(labels), features),
    )
    return Rows(normalize(matrix), np.array(labels, np.int32))


def libsvm(file: Path) -> Dataset:
    """Reads a file such as those of the URL and Webspam sets. A fifth of its rows are for testing.

    Args:
        file: path of a file of lines "label index:value ...", with at least two labels. Its name
            may end in .gz or .bz2.

    Raises:
        ValueError: the file can't be read, or its rows can't be divided.
    """
    try:
        features, targets = load_svmlight_file(str(file), dtype=np.float32)
        kinds, labels = np.unique(targets, return_inverse=True)
        if len(kinds) < 2:
            raise ValueError(f"it has the labels {kinds.tolist()} only, and two are needed")
        parts = train_test_split(
            normalize(features), labels.astype(np.int32), test_size=0.2, stratify=labels,
            random_state=0,
        )  # fmt: skip
    except (OSError, ValueError) as error:
        raise ValueError(f"--libsvm {file}: {error}") from error
    train_rows, test_rows, train_labels, test_labels = parts
    return Dataset(
        Rows(train_rows, train_labels),
        Rows(test_rows, test_labels),
        tuple(f"{kind:g}" for kind in kinds),
    )
