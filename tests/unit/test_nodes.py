"""Nodes in columns say what nodes as objects said."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from sglang_persist.model import Node, Piece, Space
from sglang_persist.nodes import NodeTable, Pieces, owners, prefix_sum, taken
from sglang_persist.plan.paths import choose_paths, select
from sglang_persist.plan.tree import Known, KnownNodes, TreeNode, TreeNodes

SEGMENTS = [bytes([i]) * 16 for i in range(4)]
PIECE = st.builds(
    Piece, st.integers(0, 2), st.integers(0, 50), st.sampled_from(SEGMENTS), st.integers(0, 2**32 - 1),
    st.integers(0, 9), st.integers(1, 60),
)  # fmt: skip
GROUPS = st.lists(st.lists(PIECE, max_size=4).map(tuple), max_size=8)
SPACE = st.sampled_from([Space(), Space("a"), Space(None, "s"), Space(bigram=True)])


@st.composite
def trees(draw) -> list[TreeNode]:
    out: list[TreeNode] = []
    for i in range(draw(st.integers(0, 12))):
        parent = draw(st.integers(-1, i - 1))
        start = out[parent].end if parent >= 0 else 0
        out.append(TreeNode(100 + i, parent, start, start + draw(st.integers(1, 50))))
    return out


@given(st.lists(st.integers(0, 5), max_size=9), st.data())
def test_groups_of_rows_are_those_of_python(counts, data):
    bounds = prefix_sum(np.array(counts, np.int64))
    groups = [list(range(bounds[i], bounds[i + 1])) for i in range(len(counts))]
    assert [len(g) for g in groups] == counts
    assert owners(bounds).tolist() == [i for i, g in enumerate(groups) for _ in g]
    chosen = data.draw(st.lists(st.sampled_from(range(len(counts))), max_size=9)) if counts else []
    rows, after = taken(bounds, np.array(chosen, np.int64))
    assert rows.tolist() == [row for i in chosen for row in groups[i]]
    assert np.diff(after).tolist() == [counts[i] for i in chosen]


@given(GROUPS, GROUPS, st.data())
def test_pieces_come_back_whatever_is_done_to_them(a, b, data):
    pieces = Pieces.of(a)
    assert [pieces[i] for i in range(len(pieces))] == a
    both = Pieces.join([pieces, Pieces.of(b)])
    assert [both[i] for i in range(len(both))] == [*a, *b]
    chosen = data.draw(st.lists(st.sampled_from(range(len(both))), max_size=9)) if len(both) else []
    taken = both.take(np.array(chosen, np.int64))
    assert [taken[i] for i in range(len(taken))] == [[*a, *b][i] for i in chosen]
    used = {(p.segment, p.record) for group in a for p in group}
    assert pieces.used() == used == set(pieces.records())
    assert pieces == Pieces.join([Pieces.of([]), pieces])
    assert (pieces == Pieces.of(b)) is (a == b)
    some = [place for place in sorted(used) if data.draw(st.booleans())]
    places = {place: (b"new" + bytes(13), i) for i, place in enumerate(some)}
    moved = pieces.moved(places)
    expected = [
        tuple(p._replace(segment=s, record=r) for p in g for s, r in [places.get((p.segment, p.record), p[2:4])])
        for g in a
    ]
    assert [moved[i] for i in range(len(moved))] == expected
    assert [pieces[i] for i in range(len(pieces))] == a, "what they were made from stays as it was"


@given(GROUPS)
def test_a_table_of_nodes_is_as_good_as_a_tuple(groups):
    nodes = tuple(Node(i - 1, i % 3, i + 1, g) for i, g in enumerate(groups))
    table = NodeTable.of(nodes)
    assert tuple(table) == nodes and table == nodes and nodes == table and len(table) == len(nodes)
    if nodes:
        assert table[-1] == nodes[-1]
        assert table != nodes[:-1]


@given(trees(), st.data())
def test_tree_nodes_are_taken_with_their_parents(nodes, data):
    table = TreeNodes.of(nodes)
    assert list(table) == nodes and [table[i] for i in range(len(table))] == nodes
    assert table.tokens == sum(n.end - n.start for n in nodes)
    chosen = [i for i in range(len(nodes)) if data.draw(st.booleans())]
    place = {old: new for new, old in enumerate(chosen)}
    expected = [nodes[i]._replace(parent=place.get(nodes[i].parent, -1)) for i in chosen]
    assert list(table.take(np.array(chosen, np.int64))) == expected


@given(trees(), st.integers(1, 200))
def test_short_paths_are_left_out_as_a_choice_of_paths_would(nodes, least):
    found = select(TreeNodes.of(nodes), 1.0, least)
    sizes = [n.end - n.start for n in nodes]
    wanted = choose_paths([n.parent for n in nodes], sizes, sum(sizes), least).nodes
    assert found.id.tolist() == [nodes[i].id for i in sorted(wanted)]


@given(st.dictionaries(st.integers(0, 40), st.tuples(SPACE, st.lists(PIECE, max_size=3).map(tuple))), st.data())
def test_what_is_known_is_found_by_id(entries, data):
    known = {i: Known(i, i + 5, space, pieces) for i, (space, pieces) in entries.items()}
    table = KnownNodes.of(known)
    later = {i: Known(i, i + 7, Space(), ()) for i in data.draw(st.lists(st.integers(0, 45), unique=True, max_size=5))}
    for i, k in later.items():
        table[i] = k
    expected = {**known, **later}
    ids = np.arange(50)
    assert [table.get(int(i)) for i in ids] == [expected.get(int(i)) for i in ids]
    whole = table.in_columns()
    assert len(set(whole.spaces)) == len(whole.spaces)
    assert len(whole) == len(expected)
    assert [whole.get(int(i)) for i in ids] == [expected.get(int(i)) for i in ids]
    rows = whole.rows(ids)
    assert [None if r < 0 else whole.row(int(r)) for r in rows] == [expected.get(int(i)) for i in ids]
    gone = {SEGMENTS[0], SEGMENTS[2]}
    left = {i: k for i, k in expected.items() if gone.isdisjoint(p.segment for p in k.pieces)}
    assert {int(i): table.without(gone).get(int(i)) for i in table.without(gone).id} == left
    used = {(p.segment, p.record) for k in list(expected.values())[::2] for p in k.pieces}
    kept = {i: k for i, k in expected.items() if all((p.segment, p.record) in used for p in k.pieces)}
    assert {int(i): table.within(used).get(int(i)) for i in table.within(used).id} == kept
