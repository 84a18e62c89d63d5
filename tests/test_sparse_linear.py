"""Sparse linear classifiers: lossless exchanges, coordinate descent, and the command."""

import dataclasses
import importlib
import subprocess
import sys

import numpy as np
import pytest
import running
from scipy.sparse import csr_matrix
from workers import mesh, some

BENCHMARKS = running.ROOT / "benchmarks"
FEATURES = 400
OTHER_WORKERS = dict.fromkeys((1, 2, 5, 8), pytest.mark.thorough)


@pytest.fixture(scope="module")
def example():
    """The benchmark, whose path the other one's is, too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])
        yield importlib.import_module("sparse_linear")


def dataset_of(example, classes, seed=0):
    """Random sparse rows, some without features. A linear model can tell their labels."""
    rng = np.random.default_rng(seed)
    dense = rng.normal(size=(60, FEATURES)) * (rng.random((60, FEATURES)) < 0.015)
    dense[::20] = 0
    labels = (dense @ rng.normal(size=(FEATURES, classes))).argmax(axis=1).astype(np.int32)
    rows = example.Rows(csr_matrix(dense.astype(np.float32)), labels)
    return example.Dataset(rows, rows, classes)


def task_of(example, model, classes, workers, steps=7, per_worker=3):
    dataset = dataset_of(example, classes)
    batches = example.Batches(
        dataset.train,
        workers=workers,
        per_worker=per_worker,
        columns=dataset.columns,
        steps=steps,
        seed=1,
    )
    return example.Task(model, dataset, batches, lr=2.0)


def trained(example, task, name, workers):
    return example.train(task, example.exchanges(task.batches.room)[name], mesh(workers))


def chosen_rows(workers, per_worker=3, steps=7):
    return np.random.default_rng(1).integers(60, size=(steps, workers, per_worker))


def slow_sgd(task, workers):
    """Plain SGD on dense rows, in float64: weights and losses."""
    rows, labels = task.dataset.train.features.toarray().astype(float), task.dataset.train.labels
    columns = task.dataset.columns
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
        pytest.param("svm", 2, "split_allgather", 3, marks=pytest.mark.slow),
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
    np.testing.assert_allclose(run.losses, losses, rtol=1e-5)
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
    exchange = example.exchanges(scarce)["split_allgather"]
    with pytest.raises(RuntimeError, match="1 entries found no room in step"):
        example.train(task, exchange, mesh(3))


@pytest.mark.slow
def test_processes_train_as_the_devices_of_one():
    command = [sys.executable, BENCHMARKS / "sparse_linear.py", "--small", "--model", "svm"]
    command += ["--exchange", "dense", "all_gather", "--steps", "8"]
    env = running.ENV | running.QUICK
    outcome, lines = running.in_processes(command, 2, env=env)
    assert outcome.status == 0, outcome.report
    one = [*map(str, command), "--workers", "2"]
    done = subprocess.run(one, env=env, check=True, capture_output=True, text=True)
    rows = lambda lines: [line.split(" | ")[:-1] for line in lines if line.startswith("| svm")]
    found, expected = rows(lines[0]), rows(done.stdout.splitlines())
    assert found == expected
    assert len(found) == 2
    (*dense, share, _), (*sparse, less, differs) = found
    assert dense[2:4] == sparse[2:4]  # loss and accuracy
    assert float(share) == 1
    assert float(less) < 0.2
    assert float(differs) < 1e-5


@pytest.mark.parametrize("case", some([(4, 3), (2, 5), (3, 1)], [(4, 3)]), ids=str)
def test_coordinate_descent_is_that_of_one_machine(example, case):
    """By both exchanges, in float64 and with dense arrays; and nothing else travels."""
    coordinates = importlib.import_module("coordinates")
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
