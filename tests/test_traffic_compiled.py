"""Bytes read from compiled programs, against numbers computed by hand.

Local operands are small on purpose: f32[16] is 64 bytes, so an all-reduce over 8 workers receives
2 * 7/8 * 64 = 112.
"""

import re

import equinox
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax import lax
from jax.sharding import AbstractMesh, PartitionSpec as P
from workers import mesh, on_workers

from jaxsparse.traffic import Collective, Conditional, WireBytes, wire_bytes
from jaxsparse.traffic.hlo import parse, parse_type

W = 8
RING = [(i, (i + 1) % W) for i in range(W)]


def compiled(fn, dtype=jnp.float32):
    """Compiles `fn` as each of eight workers runs it, on a local vector of 16 elements."""
    run = on_workers(fn, W, "shard_map_unchecked")
    return run.lower(jax.ShapeDtypeStruct((W, 16), dtype)).compile()


def bytes_of(fn, **kwargs):
    return wire_bytes(compiled(fn, **kwargs))


def psum(x):
    return lax.psum(x, "data")


def hlo(*body, header="num_partitions=8", before=""):
    """A module whose entry takes x: f32[16] and n: s32[], and runs the lines of `body`."""
    lines = "\n  ".join(body)
    return f"""HloModule literal, is_scheduled=true, {header}

%add (a: f32[], b: f32[]) -> f32[] {{
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}}
{before}
ENTRY %main (x: f32[16], n: s32[]) -> f32[16] {{
  %x = f32[16]{{0}} parameter(0)
  %n = s32[] parameter(1)
  {lines}
}}
"""


def all_reduce(groups="{{0,1,2,3,4,5,6,7}}", *, opcode="all-reduce", operand="%x", ids=True):
    use_ids = ", use_global_device_ids=true" if ids else ""
    return (
        f"%r = f32[16]{{0}} {opcode}({operand}), channel_id=1, replica_groups={groups}{use_ids}, "
        'to_apply=%add, metadata={op_name="jit(f)/psum"}'
    )


# --- one collective each, compiled -------------------------------------------------------------


@pytest.mark.parametrize(
    ("op", "fn", "payload", "received"),
    [
        ("all-reduce", psum, 64, 112),
        ("all-gather", lambda x: lax.all_gather(x, "data"), 64, 7 * 64),
        ("all-to-all", lambda x: lax.all_to_all(x, "data", 0, 0, tiled=True), 64, 56),
        ("collective-permute", lambda x: lax.ppermute(x, "data", RING), 64, 64),
        ("reduce-scatter", lambda x: lax.psum_scatter(x, "data", tiled=True), 64, 56),
    ],
)
def test_one_collective(op, fn, payload, received):
    moved = bytes_of(fn)
    (only,) = moved.collectives
    assert (only.op, only.group_size, only.count) == (op, 8, 1)
    assert "shard_map" in only.op_name
    assert (only.payload_bytes, only.received_bytes) == (payload, received)
    assert (moved.payload, moved.received, moved.rounds) == (payload, received, 1)
    assert moved.conditionals == ()


def test_partial_permutation_reports_the_busiest_worker():
    moved = bytes_of(lambda x: lax.ppermute(x, "data", [(0, 1), (4, 5), (6, 6)]))
    assert (moved.payload, moved.received, moved.rounds) == (64, 64, 1)
    assert moved.collectives[0].group_size == 4


def test_tuple_psum_counts_every_leaf():
    moved = bytes_of(lambda x: psum((x, x[:3] + 1, x.astype(jnp.int32))))
    assert moved.payload == 64 + 12 + 64
    assert moved.received == pytest.approx(2 * 7 / 8 * 140)
    # XLA combines the two float leaves into one all-reduce with two operands.
    assert sum(len(c.shapes) for c in moved.collectives) == 3
    assert moved.rounds == len(moved.collectives)


# --- control flow ------------------------------------------------------------------------------


def scan_of_5(x):
    return lax.scan(lambda c, _: (psum(c) * 0.1, None), x, None, length=5)[0]


def test_scan_multiplies():
    moved = bytes_of(scan_of_5)
    (only,) = moved.collectives
    assert (only.count, only.payload_bytes) == (5, 64)
    assert (moved.payload, moved.received, moved.rounds) == (5 * 64, 5 * 112, 5)


def test_unknown_trip_count_raises_where_it_matters():
    def talking(x):
        return lax.while_loop(lambda c: c.sum() < 1000, lambda c: psum(c), x)

    with pytest.raises(ValueError, match=r"while '.*not known .*; bound the loop statically"):
        bytes_of(talking)

    def silent(x):
        return psum(lax.while_loop(lambda c: c.sum() < 1000, lambda c: c * 2 + 1, x))

    assert bytes_of(silent).received == 112


def test_collective_in_a_loop_condition_runs_once_more():
    def fn(x):
        def cond(carry):
            return (carry[0] < 4) & (psum(carry[1][0]) > -1)

        return lax.while_loop(cond, lambda c: (c[0] + 1, c[1] * 0.5), (0, x))[1]

    text = compiled(fn).as_text()
    # XLA cannot know this count; say that it is 4.
    lines = [
        line + ', backend_config={"known_trip_count":{"n":"4"}}' if " while(" in line else line
        for line in text.splitlines()
    ]
    assert wire_bytes("\n".join(lines)).rounds == 5
    with pytest.raises(ValueError, match="bound the loop"):
        wire_bytes(text)


def five_stages(x):
    stage = lax.rem(psum(jnp.int32(1) + x[0].astype(jnp.int32)), 5)
    stages = [
        lambda v: v,
        psum,
        lambda v: lax.all_gather(v[:4], "data").sum(0).repeat(4),
        lambda v: lax.ppermute(v, "data", RING),
        lambda v: psum(v[:2]).sum() + v,
    ]
    return lax.switch(stage, stages, x)


def test_switch_shows_every_stage():
    moved = bytes_of(five_stages)
    (conditional,) = moved.conditionals
    assert [b.received for b in conditional.branches] == [0, 112, 7 * 16, 64, 14]
    assert [b.payload for b in conditional.branches] == [0, 64, 16, 64, 8]
    assert [b.rounds for b in conditional.branches] == [0, 1, 1, 1, 1]
    assert conditional.dearest == 1
    assert (moved.payload, moved.received, moved.rounds) == (4 + 64, 7 + 112, 2)


def test_dearest_branch_is_by_received_then_payload():
    def branch(payload, received):
        return WireBytes((Collective("all-gather", "g", ("u8[1]",), 2, payload, received),))

    def dearest(*branches):
        return Conditional("c", 1, tuple(branch(*b) for b in branches)).dearest

    assert dearest((9, 1), (1, 9)) == 1
    assert dearest((1, 9), (9, 1)) == 0
    assert dearest((1, 9), (2, 9)) == 1


def test_cond_in_scan_and_cond_in_cond():
    def fn(x):
        def step(c, _):
            total = psum(c.sum())
            inner = lambda v: lax.cond(total > 9, psum, lambda u: u + 1, v)
            return lax.cond(total > 3, inner, lambda v: v * 2, c), None

        return lax.scan(step, x, None, length=6)[0]

    moved = bytes_of(fn)
    assert (moved.payload, moved.received, moved.rounds) == (6 * 68, 6 * 119, 12)
    (outer,) = moved.conditionals
    assert outer.count == 6
    assert [b.received for b in outer.branches] == [0, 6 * 112]
    (inner,) = outer.branches[1].conditionals
    assert inner.count == 6
    assert [b.received for b in inner.branches] == [0, 6 * 112]


# --- ways to call it ---------------------------------------------------------------------------


def test_function_lowered_compiled_and_text_agree():
    jitted = jax.jit(jax.shard_map(psum, mesh=mesh(W), in_specs=P("data"), out_specs=P()))
    x = jnp.ones((W, 16))
    lowered = jitted.lower(x)
    program = lowered.compile()
    results = {
        wire_bytes(jitted, x),
        wire_bytes(lowered),
        wire_bytes(program),
        wire_bytes(program.as_text()),
    }
    assert [moved.received for moved in results] == [112]
    for wrapped in (nnx.jit(jitted), equinox.filter_jit(jitted)):  # whose names differ
        assert wire_bytes(wrapped, x).received == 112
        assert wire_bytes(wrapped.lower(x).compile()).received == 112


def test_wrong_programs_are_refused():
    with pytest.raises(TypeError, match=r"jax\.jit"):
        wire_bytes(psum)
    with pytest.raises(ValueError, match="only a jitted function takes arguments, no str"):
        wire_bytes(hlo("ROOT " + all_reduce()), mesh(W))
    with pytest.raises(ValueError, match="StableHLO"):
        wire_bytes(jax.jit(jnp.sin).lower(1.0).as_text())
    with pytest.raises(ValueError, match="ENTRY"):
        wire_bytes(hlo("ROOT " + all_reduce()).partition("ENTRY")[0])
    with pytest.raises(ValueError, match="ENTRY"):
        wire_bytes(hlo("ROOT " + all_reduce()).rstrip().rstrip("}"))


def test_table_shows_totals_and_branches():
    lines = str(bytes_of(five_stages)).splitlines()
    assert lines[0].split()[:4] == ["collective", "count", "W", "payload"]
    total = next(line for line in lines if line.startswith("total"))
    assert total.split() == ["total", "2", "68", "119"]
    assert "branch 1: payload 64 B, received 112 B, 1 rounds  <- counted above" in lines[-4]
    assert sum("branch " in line for line in lines) == 5


# --- literal HLO: forms that this backend does not print ---------------------------------------


def test_everyone_is_counted_from_the_header():
    for header, size in (("replica_count=4", 4), ("entry_computation_layout={}", 1)):
        moved = wire_bytes(hlo("ROOT " + all_reduce("{}", ids=size == 1), header=header))
        assert moved.collectives[0].group_size == size


def test_missing_groups_raise():
    with pytest.raises(ValueError, match="found none"):
        wire_bytes(hlo("ROOT %r = f32[16]{0} all-reduce(%x), to_apply=%add"))


GROUPS = "replica_groups={{0,1,2,3,4,5,6,7}}"
PAIRS = "source_target_pairs={{0,1},{1,2},{3,3}}"


@pytest.mark.parametrize(
    ("op", "result", "attributes", "received"),
    [
        ("all-reduce", "f32[16]{0}", f"{GROUPS}, to_apply=%add", 112),
        ("all-gather", "(f32[16]{0}, f32[128]{0})", f"{GROUPS}, dimensions={{0}}", 448),
        ("reduce-scatter", "((f32[16]{0}), f32[2]{0})", f"{GROUPS}, to_apply=%add", 56),
        ("all-to-all", "((f32[16]{0}), f32[16]{0})", f"{GROUPS}, dimensions={{0}}", 56),
        ("collective-permute", "(f32[16]{0}, f32[16]{0}, u32[], u32[])", PAIRS, 64),
        ("collective-broadcast", "((f32[16]{0}), f32[16]{0})", GROUPS, 64),
    ],
)
@pytest.mark.parametrize("inline_types", [False, True])
def test_async_pairs_count_once(op, result, attributes, received, inline_types):
    operand = "f32[16]{0} %x" if inline_types else "%x"
    handle = f"{result} %s" if inline_types else "%s"
    text = hlo(
        f"%s = {result} {op}-start({operand}), channel_id=3, {attributes}",
        "%busy = f32[16]{0} add(%x, %x)",
        f"ROOT %d = f32[16]{{0}} {op}-done({handle})",
    )
    moved = wire_bytes(text)
    (only,) = moved.collectives
    assert (only.op, only.name, only.shapes) == (op, "s", ("f32[16]",))
    assert (moved.payload, moved.received, moved.rounds) == (64, received, 1)


def test_variadic_operands_and_index_comments():
    text = hlo(
        "%y = bf16[2,3]{1,0:T(8,128)(2,1)} parameter(2)",
        "%z = (f32[16]{0}, /*index=1*/bf16[2,3]{1,0}, s32[]) all-reduce(%x, %y, /*index=2*/%n), "
        f"channel_id=1, {GROUPS}, use_global_device_ids=true, to_apply=%add",
        "ROOT %o = f32[16]{0} get-tuple-element(%z), index=0",
    )
    (only,) = wire_bytes(text).collectives
    assert only.shapes == ("f32[16]", "bf16[2,3]", "s32[]")
    assert only.payload_bytes == 64 + 12 + 4


def shortened(text):
    """The text as newer XLA dumps it: `%t#1` stands for a line that takes an element of a tuple."""
    line = re.compile(
        r"^ +%(\S+) = \S+ get-tuple-element\(.*%(.+?)\), index=(\d+).*\n", re.MULTILINE
    )
    while found := line.search(text):
        short = f"%{found[2]}#{found[3]}"
        text = text.replace(found[0], "")
        text = re.sub(rf"%{re.escape(found[1])}(?![\w.\-])", lambda _, short=short: short, text)
    return text


def test_elements_of_tuples_in_short():
    def fn(x):
        first, second = lax.psum((x, x[:4] * 2), "data")
        body = lambda i, c: (c[0] + 1.0, lax.psum(c[1], "data") * 0.1)
        return lax.fori_loop(0, 5, body, (x.sum(), first))[1] + second.sum()

    text = compiled(fn).as_text()
    short = shortened(text)
    assert "#1" in short
    assert "get-tuple-element" in text
    plain, found = wire_bytes(text), wire_bytes(short)
    assert found.received == plain.received
    assert [c.count for c in found.collectives] == [c.count for c in plain.collectives]
    nested = hlo(
        '%t = ((f32[16]{0}, s32[]), f32[4]{0}) custom-call(%x), custom_call_target="pair"',
        "%z = f32[16]{0} all-reduce(%t#0#0), replica_groups={}, to_apply=%add",
        "ROOT %o = f32[16]{0} add(%z, %z)",
    )
    assert wire_bytes(nested).received == 112


def test_names_without_percent_signs():
    text = hlo(
        f"t = (f32[16], s32[]) all-reduce(x, n), {GROUPS}, to_apply=add",
        "ROOT o = f32[16]{0} get-tuple-element(t), index=0",
    ).replace("%", "")
    assert wire_bytes(text).payload == 68


def test_ragged_all_to_all_is_bounded_by_its_buffers():
    text = hlo(
        "%out = f32[24]{0} broadcast(%n), dimensions={}",
        "%i = s32[8]{0} iota(), iota_dimension=0",
        f"ROOT %r = f32[24]{{0}} ragged-all-to-all(%x, %out, %i, %i, %i, %i), {GROUPS}",
    )
    moved = wire_bytes(text)
    assert (moved.payload, moved.received) == (64, 96)


@pytest.mark.parametrize(
    "attributes", ["", "source_target_pairs=[1,2]", PAIRS + ", slice_sizes={{4}}"]
)
def test_unknown_permutations_raise(attributes):
    with pytest.raises(ValueError, match=r"collective-permute 'p'.*source_target_pairs"):
        wire_bytes(hlo(f"ROOT %p = f32[16]{{0}} collective-permute(%x), {attributes}"))


@pytest.mark.parametrize(
    ("printed", "nbytes"),
    [
        ("s4[9]{0:E(4)}", 5),  # packed, rounded up
        ("u4[9]{0}", 9),  # a layout that does not pack
        ("u2[8]", 2),
        ("pred[3]{0}", 3),
        ("bf16[4,2]{1,0}", 16),
        ("f8e4m3fn[5]{0}", 5),
        ("f4e2m1fn[4]{0:E(4)}", 2),
        ("c64[2]{0}", 16),
        ("f32[<=10]{0}", 40),
        ("f32[]", 4),
        ("(f32[2]{0}, (u16[], token[]), f32[0]{0})", 10),
    ],
)
def test_sizes_of_types(printed, nbytes):
    assert sum(shape.nbytes for shape in parse_type(printed)) == nbytes
    text = hlo(f"%y = {printed} parameter(2)", f"ROOT %g = f32[1]{{0}} all-gather(%y), {GROUPS}")
    assert wire_bytes(text).payload == nbytes


@pytest.mark.parametrize("printed", ["mystery[4]{0}", "f32[?]{0}"])
def test_unknown_sizes_raise(printed):
    with pytest.raises(ValueError, match="cannot tell the size"):
        parse_type(printed)


BRANCHES = f"""
%exchange (p: f32[16]) -> f32[16] {{
  %p = f32[16]{{0}} parameter(0)
  ROOT %m = f32[16]{{0}} all-reduce(%p), {GROUPS}, to_apply=%add
}}

%skip (q: f32[16]) -> f32[16] {{
  ROOT %q = f32[16]{{0}} parameter(0)
}}
"""


def test_branches_of_a_predicate_are_false_then_true():
    text = hlo(
        "%ok = pred[] constant(true)",
        "ROOT %c = f32[16]{0} conditional(%ok, %x, %x), true_computation=%exchange, "
        "false_computation=%skip",
        before=BRANCHES,
    )
    (conditional,) = wire_bytes(text).conditionals
    assert [b.received for b in conditional.branches] == [0, 112]


def test_calls_are_followed_and_counted_each_time():
    text = hlo(
        "%one = f32[16]{0} call(%x), to_apply=%exchange",
        "%two = f32[16]{0} fusion(%one), kind=kCustom, calls=%exchange",
        "ROOT %three = f32[16]{0} copy(%two)",
        before=BRANCHES,
    )
    assert wire_bytes(text).rounds == 2


def test_computations_that_nothing_calls_do_not_count():
    assert wire_bytes(hlo("ROOT %o = f32[16]{0} copy(%x)", before=BRANCHES)) == WireBytes()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "custom-call(%x), called_computations={%skip, %exchange}",
            "custom-call 'o' .* runs 'm' a number",
        ),
        ("call(%x), to_apply=%absent", "'absent'"),
        ("send(%x, %x), channel_id=1", "point-to-point"),
        (f"all-gather(%absent), {GROUPS}", "no known type"),
    ],
)
def test_what_cannot_be_counted_raises(line, message):
    with pytest.raises(ValueError, match=message):
        wire_bytes(hlo(f"ROOT %o = f32[16]{{0}} {line}", before=BRANCHES))


def test_transfers_to_the_host_are_not_traffic_between_workers():
    text = hlo("ROOT %o = f32[16]{0} send(%x, %x), channel_id=1, is_host_transfer=true")
    assert wire_bytes(text) == WireBytes()


def to_slices(kind, target, operand="%x", result="f32[16]{0}"):
    """A collective over slices, as XLA:TPU hands it to its runtime."""
    attributes = (
        "channel_id=1, is_host_transfer=true, frontend_attributes={"
        '_xla_host_transfer_handler_name="xla_megascale_runtime",'
        f'_xla_host_transfer_rendezvous="psum.1_0",_xla_megascale_target={target},'
        f'_xla_megascale_transfer_type="{kind}"}}'
    )
    return (
        "%t = token[] after-all()",
        f"%s = (f32[16]{{0}}, u32[], token[]) send({operand}, %t), {attributes}",
        f"%r = ({result}, u32[], token[]) recv(%t), {attributes}",
        "%sd = token[] send-done(%s), channel_id=1, is_host_transfer=true",
        f"ROOT %rd = ({result}, token[]) recv-done(%r), channel_id=1, is_host_transfer=true",
    )


EACH = '"{1,2,3}x{0:7}"'  # of three slices of eight devices
PAIRS = "{{100000,200000},{100001,200001},{100002,200002},{100003,200003}}"
STEPS = "{{100000->200000},{200000->300000},{300000->300000}}"


@pytest.mark.parametrize(
    ("kind", "target", "op", "group", "received"),
    [
        ("ALL_REDUCE", EACH, "all-reduce", 3, 2 * 2 / 3 * 64),
        ("ALL_GATHER", EACH, "all-gather", 3, 2 * 64),
        ("REDUCE_SCATTER", EACH, "reduce-scatter", 3, 2 / 3 * 64),
        ("ALL_TO_ALL", PAIRS, "all-to-all", 2, 32),
        ("ONE_TO_ONE", STEPS, "collective-permute", 3, 64),
    ],
)
def test_collectives_over_slices(kind, target, op, group, received):
    moved = wire_bytes(
        hlo(*to_slices(kind, target)), mesh=AbstractMesh((3, 4, 2), ("hosts", "data", "tp"))
    )
    (found,) = moved.collectives
    assert (found.op, found.group_size, found.name) == (op, group, "psum.1_0")
    assert found.received_bytes == pytest.approx(received)
    assert moved.across("hosts").received == pytest.approx(received)
    assert moved.across("data").received == 0
    assert wire_bytes(hlo(*to_slices(kind, target))).received == pytest.approx(received)


def test_collectives_inside_slices_are_those_of_each():
    text = hlo(
        "%y = f32[16]{0} all-reduce(%x), replica_groups={{0,1},{2,3},{4,5},{6,7}}, to_apply=%add",
        *to_slices("ALL_REDUCE", '"{1,2}x{0:7}"', operand="%y"),
    )
    moved = wire_bytes(text, mesh=AbstractMesh((2, 4, 2), ("hosts", "data", "tp")))
    assert [each.axes for each in moved.collectives] == [("tp",), ("hosts",)]
    with pytest.raises(ValueError, match="runs on 8 devices, but mesh has 20"):
        wire_bytes(text, mesh=AbstractMesh((20,), ("data",)))


@pytest.mark.parametrize(
    ("kind", "target"), [("BARRIER", EACH), ("ALL_REDUCE", "{}"), ("ALL_REDUCE", STEPS)]
)
def test_unknown_ways_to_other_slices_raise(kind, target):
    with pytest.raises(ValueError, match=r"'s' goes to other slices in a way .* not understood"):
        wire_bytes(hlo(*to_slices(kind, target)))


COUNTED = """%test (p: (s32[], f32[16])) -> pred[] {
  %p = (s32[], f32[16]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %end = s32[] constant(END)
  ROOT %less = pred[] compare(%i, %end), direction=LT
}
%turn (q: (s32[], f32[16])) -> (s32[], f32[16]) {
  %q = (s32[], f32[16]) parameter(0)
  %j = s32[] get-tuple-element(%q), index=0
  %v = f32[16]{0} get-tuple-element(%q), index=1
  %one = s32[] constant(STEP)
  %k = s32[] add(%j, %one)
  %m = f32[16]{0} all-reduce(%v), replica_groups={}, to_apply=%add
  ROOT %both = (s32[], f32[16]) tuple(%k, %m)
}
"""


@pytest.mark.parametrize(
    ("end", "step", "turns"), [(11, 1, 8), (2, 1, 0), (12, 2, 5), (11, 0, None)]
)
def test_turns_are_read_from_a_counter(end, step, turns):
    """XLA:TPU does not write them."""
    text = hlo(
        "%c = s32[] constant(3)",
        "%d = s32[] copy(%c)",
        "%both0 = (s32[], f32[16]) tuple(%d, %x)",
        "ROOT %w = (s32[], f32[16]) while(%both0), condition=%test, body=%turn",
        before=COUNTED.replace("END", str(end)).replace("STEP", str(step)),
    )
    if turns is None:
        with pytest.raises(ValueError, match="a number of times that is not known"):
            wire_bytes(text)
    else:
        assert wire_bytes(text).received == turns * 112


def test_user_text_is_not_syntax():
    name = 'metadata={op_name="f(x), calls=%absent, replica_groups={{0}} all-reduce(\\"(" }'
    text = hlo(f"%y = f32[16]{{0}} add(%x, %x), {name}", "ROOT " + all_reduce(operand="%y"))
    assert wire_bytes(text).received == 112


def test_literals_and_attributes_over_several_lines():
    text = hlo(
        "%c = s32[2,2]{1,0} constant({",
        "{ 1, 2 }, { 3, 4 } })",
        "ROOT %r = f32[16]{0} all-reduce(%x), channel_id=1,",
        f"  {GROUPS}, use_global_device_ids=true,",
        "  to_apply=%add",
    )
    assert list(parse(text).computations["main"].instructions) == ["x", "n", "c", "r"]
    assert wire_bytes(text).received == 112


def test_a_long_name_is_shown_by_its_end():
    name = "jit(step)/" * 70 + "psum"
    one = Collective("all-reduce", "x", ("f32[4]",), 2, 16, 16.0, op_name=name)
    line = str(WireBytes((one,))).splitlines()[1]
    assert line.endswith("/psum")
    assert len(line) < 150
