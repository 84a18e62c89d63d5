"""Wraps a compiled step: checks before its first call, and counts calls."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from jaxsparse.arrays.layout import check_arrays
from jaxsparse.comm.static_leaves import has_static, held, released
from jaxsparse.processes.group import ProcessGroup


class CheckedStep:
    """Behaves as `run`, a function that `jax.jit` made.

    It takes and returns Equinox modules as they are: `run` sees their leaves that are no arrays as
    `Static`. It calls `before` with the arguments, before the first call with their shapes and
    placements. The processes of the `group` count calls. A call inside an outer `jax.jit` is only
    traced, so it does not count.
    """

    def __init__(
        self,
        run: jax.stages.Wrapped,
        before: Sequence[Callable[[Any], None]],
        group: ProcessGroup | None,
    ) -> None:
        functools.update_wrapper(self, run)
        self._run, self._before, self._group = run, before, group
        self._seen = set[Any]()

    def __call__(self, *args: Any, **named: Any) -> Any:
        args = held(args)
        with self._arrays_only(args, named):
            self._prepare(args)
            result = self._run(*args)
        return released(result) if has_static(args) else result

    def lower(self, *args: Any, **named: Any) -> jax.stages.Lowered:
        args = held(args)
        with self._arrays_only(args, named):
            return self._run.lower(*args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._run, name)

    def _prepare(self, args: Any) -> None:
        leaves, treedef = jax.tree.flatten(args)
        if any(isinstance(x, jax.core.Tracer) for x in leaves):
            return
        names = "shape", "dtype", "sharding"  # another placement is another program
        of = lambda x: (type(x), *(getattr(x, name, None) for name in names))
        kind = treedef, *map(of, leaves)
        if kind not in self._seen:
            for each in self._before:
                each(args)
            self._seen.add(kind)
        if self._group is not None:
            self._group.begin(self.__name__)

    @contextlib.contextmanager
    def _arrays_only(self, args: Any, named: dict[str, Any]) -> Iterator[None]:
        """Refuses arguments by name, and names the leaf that is no array, if JAX refuses one."""
        if named:
            raise ValueError(
                f"{self.__name__} takes positional arguments only, but got {', '.join(named)} by "
                "name: pass them by position, in which processes compare them"
            )
        try:
            yield
        except TypeError:
            for i, arg in enumerate(args):
                check_arrays(f"argument {i}", arg)
            raise
