"""The example of sparse linear classifiers: data, batches, lossless exchanges, and the command."""

import dataclasses
import json
import re
import subprocess
import sys
import types

import matplotlib.image
import numpy as np
import pytest
import running
from scipy.sparse import csr_matrix
from workers import mesh, some

from jaxsparse import Link

FOLDER = running.ROOT / "examples" / "sparse_linear"
FEATURES = 400
OTHER_WORKERS = dict.fromkeys((1, 2, 5, 8), pytest.mark.thorough)


@pytest.fixture(scope="module")
def example():
    """The example's modules. Their short names are used by other examples, too."""
    forget_examples()
    path = list(sys.path)
    sys.path.insert(0, str(FOLDER))
    import batches
    import data
    import exchange
    import train

    yield types.SimpleNamespace(data=data, batches=batches, exchange=exchange, train=train)
    sys.path[:] = path
    forget_examples()


def forget_examples():
    for name, module in list(sys.modules.items()):
        if (getattr(module, "__file__", None) or "").startswith(str(running.ROOT / "examples")):
            del sys.modules[name]


@pytest.fixture(scope="module")
def small(example):
    return example.data.source_chunks(2**12, example.data.SMALL_PACKAGES)


def dataset_of(example, classes, seed=0):
    """Random sparse rows, some without features. A linear model can tell their labels."""
    rng = np.random.default_rng(seed)
    dense = rng.normal(size=(60, FEATURES)) * (rng.random((60, FEATURES)) < 0.015)
    dense[::20] = 0
    labels = (dense @ rng.normal(size=(FEATURES, classes))).argmax(axis=1).astype(np.int32)
    rows = example.data.Rows(csr_matrix(dense.astype(np.float32)), labels)
    return example.data.Dataset(rows, rows, tuple(map(str, range(classes))))


def task_of(example, model, classes, workers, steps=7, per_worker=3):
    dataset = dataset_of(example, classes)
    batches = example.batches.Batches(
        dataset.train,
        workers=workers,
        per_worker=per_worker,
        columns=1 if classes == 2 else classes,
        steps=steps,
        seed=1,
    )
    return example.train.Task(model, dataset, batches, lr=2.0)


def trained(example, task, name, workers):
    known = example.exchange.exchanges(task.batches.room)
    return example.train.train(task, known[name], mesh(workers), name=name)


def chosen_rows(workers, per_worker=3, steps=7):
    return np.random.default_rng(1).integers(60, size=(steps, workers, per_worker))


def slow_sgd(task, workers):
    """Plain SGD on dense rows, in float64: weights and losses."""
    rows, labels = task.dataset.train.features.toarray().astype(float), task.dataset.train.labels
    columns = task.columns
    weights, losses = np.zeros((FEATURES, columns)), []
    for chosen in chosen_rows(workers):
        x, y = rows[chosen.reshape(-1)], labels[chosen.reshape(-1)]
        scores = x @ weights
        hot = y[:, None] if columns == 1 else np.eye(columns)[y]
        sign = 2.0 * hot - 1
        if task.model == "svm":
            loss = np.maximum(1 - sign * scores, 0).sum(axis=1)
            slope = -sign * (sign * scores < 1)
        elif columns == 1:
            loss = np.log1p(np.exp(-sign * scores))[:, 0]
            slope = -sign / (1 + np.exp(sign * scores))
        else:
            p = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
            loss, slope = -np.log((p * hot).sum(axis=1)), p - hot
        losses.append(loss.mean())
        weights -= task.lr * x.T @ slope / len(y)
    return weights.reshape(-1), losses


@pytest.mark.parametrize(
    ("model", "classes", "name", "workers"),
    [
        ("logistic", 4, "dense", 3),
        ("svm", 2, "split_allgather", 3),
        pytest.param("logistic", 4, "split_allgather", 3, marks=pytest.mark.slow),
        pytest.param("logistic", 2, "recursive_double", 3, marks=pytest.mark.slow),
        pytest.param("svm", 4, "all_gather", 3, marks=pytest.mark.slow),
        *[
            pytest.param("logistic", 2, name, workers, marks=mark)
            for name in ("split_allgather", "recursive_double", "dsar_split_allgather", "ring")
            for workers, mark in OTHER_WORKERS.items()
        ],
    ],
)
def test_every_exchange_trains_like_sgd_on_all_rows(example, model, classes, name, workers):
    task = task_of(example, model, classes, workers)
    run = trained(example, task, name, workers)
    weights, losses = slow_sgd(task, workers)
    assert np.abs(weights).max() > 0.3
    np.testing.assert_allclose(run.weights, weights, atol=2e-6)
    np.testing.assert_allclose(run.loss, losses, rtol=1e-5)
    scores = task.dataset.test.features @ weights.reshape(FEATURES, -1)
    guesses = scores[:, 0] > 0 if classes == 2 else scores.argmax(axis=1)
    assert run.accuracy == pytest.approx(np.mean(guesses == task.dataset.test.labels))
    if name == "dense":
        assert run.payload == 4 * task.size
        assert run.received == pytest.approx(8 * task.size * (workers - 1) / workers)
    elif workers == 3:
        assert 0 < run.received < 4 * task.size  # nothing that is called sparse travels dense


@pytest.mark.parametrize("field", some(["to_owner", "of_owner"], ["of_owner"]))
def test_room_is_what_the_fullest_step_needs(example, field):
    task = task_of(example, "logistic", 4, 3)
    room = task.batches.room
    scarce = dataclasses.replace(room, **{field: getattr(room, field) - 1})
    exchange = example.exchange.exchanges(scarce)["split_allgather"]
    with pytest.raises(RuntimeError, match="split_allgather: 1 entries found no room in step"):
        example.train.train(task, exchange, mesh(3), name="split_allgather")


def test_auto_is_the_simplest_of_the_fastest(example):
    """Dense has 4 messages, doubling 3, a gather 2, and as few bytes as any."""
    room = example.batches.Room(features=10, row=5, to_owner=15, of_owner=40)
    fastest = lambda *link: example.exchange.fastest(room, 30, 3000, 3, Link(*link))
    assert fastest(1.0, 1e15) == "all_gather"
    # Where messages take no time, bytes decide: 2 * 2 * 30 words, or 2 * (2 * (15 + 40) + 1).
    assert fastest(1e-12, 1e6) == "all_gather"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--workers", "9"], "--workers: 9 is out of range"),
        (["--features", "10"], "--features: 10 is out of range"),
        (["--libsvm", "missing"], "--libsvm missing: .*No such file"),
        (["--libsvm", "text"], "--libsvm text: "),
        (["--libsvm", "ones"], r"--libsvm ones: it has the labels \[1.0\] only"),
        (["--libsvm", "wide"], r"--libsvm wide: 2,147,483,648 weights are too many"),
    ],
)
def test_errors_name_the_flag(example, flags, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").write_text("no numbers here\n")
    (tmp_path / "ones").write_text("1 1:1\n1 2:1\n")
    (tmp_path / "wide").write_text(f"1 {2**31 - 1}:1\n-1 0:1\n" * 5)
    with pytest.raises(SystemExit):
        example.train.main(flags)
    assert re.search(message, capsys.readouterr().err)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_the_command_writes_table_curves_and_figure(tmp_path):
    env = running.ENV | running.QUICK | {"COLUMNS": "80"}
    flags = ["--small", "--workers", "3", "--model", "svm", "--out", "a/b"]
    flags += ["--exchange", "dense", "auto", "--bandwidth", "0.01"]
    done = subprocess.run(
        [sys.executable, str(FOLDER / "train.py"), *flags],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    content = json.loads((tmp_path / "a/b/results.json").read_text())
    runs = {run["exchange"]: run for run in content["runs"]}
    assert list(runs) == ["dense", "auto"]
    size = 3 * 2**14
    assert runs["dense"]["payload_bytes"] == 4 * size
    assert runs["dense"]["received_bytes"] == pytest.approx(2 * 2 / 3 * 4 * size)
    assert runs["auto"]["received_bytes"] < runs["dense"]["received_bytes"] / 5
    for run in runs.values():
        assert len(run["steps"]) == len(run["loss"]) == 8
        np.testing.assert_allclose(run["loss"], runs["dense"]["loss"], rtol=1e-5)
        assert run["loss"][-1] < run["loss"][0]
    printed = done.stdout.splitlines()
    row = next(line for line in printed if re.match(r"svm +auto ", line))
    assert float(row.split()[-1]) < 1e-5
    assert re.search(r"auto takes (split_allgather|all_gather) on", " ".join(printed))
    markdown = (tmp_path / "a/b/results.md").read_text()
    assert markdown.count("| svm |") == 2
    assert "Always guessing" in markdown
    height, width, _ = matplotlib.image.imread(tmp_path / "a/b/loss.png").shape
    assert height > 300
    assert width > 300


@pytest.mark.slow
def test_processes_train_as_the_devices_of_one(tmp_path):
    command = [sys.executable, FOLDER / "train.py", "--small", "--model", "logistic"]
    command += ["--exchange", "dense", "all_gather", "--out"]
    outcome, _ = running.in_processes(
        [*command, tmp_path / "two"], 2, env=running.ENV | running.QUICK
    )
    assert outcome.status == 0, outcome.report
    one = [*map(str, [*command, tmp_path / "one"]), "--workers", "2"]
    subprocess.run(one, env=running.ENV | running.QUICK, check=True, stdout=subprocess.DEVNULL)
    found, expected = (
        json.loads((tmp_path / name / "results.json").read_text())["runs"]
        for name in ("two", "one")
    )
    for a, b in zip(found, expected, strict=True):
        assert a["test_accuracy"] == b["test_accuracy"]
        assert a["received_bytes"] == b["received_bytes"] > 0
        np.testing.assert_allclose(a["loss"], b["loss"], rtol=1e-4)
    assert "| ms a step |" in (tmp_path / "two" / "results.md").read_text()
    assert "ms a step" not in (tmp_path / "one" / "results.md").read_text()


@pytest.mark.parametrize("case", some([(4, 3), (2, 5), (3, 1)], [(4, 3)]), ids=str)
def test_coordinate_descent_is_that_of_one_machine(example, case):
    """By both exchanges, in float64 and with dense arrays; and nothing else travels."""
    import coordinates

    classes, workers = case
    dataset = dataset_of(example, classes)
    columns, iterations, count = 1 if classes == 2 else classes, 12, 9
    draws = coordinates.Draws(
        dataset.train, columns, workers=workers, coordinates=count, rate=0.5, seed=2
    )
    x, labels = dataset.train.features.toarray().astype(float), dataset.train.labels
    hot = labels[:, None] if columns == 1 else np.eye(columns)[labels]
    weights, losses = np.zeros((FEATURES, columns)), []
    for moved in draws.take(iterations):
        scores = x @ weights
        if columns == 1:
            p = 1 / (1 + np.exp(-scores))
            losses.append(-np.log(np.where(hot, p, 1 - p)).mean())
        else:
            p = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
            losses.append(-np.log((p * hot).sum(axis=1)).mean())
        gradient = x.T @ (p - hot) / len(x)
        slices = moved.indices // -(-weights.size // workers)
        np.testing.assert_array_equal(slices, np.arange(workers)[:, None].repeat(count, 1))
        assert len(np.unique(moved.indices)) == workers * count
        for i in moved.indices.reshape(-1):
            at = divmod(int(i), columns)
            weights[at] -= 0.5 * 4 / (x[:, at[0]] ** 2).mean() * gradient[at]
    assert losses[-1] < 0.9 * losses[0]
    for name, length in (("dense", -(-weights.size // workers)), ("sparse", 2 * count)):
        run = coordinates.train(dataset, draws, name, mesh(workers), iterations)
        np.testing.assert_allclose(run.weights, weights.reshape(-1), atol=2e-5)
        np.testing.assert_allclose(run.losses, losses, rtol=1e-4)
        assert run.received == 4 * length * (workers - 1)
