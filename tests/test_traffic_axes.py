"""Bytes by mesh axis: every form of groups against NumPy, and compiled programs on many meshes."""

import functools
import itertools
import math
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec as P
from workers import some

import jaxsparse
from jaxsparse.outer.parallel import run_on_workers
from jaxsparse.traffic import crossing, traced_bytes, wire_bytes
from jaxsparse.traffic.hlo import parse
from jaxsparse.traffic.report import axes_crossed

AXES = ("hosts", "fsdp", "tp")
CUBE = AbstractMesh((2, 2, 2), AXES)
SCOPE = "jaxsparse_exchange"


def hlo(*body, header="num_partitions=8", before=""):
    """A module whose entry takes x: f32[16], and runs the lines of `body`."""
    lines = "\n  ".join(body)
    return f"""HloModule literal, is_scheduled=true, {header}
{before}
ENTRY %main (x: f32[16]) -> f32[16] {{
  %x = f32[16]{{0}} parameter(0)
  {lines}
}}
"""


def reduce(groups, *, op="all-reduce", attributes="channel_id=1, use_global_device_ids=true"):
    return f"ROOT %r = f32[16]{{0}} {op}(%x), {attributes}, replica_groups={groups}, to_apply=%add"


def read(line, header="num_partitions=8"):
    """The groups of the last instruction, as a set: their order does not matter."""
    module = parse(hlo(line, header=header))
    *_, last = module.computations["main"].instructions.values()
    groups = module.groups(last)
    assert len(set(map(tuple, groups))) == len(groups)
    return {frozenset(group) for group in groups}


# --- the forms of groups, against plain loops over coordinates -----------------------------------


def groups_along(shape, order, axes):
    """Oracle: workers whose coordinates agree in all but `axes`. order[place] is a worker."""
    found = {}
    for place, where in enumerate(itertools.product(*map(range, shape))):
        key = tuple(c for axis, c in enumerate(where) if axis not in axes)
        found.setdefault(key, []).append(int(order[place]))
    return list(found.values())


def crossed_by(groups, shape):
    """Oracle: the axes along which two members of a group differ, pair by pair."""
    coordinates = list(itertools.product(*map(range, shape)))
    return {
        axis
        for group in groups
        for a, b in itertools.combinations(group, 2)
        for axis in range(len(shape))
        if coordinates[a][axis] != coordinates[b][axis]
    }


def printed(groups):
    return "{" + ",".join("{" + ",".join(map(str, group)) + "}" for group in groups) + "}"


def spellings(shape, axes, groups):
    """Each form in which XLA can print the groups along some axes of a row-major mesh."""
    names = [f"axis_{i}" for i in range(len(shape))]
    others = [i for i in range(len(shape)) if i not in axes]
    size = math.prod(shape[i] for i in axes)
    order = ",".join(map(str, [*others, *axes]))
    extents = ",".join(map(str, shape))
    yield printed(groups)
    yield printed([group[::-1] for group in groups])
    yield f"[{math.prod(shape) // size},{size}]<=[{extents}]T({order})"
    for quote, opened, closed in (("'", "mesh[", "]"), ("", "@mesh<", ">")):
        mesh = ",".join(f"{quote}{n}{quote}={e}" for n, e in zip(names, shape))
        grouped = ",".join(f"{quote}{names[i]}{quote}" for i in axes)
        yield f"{opened}{mesh}{closed} {{{grouped}}}"
    # One merged axis, whose factors are the mesh's axes: 'all':(before)extent.
    factors = ",".join(f"'all':({math.prod(shape[:i])}){shape[i]}" for i in axes)
    yield f"mesh['all'={math.prod(shape)}] {{{factors}}}"
    # The same axes in reverse order. Workers are listed in the matching order.
    backwards = ",".join(f"'{names[i]}'={shape[i]}" for i in reversed(range(len(shape))))
    grouped = ",".join(f"'{names[i]}'" for i in axes)
    turned = ",".join(map(str, reversed(range(len(shape)))))
    yield f"mesh[{backwards}], device_ids=([{extents}]T({turned})) {{{grouped}}}"
    listed = np.arange(math.prod(shape)).reshape(shape).transpose().reshape(-1)
    yield f"mesh[{backwards}], device_ids=({','.join(map(str, listed))}) {{{grouped}}}"


SHAPES = [(2, 2, 2), (4, 1, 2), (8,), (1, 8), (3, 5), (2, 3, 2, 2), (5, 1), (1,)]


@pytest.mark.parametrize("shape", some(SHAPES, [(2, 2, 2), (3, 5), (1,)]), ids=str)
def test_every_spelling_of_every_set_of_axes(shape):
    mesh = AbstractMesh(shape, tuple("abcd"[: len(shape)]))
    header = f"num_partitions={math.prod(shape)}"
    spelled = 0
    for count in range(1, len(shape) + 1):
        for axes in itertools.combinations(range(len(shape)), count):
            groups = groups_along(shape, range(math.prod(shape)), axes)
            size, crossed = len(groups[0]), crossed_by(groups, shape)
            assert crossed == {axis for axis in axes if shape[axis] > 1}
            for text in spellings(shape, axes, groups):
                assert read(reduce(text), header) == set(map(frozenset, groups)), text
                moved = wire_bytes(hlo(reduce(text), header=header), mesh=mesh)
                (only,) = moved.collectives
                assert only.axes == tuple("abcd"[axis] for axis in sorted(crossed))
                assert (only.group_size, moved.axis_names) == (size, mesh.axis_names)
                received = 2 * (size - 1) / size * 64
                for i, name in enumerate(mesh.axis_names):
                    across = received if i in crossed else 0
                    assert moved.across(name).received == pytest.approx(across)
                    assert moved.within(name).received == pytest.approx(received - across)
                spelled += 1
    assert spelled == 8 * (2 ** len(shape) - 1)


def test_groups_that_no_set_of_axes_makes():
    rng = np.random.default_rng(0)
    for _ in range(50):
        shape = tuple(rng.integers(1, 5, size=rng.integers(1, 4)))
        ids = rng.permutation(math.prod(shape))
        cuts = np.sort(rng.integers(0, ids.size + 1, size=3))
        groups = [part.tolist() for part in np.split(ids, cuts) if part.size]
        assert read(reduce(printed(groups)), f"num_partitions={ids.size}") == set(
            map(frozenset, groups)
        )
        extents = {str(axis): int(extent) for axis, extent in enumerate(shape)}
        assert {int(axis) for axis in axes_crossed(extents, groups)} == crossed_by(groups, shape)


@pytest.mark.parametrize(
    ("op", "attributes", "groups"),
    [
        ("all-reduce", "replica_groups={}", [range(6)]),
        ("all-gather", "replica_groups={}, channel_id=1, use_global_device_ids=true", [range(6)]),
        ("all-reduce", "replica_groups={{0,4},{1,2,3,5}}, channel_id=1", [(0, 4), (1, 2, 3, 5)]),
        ("all-to-all", "replica_groups={{0,3}}, channel_id=1", [(0, 3)]),
        ("collective-broadcast", "replica_groups=[2,3]<=[6]", [(0, 1, 2), (3, 4, 5)]),
        ("collective-permute", "source_target_pairs={{0,4},{1,1}}", [(0, 4)]),
        # The only replica stands for all of its partitions.
        ("reduce-scatter", "replica_groups={{0}}, channel_id=1", [range(6)]),
        ("all-reduce", "replica_groups={{0}}", [(0,)]),
        ("all-gather", "replica_groups={{0}}, channel_id=1, use_global_device_ids=true", [(0,)]),
        # Without global ids, ids beyond the replicas are of partitions.
        ("all-reduce", "channel_id=1, replica_groups={{0,1,2,3,4,5}}", [range(6)]),
    ],
)
def test_ids_are_workers(op, attributes, groups):
    line = f"ROOT %r = f32[16]{{0}} {op}(%x), {attributes}"
    assert read(line, "num_partitions=6") == set(map(frozenset, groups))
    moved = wire_bytes(hlo(line, header="num_partitions=6"), mesh=AbstractMesh((2, 3), AXES[:2]))
    crossed = crossed_by(groups, (2, 3))
    assert moved.collectives[0].axes == tuple(AXES[i] for i in sorted(crossed))


def test_replicas_of_several_partitions_are_refused():
    with pytest.raises(ValueError, match="replicas of several partitions are not understood"):
        wire_bytes(hlo(reduce("{}"), header="replica_count=2, num_partitions=3"))


@pytest.mark.parametrize(
    ("pairs", "axes"),
    [
        ("{{0,4},{4,0},{1,5},{5,1}}", ("hosts",)),
        ("{{0,1},{2,3}}", ("tp",)),
        ("{{0,1},{1,4}}", ("hosts", "tp")),
        ("{{0,2},{5,6},{3,3}}", ("fsdp", "tp")),
        ("{{0,7}}", AXES),
        ("{{4,4}}", ()),
        ("{}", ()),
    ],
)
def test_pairs_cross_what_any_of_them_crosses(pairs, axes):
    line = f"ROOT %p = f32[16]{{0}} collective-permute(%x), source_target_pairs={pairs}"
    for text in (hlo(line), hlo(line + ", channel_id=4")):
        moved = wire_bytes(text, mesh=CUBE)
        assert moved.collectives[0].axes == axes
        assert moved.across("hosts").received == (64 if "hosts" in axes else 0)


@pytest.mark.parametrize(
    "groups",
    [
        "[3,2]<=[8]",
        "[4,2]<=[2,4]T(1,1)",
        "mesh['a'=4,'b'=2] {'c'}",
        "mesh['a'=4,'b'=2] {'a':(1)3}",
        "mesh['a'=4,'b'=2], device_ids=(0,1,2) {'a'}",
        "[2,2,2]<=[8]",
    ],
)
def test_what_cannot_be_read_is_refused(groups):
    found = re.escape(groups)
    with pytest.raises(ValueError, match=rf"all-reduce 'r': cannot read its.*found {found}"):
        wire_bytes(hlo(reduce(groups)))


# --- literal programs ----------------------------------------------------------------------------


def test_asynchronous_pairs():
    """Of a wrapped computation, and with another user of the handle."""
    groups = "channel_id=1, replica_groups=[4,2]<=[2,4]T(1,0), dimensions={0}"
    pair = "((f32[16]{0}), f32[32]{0})"
    before = f"""
%wrapped (p: f32[16]) -> f32[32] {{
  %p = f32[16]{{0}} parameter(0)
  ROOT %ag = f32[32]{{0}} all-gather(%p), {groups}
}}
"""
    start, done = "async-start(%x), calls=%wrapped", "async-done(%s), calls=%wrapped"
    other = f"%other = {pair} opt-barrier(%s)"
    body = (f"%s = {pair} {start}", other, f"ROOT %d = f32[32]{{0}} {done}")
    (only,) = wire_bytes(hlo(*body, before=before), mesh=CUBE).collectives
    assert (only.op, only.axes, only.received_bytes) == ("all-gather", ("hosts",), 64)
    assert only.shapes == ("f32[16]",)


# Branch 0 moves 64 bytes between hosts, branch 1 moves 192 within them and 8 between.
BRANCHES = """
%between (p: f32[16]) -> f32[16] {
  ROOT %p = f32[16]{0} parameter(0)
  %b = f32[16]{0} all-reduce(%p), replica_groups={{0,4},{1,5},{2,6},{3,7}}, to_apply=%add
}

%inside (q: f32[16]) -> f32[16] {
  %q = f32[16]{0} parameter(0)
  %two = f32[2]{0} slice(%q), slice={[0:2]}
  %few = f32[2]{0} all-reduce(%two), replica_groups={{0,4},{1,5},{2,6},{3,7}}, to_apply=%add
  %i = f32[16]{0} all-gather(%q), replica_groups={{0,1,2,3},{4,5,6,7}}, dimensions={0}
  ROOT %j = f32[16]{0} copy(%q)
}

%body (s: (s32[], f32[16])) -> (s32[], f32[16]) {
  %s = (s32[], f32[16]{0}) parameter(0)
  %n = s32[] get-tuple-element(%s), index=0
  %v = f32[16]{0} get-tuple-element(%s), index=1
  %c = f32[16]{0} conditional(%n, %v, %v), branch_computations={%between, %inside}
  ROOT %t = (s32[], f32[16]{0}) tuple(%n, %c)
}

%condition (s2: (s32[], f32[16])) -> pred[] {
  %s2 = (s32[], f32[16]{0}) parameter(0)
  ROOT %less = pred[] constant(true)
}
"""


def loop(config):
    return hlo(
        "%zero = s32[] constant(0)",
        "%start = (s32[], f32[16]{0}) tuple(%zero, %x)",
        f"%w = (s32[], f32[16]{{0}}) while(%start), condition=%condition, body=%body{config}",
        "%g = f32[16]{0} get-tuple-element(%w), index=1",
        "ROOT %o = f32[16]{0} all-reduce(%g), channel_id=2, replica_groups={{0,1,2,3,4,5,6,7}}, "
        "use_global_device_ids=true, to_apply=%add",
        before=BRANCHES,
    )


def test_each_axis_counts_its_own_dearest_branch():
    moved = wire_bytes(loop(', backend_config={"known_trip_count":{"n":"3"}}'), mesh=CUBE)
    assert moved.received == 3 * (192 + 8) + 112
    assert moved.across("hosts").received == 3 * 64 + 112
    assert moved.within("hosts").received == 3 * 192
    assert moved.usual.across("hosts").received == 3 * 64 + 112
    by_axes = {axes: each.received for axes, each in moved.by_axes.items()}
    assert by_axes == {("hosts",): 3 * 64, AXES: 112, ("fsdp", "tp"): 3 * 192}
    assert list(by_axes) == [("hosts",), AXES, ("fsdp", "tp")]
    (conditional,) = moved.across("hosts").conditionals
    assert (conditional.count, conditional.dearest) == (3, 0)
    assert [branch.received for branch in conditional.branches] == [3 * 64, 3 * 8]
    assert [branch.across("tp").received for branch in moved.conditionals[0].branches] == [0, 576]

    unused = wire_bytes(
        loop(', backend_config={"known_trip_count":{"n":"3"}}'), mesh=AbstractMesh((2, 4, 1), AXES)
    )
    assert unused.across("tp").parts == ()


def test_crossing_lists_all_branches_and_loops_without_end():
    with pytest.raises(ValueError, match="is not known"):
        wire_bytes(loop(""), mesh=CUBE)
    over_hosts = crossing(loop(""), axis_name="hosts", mesh=CUBE)
    assert [each.name for each in over_hosts] == ["b", "few", "o"]
    assert [each.count for each in over_hosts] == [1, 1, 1]
    assert [each.name for each in crossing(loop(""), axis_name="tp", mesh=CUBE)] == ["i", "o"]
    twice = "ROOT %t = f32[16]{0} call(%y), to_apply=%between"
    text = hlo("%y = f32[16]{0} call(%x), to_apply=%between", twice, before=BRANCHES)
    assert wire_bytes(text, mesh=CUBE).across("hosts").received == 2 * 64
    assert len(crossing(text, axis_name="hosts", mesh=CUBE)) == 1


COMBINED = (
    "%l = f32[] slice(%x)",
    "%r = (f32[16]{0}, f32[]) all-reduce(%x, %l), channel_id=1, replica_groups={{0,4},{1,5},{2,6},"
    '{3,7}}, to_apply=%add, metadata={op_name="jit(f)/(jaxsparse_exchange/psum:psum)"}',
    '%a = f32[16]{0} get-tuple-element(%r), index=0, metadata={op_name="jit(f)/'
    'jaxsparse_exchange/psum"}',
    "%b = f32[] get-tuple-element(%r), index=1, metadata={op_name=\"jit(f)/loss[\\'a\\']\"}",
    "ROOT %o = f32[16]{0} copy(%a)",
)


@pytest.mark.parametrize("start", ["", "-start"])
def test_a_combined_collective_is_told_by_its_parts(start):
    body = "\n  ".join(COMBINED)
    if start:
        body = body.replace("%r = ", "%s = ").replace("all-reduce(", "all-reduce-start(")
        end = "\n  %r = (f32[16]{0}, f32[]) all-reduce-done(%s)\n  %a ="
        body = body.replace("\n  %a =", end)
    text = hlo(body)
    assert wire_bytes(text, mesh=CUBE).across("hosts").received == 68
    (stray,) = crossing(text, axis_name="hosts", mesh=CUBE, outside=SCOPE)
    assert (stray.shapes, stray.received_bytes) == (("f32[]",), 4)
    assert str(stray) == ("all-reduce over hosts: f32[], 4 bytes received, from jit(f)/loss['a']")
    (whole,) = crossing(text, axis_name="hosts", mesh=CUBE)
    assert whole.shapes == ("f32[16]", "f32[]")
    own = text.replace("loss[\\'a\\']", "jaxsparse_exchange/tell")
    assert crossing(own, axis_name="hosts", mesh=CUBE, outside=SCOPE) == ()


def test_lines_of_the_source():
    tables = """
FileNames
1 "/home/me/train.py"
2 "/home/me/model.py"

FunctionNames
1 "step"

FileLocations
1 {file_name_id=1 function_name_id=1 line=20 end_line=21 column=2 end_column=2}
2 {file_name_id=2 function_name_id=1 line=7 end_line=9 column=2 end_column=2}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}

"""
    lines = {
        'metadata={op_name="f" stack_frame_id=2}': "/home/me/model.py:7",
        'metadata={op_name="f" stack_frame_id=1}': "/home/me/train.py:20",
        'metadata={op_name="f" stack_frame_id=9}': "",
        'metadata={op_name="f" source_file="/a b.py" source_line=12}': "/a b.py:12",
        'metadata={op_name="stack_frame_id=2 source_line=3"}': "",
    }
    for metadata, source in lines.items():
        text = hlo(reduce("{}") + ", " + metadata, before=tables)
        assert wire_bytes(text).collectives[0].source == source
    assert str(wire_bytes(text.replace('"stack', '"stock')).collectives[0]).endswith(
        "source_line=3"
    )


def test_what_is_asked_wrongly_is_refused():
    text = hlo(reduce("{}"))
    with pytest.raises(ValueError, match=r"mesh of these bytes is not known.*mesh=mesh"):
        wire_bytes(text).across("hosts")
    with pytest.raises(ValueError, match=r"mesh of these bytes is not known.*mesh=mesh"):
        _ = wire_bytes(text).by_axes
    for ask in (wire_bytes(text, mesh=CUBE).across, wire_bytes(text, mesh=CUBE).within):
        with pytest.raises(ValueError, match=r"axis_name='host' is not an axis.*'hosts', 'fsdp'"):
            ask("host")
    with pytest.raises(ValueError, match="axis_name='host' is not an axis"):
        crossing(text, axis_name="host", mesh=CUBE)
    with pytest.raises(ValueError, match="runs on 8 devices, but mesh has 4"):
        wire_bytes(text, mesh=AbstractMesh((2, 2), ("a", "b")))
    with pytest.raises(ValueError, match="runs on 1 devices, but mesh has 8"):
        wire_bytes(jax.jit(jnp.sin), jnp.float32(1), mesh=CUBE)
    with pytest.raises(TypeError, match=r"mesh=8 must be a jax\.sharding\.Mesh"):
        wire_bytes(text, mesh=8)


# --- compiled programs ---------------------------------------------------------------------------

MESHES = {
    "cube": ((2, 2, 2), AXES),
    "flat": ((4, 1, 2), AXES),
    "hosts": ((8,), ("hosts",)),
    "inner": ((1, 8), ("hosts", "fsdp")),
}


def mesh_of(shape, names, devices=range(8)):
    devices = np.array(jax.devices())[list(devices)].reshape(shape)
    return Mesh(devices, names, axis_types=(AxisType.Auto,) * len(names))


def compiled(f, mesh, n=16):
    """The program of `f` on each device's f32[n]."""
    body = lambda x: jax.tree.map(lambda y: y[None], f(x[0]))
    spec = P(mesh.axis_names)
    mapped = jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    return jax.jit(mapped).lower(jax.ShapeDtypeStruct((8, n), jnp.float32)).compile()


def exchange(hosts, last, x):
    """Each collective has a size of its own: 64, 56, 48, 40 bytes."""
    ring = [(i, (i + 1) % hosts) for i in range(hosts)]
    with jax.named_scope(SCOPE):
        one = lax.psum(x, "hosts")
    both = lax.psum(jnp.cos(x[:14]), tuple({last: None, "hosts": None}))
    return one, both, lax.all_gather(x[:12] * 2, last), lax.ppermute(x[:10] * 3, "hosts", ring)


@pytest.mark.parametrize("name", some(MESHES, ["cube", "inner"]))
@pytest.mark.parametrize("shuffled", some([False, True], [False]))
def test_collectives_of_the_source(name, shuffled):
    shape, names = MESHES[name]
    mesh = mesh_of(shape, names, [0, 2, 5, 3, 4, 6, 1, 7] if shuffled else range(8))
    extent, last = dict(zip(names, shape)), names[-1]
    f = functools.partial(exchange, extent["hosts"], last)
    program = compiled(f, mesh)
    moved = wire_bytes(program, mesh=mesh)
    size = lambda *axes: math.prod(extent[axis] for axis in set(axes))
    ring = lambda n, *axes: 2 * (size(*axes) - 1) / size(*axes) * n
    expected = [  # axes, received bytes
        ({"hosts"}, ring(64, "hosts")),
        ({"hosts", last}, ring(56, "hosts", last)),
        ({last}, (size(last) - 1) * 48),
        ({"hosts"}, 40 if size("hosts") > 1 else 0),
    ]
    crossed = lambda axes: {axis for axis in axes if extent[axis] > 1}
    for axis in names:
        across = sum(nbytes for axes, nbytes in expected if axis in crossed(axes))
        assert moved.across(axis).received == pytest.approx(across)
    assert moved.received == pytest.approx(sum(nbytes for _, nbytes in expected))
    assert set(moved.by_axes) == {
        tuple(axis for axis in names if axis in crossed(axes))
        for axes, nbytes in expected
        if nbytes
    }
    if len(names) > 1:  # what is traced, without devices, says the same
        shapes = jax.ShapeDtypeStruct((16,), jnp.float32)
        traced = traced_bytes(f, shapes, extent, axis_name="hosts")
        assert {axes: each.received for axes, each in traced.by_axes.items()} == pytest.approx(
            {axes: each.received for axes, each in moved.by_axes.items()}
        )
    strays = crossing(program, axis_name="hosts", mesh=mesh, outside=SCOPE)
    nbytes = sorted(each.received_bytes for each in strays)
    outside = [nbytes for axes, nbytes in expected[1:] if "hosts" in crossed(axes)]
    assert nbytes == pytest.approx(sorted(outside))
    # A program from the compilation cache names the file from which it was first compiled. That may
    # be in another checkout.
    assert all(Path(__file__).name in each.source for each in strays)


def test_groups_are_those_that_run():
    """Each device contributes a bit of its own, and receives the bits of its group."""
    mesh = mesh_of((2, 2, 2), AXES, [0, 2, 5, 3, 4, 6, 1, 7])
    along = [("hosts",), ("fsdp",), ("hosts", "tp"), ("fsdp", "tp")]
    program = compiled(lambda x: [lax.psum(x * 2.0**i, a) for i, a in enumerate(along)], mesh, 1)
    bits = np.exp2(np.arange(8, dtype=np.float32))[:, None]
    module = parse(program.as_text())
    read_off = {
        frozenset(map(frozenset, module.groups(each)))
        for each in module.computations[module.entry].instructions.values()
        if each.opcode == "all-reduce"
    }
    ran = set()
    for i, sums in enumerate(program(jax.device_put(bits, NamedSharding(mesh, P(AXES))))):
        received = (np.asarray(sums, int) >> i) >> np.arange(8) & 1
        ran.add(frozenset(frozenset(np.flatnonzero(row).tolist()) for row in received))
    assert len(ran) == len(along)
    assert ran == read_off


def test_groups_of_indices_along_an_axis():
    mesh = mesh_of((4, 2), ("hosts", "tp"))

    def f(x):
        halves = lax.all_gather(x, "hosts", axis_index_groups=[[0, 1], [2, 3]])
        return halves, lax.ppermute(x, ("hosts", "tp"), [(0, 1), (2, 3)])

    shapes, extents = jax.ShapeDtypeStruct((16,), jnp.float32), {"hosts": 4, "tp": 2}
    for moved in (
        wire_bytes(compiled(f, mesh), mesh=mesh),
        traced_bytes(f, shapes, extents, axis_name="hosts"),
    ):
        axes = {each.op: (each.axes, each.received_bytes) for each in moved.collectives}
        assert axes == {"all-gather": (("hosts",), 64), "collective-permute": (("tp",), 64)}


def test_devices_have_their_places_in_the_mesh_that_is_given():
    """The program numbers its devices by its own mesh, which may differ from the given one."""
    across = mesh_of((2, 4), ("hosts", "fsdp"))
    turned = Mesh(across.devices.T, ("fsdp", "hosts"), axis_types=(AxisType.Auto,) * 2)
    program = compiled(lambda x: lax.psum(x, "hosts"), turned)
    for mesh in (across, turned):
        assert wire_bytes(program, mesh=mesh).collectives[0].axes == ("hosts",)
    fewer = mesh_of((2, 3), ("hosts", "fsdp"), range(6))
    with pytest.raises(ValueError, match="runs on 8 devices, but mesh has 6"):
        wire_bytes(program, mesh=fewer)
    shape = jax.ShapeDtypeStruct((4,), jnp.float32)
    halves = [mesh_of((2, 2), ("hosts", "fsdp"), devices) for devices in (range(4), range(4, 8))]
    mean = jax.jit(jnp.sum, in_shardings=NamedSharding(halves[0], P("hosts")))
    with pytest.raises(ValueError, match=r"which is not in mesh: pass the mesh"):
        wire_bytes(mean, shape, mesh=halves[1])
    assert wire_bytes(mean, shape, mesh=halves[0]).collectives[0].axes == ("hosts",)


def fsdp_step(weights, batch):
    def loss(weights):
        with jax.named_scope("model"):
            hidden = jnp.tanh(batch @ weights["in"])
            out = hidden @ weights["out"]
        return (out**2).mean()

    value, grads = jax.value_and_grad(loss)(weights)
    return jax.tree.map(lambda w, g: w - g, weights, grads), value


def fsdp_program(shape, names):
    mesh = mesh_of(shape, names)
    place = lambda *axes: NamedSharding(
        mesh, P(*(tuple(a for a in part if a in names) or None for part in axes))
    )
    arrays = {
        "in": ((64, 32), place(("fsdp",), ("tp",))),
        "out": ((32, 48), place(("tp",), ("fsdp",))),
    }
    batch = ((16, 64), place(("hosts", "fsdp"), ()))
    given = lambda each: jax.ShapeDtypeStruct(each[0], jnp.float32, sharding=each[1])
    weights = {name: given(each) for name, each in arrays.items()}
    kept = {name: each[1] for name, each in arrays.items()}
    step = jax.jit(fsdp_step, out_shardings=(kept, place()))
    return mesh, step.lower(weights, given(batch)).compile()


@pytest.mark.parametrize("name", some(MESHES, ["cube", "hosts"]))
def test_a_step_whose_collectives_xla_inserts(name):
    shape, names = MESHES[name]
    mesh, program = fsdp_program(shape, names)
    moved, extent = wire_bytes(program, mesh=mesh), dict(zip(names, shape))
    hosts, inner = extent["hosts"], 8 // extent["hosts"]
    gradients = 4 * (64 * 32 + 32 * 48)
    across = moved.across("hosts")
    if hosts == 1:
        assert not across.collectives
    else:
        # Only each device's share of the gradients, and losses, have to cross.
        rest = across.received - 2 * (hosts - 1) / hosts * gradients / inner
        assert 0 < rest <= 16
        ops = {each.op for each in across.collectives}
        assert ops == {"all-reduce"}
    assert across.received + moved.within("hosts").received == pytest.approx(moved.received)
    assert moved.received == pytest.approx(sum(each.received for each in moved.by_axes.values()))
    for axis in names:
        assert bool(moved.across(axis).received) == (extent[axis] > 1)
    # By its names, the loss is told from the model's gradients.
    strays = crossing(program, axis_name="hosts", mesh=mesh, outside="model")
    assert [each.shapes for each in strays if "reduce_sum" in each.op_name] == (
        [("f32[]",)] if hosts > 1 else []
    )


def test_the_table_has_a_total_for_each_set_of_axes():
    mesh, program = fsdp_program(*MESHES["cube"])
    moved = wire_bytes(program, mesh=mesh)
    lines = str(moved).splitlines()
    assert lines[0].split()[:3] == ["collective", "axes", "count"]
    totals = [line.split() for line in lines if line.startswith("total")]
    assert totals[-1][:-1] == ["total", "all", str(moved.rounds), str(moved.payload)]
    assert [" ".join(line[1:-3]) for line in totals[:-1]] == list(map(", ".join, moved.by_axes))
    assert [line[-2] for line in totals[:-1]] == [str(e.payload) for e in moved.by_axes.values()]
    alone = wire_bytes(program.as_text())
    assert "axes" not in str(alone)
    assert "Nothing travels" not in str(moved)
    lonely = wire_bytes(jax.jit(lambda x: x * 2).lower(1.0).compile())
    assert str(lonely).endswith("Nothing travels: no collective here has two members.")
    assert (alone.payload, alone.received) == (moved.payload, moved.received)


@pytest.mark.slow
def test_devices_with_copies_share_an_exchange_as_those_with_shards_do():
    """A device of a host receives a quarter of the vector's message across, from either."""
    grid = jax.make_mesh((2, 4), ("hosts", "inner"), axis_types=(AxisType.Auto,) * 2)
    tx = jaxsparse.quantized("int4", axis_name="hosts")
    across = {}
    for spec in (P(), P("inner")):
        where = NamedSharding(grid, spec)

        def step(state, batch):
            params, opt_state = state
            grads = jax.grad(lambda w: jnp.mean((batch @ w) ** 2))(params)
            updates, opt_state = tx.update(grads, opt_state, params)
            return params - updates, opt_state

        params = jax.device_put(jnp.zeros((256, 64)), where)
        state = jaxsparse.shard((params, tx.init(params)), grid, axis_name="hosts")
        batch = jax.device_put(jnp.ones((16, 256)), NamedSharding(grid, P(("hosts", "inner"))))
        run = run_on_workers(step, grid, axis_name="hosts")
        across[spec] = wire_bytes(run, state, batch, mesh=grid).across("hosts").received
    part = {"w": jax.ShapeDtypeStruct((64, 64), jnp.float32)}
    alone = traced_bytes(jaxsparse.quantized("int4"), part, 2).received
    assert across[P()] == across[P("inner")] == pytest.approx(alone, rel=0.05)
