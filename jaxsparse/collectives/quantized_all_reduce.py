"""All-reduce of dense vectors in a few bits a value, at one level or at two.

An owner does not round its own part of its range, which never travels. With that rounding, the
second contraction on top of the first doubled the residual.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key, UInt32

from jaxsparse.arrays.settings import check_size
from jaxsparse.collectives.messages import AllReduced
from jaxsparse.comm import wire
from jaxsparse.quantize import (
    Quantizer,
    check_feedback,
    dequantize,
    from_message,
    quantize,
    to_message,
)
from jaxsparse.quantize.quantizer import cut, padded, sent_size


@dataclasses.dataclass(frozen=True)
class Teams:
    """Teams of workers that sum among themselves first, such as the devices of each host.

    Attributes:
        teams: number of teams of consecutive workers, all of one size.
        inside: quantiser of what workers send to others of their team.
    """

    teams: int
    inside: Quantizer


def quantized_all_reduce(
    x: Float[Array, " d"],
    quantizer: Quantizer,
    *,
    axis_name: str | None,
    key: Key[Array, ""] | None = None,
    levels: Teams | None = None,
) -> AllReduced:
    """Sums quantised vectors. Worker w owns the range of elements w m to (w + 1) m - 1.

    m is ceil(d / W), or up to a 64th more (`quantizer.sent_size`). Each worker quantises its part
    of each range and sends it to the owner (an all-to-all). The owner adds its own part,
    unquantised, to the parts that arrive, quantises the sum and sends it to all (an all-gather). A
    single worker sends nothing and rounds nothing. Last workers may own fewer elements, or none.

    Quantising twice is dist-EF-blockSGD's two-way compression (Zheng et al., NeurIPS 2019, Alg. 2),
    with a parameter server for each range.

    With `levels`, workers sum inside their team first, and then across, as in ZeRO++'s qgZ (Wang et
    al., 2023, section 3.3). Let there be T teams of n workers. Member i of each team gets the
    team's sums of ranges i T to (i + 1) T - 1. The members i of all teams then exchange these, and
    the one of team t owns range i T + t. Sums come back across teams, and are handed on inside as
    they arrived, without another rounding. So a worker receives 2 (T - 1) m values from other
    teams, in place of 2 (W - n) m.

    Args:
        x: this worker's vector of d elements, float32.
        quantizer: quantiser of both halves. Its groups begin anew in each range.
        axis_name: the axis of the workers.
        key: key of stochastic rounding, the same on all workers and fresh at each step. The total
            is then unbiased, and the residual does *not* keep the error. None rounds
            deterministically, and the residual keeps the errors of this worker's parts, of its
            team's sums, and of its own range's sum. Quantisers are refused if the residual could
            grow without bound. With the others it does not: an owner's error skips the earlier
            roundings when it is fed back, so each error goes through one contraction.
        levels: teams that sum first. None: sums at one level.

    Returns:
        The total, equal on all workers, the residual, and no overflow. If a sum overflows, no sum
        of its group is finite.

    Raises:
        ValueError: a quantiser takes no key, or needs one, the teams do not divide the workers, or
            indices of `x` do not fit int32.
    """
    check_size("x.size", x.size)
    if key is None:
        check_feedback(quantizer, stochastic=False)
        if levels is not None:
            check_feedback(levels.inside, stochastic=False)
    workers, size, none = wire.axis_size(axis_name), x.size, jnp.int32(0)
    team, across = wire.Group.teams(axis_name, workers if levels is None else levels.teams)
    if workers == 1:
        return AllReduced(wire.replicated(x, axis_name), jnp.zeros_like(x), none)
    n, teams, m = team.size, across.size, sent_size(-(-size // workers), quantizer)
    rows = padded(x, workers * m).reshape(n, teams * m)
    inside_keys = across_keys = last_key = None
    if key is not None:
        own_key = jax.random.fold_in(key, wire.axis_index(axis_name))
        drawn = jax.random.split(own_key, teams + 1 + (n if levels else 0))
        across_keys, last_key, inside_keys = drawn[:teams], drawn[teams], drawn[teams + 1 :]
    parts, lost_inside = rows[0], jnp.zeros_like(rows)
    if levels is not None and n > 1:
        starts = teams * m * jnp.arange(n, dtype=jnp.int32)
        counts = jnp.clip(size - starts, 0, teams * m)  # elements before the padding
        parts, messages = _scattered(rows, counts, levels.inside, team, inside_keys)
        lost_inside = _lost(rows, messages, levels.inside)
    parts = parts.reshape(teams, m)
    starts = m * (teams * team.rank + jnp.arange(teams, dtype=jnp.int32))
    counts = jnp.clip(size - starts, 0, m)
    total, messages = _scattered(parts, counts, quantizer, across, across_keys)
    message = _pack(total, last_key, counts[across.rank], quantizer)
    sums = jax.vmap(lambda one: _unpack(one, quantizer, m))(_gathered(message, team, across))
    sums = cut(sums.reshape(-1), size)
    if key is not None:
        return AllReduced(sums, jnp.zeros_like(x), none)
    # The own part is not rounded, but the sum in its place is.
    own = (jnp.arange(teams, dtype=jnp.int32) == across.rank)[:, None]
    parts, messages = jnp.where(own, total, parts), jnp.where(own, message, messages)
    lost = _lost(parts, messages, quantizer).reshape(-1)
    own = (jnp.arange(n, dtype=jnp.int32) == team.rank)[:, None]
    lost = jnp.where(own, lost, lost_inside).reshape(-1)
    return AllReduced(sums, cut(lost, size), none)


def _scattered(
    rows: Float[Array, "n m"],
    counts: Int[Array, " n"],
    quantizer: Quantizer,
    group: wire.Group,
    keys: Key[Array, " n"] | None,
) -> tuple[Float[Array, " m"], UInt32[Array, "n words"]]:
    """The sum of the group's rows for this member, and the messages that it made of `rows`.

    Rows, and so the sum, are zero behind their first `counts` elements. The own row is not rounded,
    and its message is not used.
    """
    m = rows.shape[1]
    messages = jax.vmap(lambda row, key, count: _pack(row, key, count, quantizer))(
        rows, keys, counts
    )
    own = (jnp.arange(group.size, dtype=jnp.int32) == group.rank)[:, None]

    def add(total: Array, member: tuple[Array, Array, Array]) -> tuple[Array, None]:
        message, row, is_own = member
        return total + jnp.where(is_own, row, _unpack(message, quantizer, m)), None

    # One row after the other: XLA's CPU backend takes twice as long to decode all and sum columns.
    arrived = group.all_to_all(messages)
    total = jax.lax.scan(add, jnp.zeros_like(rows[0]), (arrived, rows, own))[0]
    # Zeros may have been rounded to other numbers. Masked here, a whole vector is not stored anew.
    return jnp.where(jnp.arange(m, dtype=jnp.int32) < counts[group.rank], total, 0), messages


def _lost(rows: Array, messages: Array, quantizer: Quantizer) -> Array:
    """The errors of rows that were rounded to messages."""
    return rows - jax.vmap(lambda one: _unpack(one, quantizer, rows.shape[1]))(messages)


def _gathered(message: Array, team: wire.Group, across: wire.Group) -> Array:
    """All workers' messages in the order of their ranges, replicated."""
    if team.size == 1:
        return wire.all_gather(message, team.axis_name)
    messages = wire.bruck_all_gather(wire.bruck_all_gather(message, across), team)
    return wire.replicated(messages.reshape(-1, message.size), team.axis_name)


def _pack(
    row: Array, key: Array | None, count: Int[Array, ""], quantizer: Quantizer
) -> UInt32[Array, " words"]:
    return to_message(quantize(row, quantizer, key, count), quantizer)


def _unpack(message: Array, quantizer: Quantizer, size: int) -> Array:
    return dequantize(from_message(message, quantizer, size), quantizer, size)
