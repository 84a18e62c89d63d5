"""An exchange that keeps its state, for trainers whose own state has no place for it."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import optax
from jax.sharding import Mesh

from jaxsparse.training.parallel import data_parallel
from jaxsparse.training.sharding import shard


class StatefulExchange:
    """An exchange that keeps residuals itself, in a step that has no place for them.

        exchange = jaxsparse.StatefulExchange(jaxsparse.spardl(0.01), params, mesh)

        def step(state, batch):  # one worker's, of a trainer that knows nothing of residuals
            grads = jax.grad(loss)(state.params, batch)
            return state.updated(exchange(grads))

        step = exchange.data_parallel(step, donate_argnums=0)

    A trainer whose optimizer is not Optax', such as Keras', calls its own code where gradients
    become updates. This object stands there, and may be called once in a step. Each call of
    the compiled step reads `exchange.state`, donates it, and replaces it.

    Save `exchange.state` beside the trainer's checkpoints, and set it before going on. Without it
    training goes on, but what residuals hold is lost.

    Args:
        tx: the transformation, such as `jaxsparse.spardl(0.01)`, or a chain with one.
        params: parameters, or arrays of their shapes on their devices.
        mesh: the mesh, or the number of workers to simulate on one device.
        axis_name: the axis of the workers. The transformation must have the same.

    Attributes:
        state: the state of `tx`, spread over the workers.

    Raises:
        ValueError: see `jaxsparse.shard`. From a call: it runs outside of a step that
            `data_parallel` of this object made, or for the second time in one.

    Example:
        >>> import jax.numpy as jnp, jaxsparse
        >>> tx = jaxsparse.top_k(0.25, is_dense=lambda *_: False)
        >>> exchange = StatefulExchange(tx, jnp.zeros(4), 2)
        >>> step = exchange.data_parallel(lambda w, batch: w - exchange(batch[0]))
        >>> w = step(jnp.zeros(4), jnp.float32([[4, 1, 0, 0], [0, 0, 3, 1]]))
        >>> w.tolist(), jax.tree.leaves(exchange.state.residual)[0].tolist()
        ([-2.0, 0.0, -1.5, 0.0], [[0.0, 1.0, 0.0, 0.0], [0.0, 0.0, 0.0, 1.0]])
    """

    def __init__(
        self,
        tx: optax.GradientTransformation,
        params: Any,
        mesh: Mesh | int,
        *,
        axis_name: str = "data",
    ) -> None:
        self._tx, self._mesh, self._axis_name = optax.with_extra_args_support(tx), mesh, axis_name
        self.state = shard(tx.init(params), mesh, axis_name)
        self._inside: list[Any] | None = None  # in a step: its state, and that after the exchange

    def __call__(self, grads: Any, params: Any = None, **extra_args: Any) -> Any:
        """The updates that `tx` makes of a worker's gradients, in a step of this object."""
        if self._inside is None:
            raise ValueError(
                "a StatefulExchange is called outside of its step: make the step with its own "
                "data_parallel, as in step = exchange.data_parallel(step)"
            )
        if len(self._inside) == 2:
            raise ValueError(
                "a StatefulExchange is called twice in a step: exchange all gradients at once, or "
                "make another one for the second call"
            )
        updates, state = self._tx.update(grads, self._inside[0], params, **extra_args)
        self._inside.append(state)
        return updates

    def data_parallel(
        self,
        step: Callable[..., Any],
        *,
        batch_argnums: int | Sequence[int] = 1,
        donate_argnums: int | Sequence[int] = (),
        outputs: Any = None,
        **options: Any,
    ) -> Callable[..., Any]:
        """`jaxsparse.data_parallel` for a step that calls this exchange.

        Args:
            step: see `jaxsparse.data_parallel`, as for all arguments.
            batch_argnums: see there.
            donate_argnums: see there. The exchange's state is always donated.
            outputs: see there.
            options: see there.

        Returns:
            The compiled step, with a `lower` of its own arguments. In errors, the exchange's state
            is its last argument, and its outputs are output[0].
        """

        # The state is the last argument and the last output of the compiled step.
        def with_state(*args: Any) -> tuple[Any, Any]:
            self._inside = [args[-1]]
            try:
                return step(*args[:-1]), self._inside[-1]
            finally:
                self._inside = None

        with_state.__name__ = getattr(step, "__name__", "step")

        @functools.cache
        def run(count: int) -> Any:
            """The compiled step of so many arguments. JAX donates none by a number below 0."""
            as_tuple = lambda given: (given,) if isinstance(given, int) else tuple(given)
            numbered = lambda given: tuple(i + count if i < 0 else i for i in as_tuple(given))
            return data_parallel(
                with_state,
                self._mesh,
                axis_name=self._axis_name,
                batch_argnums=numbered(batch_argnums),
                donate_argnums=(*numbered(donate_argnums), count),
                outputs=None if outputs is None else (outputs, None),
                **options,
            )

        @functools.wraps(step)
        def call(*args: Any) -> Any:
            if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(args)):
                raise ValueError(
                    "the step of a StatefulExchange is called inside of jax.jit or another "
                    "transformation, where it can't keep its state: call it outside, or carry the "
                    "state through with jaxsparse.data_parallel"
                )
            result, self.state = run(len(args))(*args, self.state)
            return result

        call.lower = lambda *args: run(len(args)).lower(*args, self.state)  # type: ignore[attr-defined]
        return call
