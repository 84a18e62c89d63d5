"""A store in memory whose links fail, and islands on it whose moves are whole numbers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxsparse
from jaxsparse import systems
from jaxsparse.islands.arithmetic import Arithmetic
from jaxsparse.islands.member import Member
from jaxsparse.islands.store import UnreachableError

SIZE = 6
OUTER = {
    "top_k": lambda: jaxsparse.top_k(0.4, axis_name=None, is_dense=lambda *_: False),
    "int8": lambda: jaxsparse.quantized(
        "int8", gather=True, group_size=4, axis_name=None, is_dense=lambda *_: False
    ),
}


class Memory:
    """Objects in a dict. `history` has each object that was ever created."""

    def __init__(self):
        self.objects, self.history = {}, {}

    def create(self, key, data):
        if key in self.objects:
            return False
        assert self.history.setdefault(key, data) == data, f"{key} was created twice"
        self.objects[key] = data
        return True

    def get(self, key):
        return self.objects.get(key)

    def names(self, folder):
        keys = (key.rpartition("/") for key in self.objects)
        return sorted(name for place, _, name in keys if place == folder)

    def delete(self, keys):
        for key in keys:
            self.objects.pop(key, None)


class Link:
    """An island's way to a store: it may be down, lose answers, or deliver what was sent late."""

    def __init__(self, store):
        self.store, self.is_down, self.loses_answers, self.is_slow = store, False, False, False
        self.on_the_way = []

    def deliver(self):
        for operation in self.on_the_way:
            operation()
        self.on_the_way = []

    def _passes(self, name, *args):
        operation = functools.partial(getattr(self.store, name), *args)
        if self.is_down:
            raise UnreachableError("down")
        if self.is_slow and name in ("create", "delete"):
            self.on_the_way.append(operation)
            raise UnreachableError("slow")
        found = operation()
        if self.loses_answers:
            raise UnreachableError("the answer was lost")
        return found

    def create(self, key, data):
        return self._passes("create", key, data)

    def get(self, key):
        return self._passes("get", key)

    def names(self, folder):
        return self._passes("names", folder)

    def delete(self, keys):
        return self._passes("delete", keys)


@functools.cache
def arithmetic(exchange="top_k", mixing=None, weighted=False, late_decay=1.0):
    """Shared by tests, because it keeps compiled programs."""
    outer = optax.chain(OUTER[exchange](), optax.sgd(1.0, momentum=0.5))
    return Arithmetic(outer, lambda state: state[0], mixing, weighted, late_decay)


def member(store, name, life, clock, *, programs=None, **settings):
    usual = {"quorum": 1, "grace": 5.0, "snapshots": 3, "clock": clock}
    usual["new_life"] = lambda: life
    return Member(programs or arithmetic(), store, name, **{**usual, **settings})


def start():
    return ({"w": jnp.zeros((2, 3))}, jnp.zeros(()))


def moved(state, by):
    """A state after local steps that move its parameters."""
    params, count = state.worker
    params = {"w": params["w"] + jnp.asarray(by, jnp.float32).reshape(2, 3)}
    return state._replace(worker=(params, count + 1), steps=state.steps + 1)


def residual(state):
    return np.asarray(state.outer[0].residual["w"].value).reshape(-1)


@jax.jit
def decoded(words):
    """What a message of `OUTER["top_k"]` alone delivers."""
    return systems.TopK(0.4).total(words[:, 1:], SIZE).mean
