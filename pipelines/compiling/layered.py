"""The layout of dagre, which Kubeflow's page lays its graph out with: the same boxes in the same places.

Rows first, then the order within rows by sweeps over the means of neighbours (Sugiyama), then the places by the four
alignments of Brandes and Köpf. Nodes of one size and edges without labels are all that the page has. Of rows that make
the edges equally short in all, dagre may take others; that is rare, and in no pipeline of Baton's.
"""

from __future__ import annotations

import bisect
import graphlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

Edge = tuple[str, str]
Rows = list[list[str]]
Links = Mapping[str, list[str]]

WIDTH, HEIGHT = 224, 48
"""Size of a node."""
ROW_STEP = HEIGHT + 50
_NODE_GAP, _BEND_GAP = 50, 20
_FUTILE_SWEEPS = 3


@dataclass(frozen=True)
class Layered:
    """A graph in rows, with a row between any two for bends: an edge has one in each row that it passes.

    Attributes:
        names: Nodes and bends, in the order that decides where nothing else does.
        ranks: Row of each; nodes are in even ones.
        above: Those of the row above that each is linked to.
        below: The same of the row below.
        bends: Which of them are bends.
    """

    names: list[str]
    ranks: Mapping[str, int]
    above: Links
    below: Links
    bends: frozenset[str]

    def gap(self, left: str, right: str) -> float:
        """Returns how far apart two neighbours of a row are at least."""
        return sum(_BEND_GAP / 2 if name in self.bends else (WIDTH + _NODE_GAP) / 2 for name in (left, right))


def place(nodes: Sequence[str], edges: Iterable[Edge]) -> dict[str, tuple[float, float]]:
    """Returns the centre of each node.

    Args:
        nodes: Their names, in an order that decides where nothing else does.
        edges: From which node to which; their order counts too.

    Raises:
        graphlib.CycleError: the edges lead back to where they started.
    """
    graph = _layered(nodes, list(dict.fromkeys(edges)))
    rows = _ordered(graph)
    across = _balanced(
        graph, [_aligned(graph, rows, up=up, left=left) for up in (True, False) for left in (True, False)]
    )
    return {node: (across[node], graph.ranks[node] / 2 * ROW_STEP) for node in nodes}


def _ranks(nodes: Sequence[str], edges: Sequence[Edge]) -> dict[str, int]:
    """Returns the row of each node, so that the edges are shortest in all and the nodes as low as that allows."""
    before: dict[str, list[str]] = {node: [] for node in nodes}
    after: dict[str, list[str]] = {node: [] for node in nodes}
    for source, target in edges:
        before[target].append(source)
        after[source].append(target)
    ranks: dict[str, int] = {}
    for node in reversed(list(graphlib.TopologicalSorter(before).static_order())):
        ranks[node] = min((ranks[other] for other in after[node]), default=0) - 1
    gains = {node: len(before[node]) - len(after[node]) for node in nodes}
    while rising := _rising(gains, {node: [o for o in before[node] if ranks[o] == ranks[node] - 1] for node in nodes}):
        step = min(ranks[node] - ranks[other] - 1 for node in rising for other in before[node] if other not in rising)
        ranks |= {node: ranks[node] - step for node in rising}
    top = min(ranks.values(), default=0)
    return {node: rank - top for node, rank in ranks.items()}


def _rising(gains: Mapping[str, int], tight: Links) -> set[str]:
    """Returns the nodes that gain most by moving up together, fewest of all such; empty where none gain.

    It is the closure of largest weight: gains flow to the losses of those that have to move along, and what flows to
    none is what the move is worth.

    Args:
        gains: How much shorter the edges of a node get in all by moving it.
        tight: Those right above it, which have to move along.
    """
    spare = {node: gain for node, gain in gains.items() if gain > 0}
    lacking = {node: -gain for node, gain in gains.items() if gain < 0}
    flows: dict[str, dict[str, int]] = {node: {} for node in gains}
    rising: set[str] = set()
    for start in spare:
        while spare[start]:
            came_from = {start: start}
            waiting = [start]
            for node in waiting:
                for other in (*tight[node], *(name for name, flow in flows[node].items() if flow)):
                    if other not in came_from:
                        came_from[other] = node
                        waiting.append(other)
            end = next((node for node in waiting if lacking.get(node)), None)
            if end is None:
                rising |= came_from.keys()
                break
            spare[start] -= 1
            lacking[end] -= 1
            while end != start:
                previous = came_from[end]
                if flows[previous].get(end):
                    flows[previous][end] -= 1
                else:
                    flows[end][previous] = flows[end].get(previous, 0) + 1
                end = previous
    return rising


def _layered(nodes: Sequence[str], edges: Sequence[Edge]) -> Layered:
    ranks = {node: 2 * rank for node, rank in _ranks(nodes, edges).items()}
    names = list(nodes)
    above: dict[str, list[str]] = {node: [] for node in nodes}
    below: dict[str, list[str]] = {node: [] for node in nodes}
    for source, target in edges:
        path = [source, *(f"{source}\n{target}\n{row}" for row in range(ranks[source] + 1, ranks[target])), target]
        for row, bend in enumerate(path[1:-1], ranks[source] + 1):
            ranks[bend] = row
            names.append(bend)
        for upper, lower in pairwise(path):
            below.setdefault(upper, []).append(lower)
            above.setdefault(lower, []).append(upper)
    return Layered(names, ranks, above, below, frozenset(names[len(nodes) :]))


def _ordered(graph: Layered) -> Rows:
    """Returns the rows in the order of fewest crossings that sweeps up and down come upon."""
    rows = _walked(graph)
    at = {name: index for row in rows for index, name in enumerate(row)}
    fixed: Rows = [[] for _ in rows]
    for name in graph.names:
        fixed[graph.ranks[name]].append(name)
    best, fewest, sweep, since_best = rows, -1, 0, 0
    while since_best < _FUTILE_SWEEPS:
        down = sweep % 2 == 1
        for row in range(1, len(rows)) if down else range(len(rows) - 2, -1, -1):
            links = graph.above if down else graph.below
            order = _by_means(fixed[row], links, at, from_right=sweep % 4 >= 2)
            at |= {name: index for index, name in enumerate(order)}
        tried = [sorted(row, key=at.__getitem__) for row in fixed]
        crossings = _crossings(tried, graph.below)
        sweep, since_best = sweep + 1, since_best + 1
        if fewest < 0 or crossings < fewest:
            best, fewest, since_best = tried, crossings, 0
    return best


def _walked(graph: Layered) -> Rows:
    """Returns the rows as a walk along the edges, deep before wide, comes to their members."""
    rows: Rows = [[] for _ in range(1 + max(graph.ranks.values(), default=-1))]
    seen: set[str] = set()
    waiting = sorted(graph.names, key=graph.ranks.__getitem__)[::-1]
    while waiting:
        name = waiting.pop()
        if name not in seen:
            seen.add(name)
            rows[graph.ranks[name]].append(name)
            waiting.extend(reversed(graph.below[name]))
    return rows


def _by_means(row: Sequence[str], links: Links, at: Mapping[str, int], *, from_right: bool) -> list[str]:
    """Returns a row by the mean place of those its members are linked to; who is linked to none keeps its place."""
    index = {name: place for place, name in enumerate(row)}
    means = {name: sum(at[other] for other in links[name]) / len(links[name]) for name in row if links[name]}
    movable = sorted(means, key=lambda name: (means[name], -index[name] if from_right else index[name]))
    still = [name for name in row if name not in means]
    order: list[str] = []
    for name in movable:
        while still and index[still[0]] <= len(order):
            order.append(still.pop(0))
        order.append(name)
    return order + still


def _crossings(rows: Rows, below: Links) -> int:
    crossings = 0
    for upper, lower in pairwise(rows):
        at = {name: index for index, name in enumerate(lower)}
        ends: list[int] = []
        for name in upper:
            targets = sorted(at[other] for other in below[name])
            crossings += sum(len(ends) - bisect.bisect_right(ends, target) for target in targets)
            for target in targets:
                bisect.insort(ends, target)
    return crossings


def _conflicts(graph: Layered, rows: Rows) -> set[Edge]:
    """Returns the links that cross one between two bends: such a long edge is to be straight."""
    conflicts: set[Edge] = set()
    for upper, lower in pairwise(rows):
        at = {name: index for index, name in enumerate(upper)}
        left, scanned = 0, 0
        for index, name in enumerate(lower):
            inner = next((other for other in graph.above[name] if {name, other} <= graph.bends), None)
            if inner is None and index < len(lower) - 1:
                continue
            right = len(upper) if inner is None else at[inner]
            for other in lower[scanned : index + 1]:
                conflicts |= {
                    (source, other)
                    for source in graph.above[other]
                    if not left <= at[source] <= right and not {source, other} <= graph.bends
                }
            left, scanned = right, index + 1
    return conflicts


def _aligned(graph: Layered, rows: Rows, *, up: bool, left: bool) -> dict[str, float]:
    """Returns how far right each is where each stands below (`up`) or above its median neighbour, leaning to a side."""
    links = graph.above if up else graph.below
    scanned = [row if left else row[::-1] for row in (rows if up else rows[::-1])]
    at = {name: index for row in scanned for index, name in enumerate(row)}
    conflicts = _conflicts(graph, rows)
    root = {name: name for name in graph.names}
    align = dict(root)
    for row in scanned:
        previous = -1
        for name in row:
            others = sorted(links[name], key=at.__getitem__)
            for other in others[(len(others) - 1) // 2 : len(others) // 2 + 1]:
                free = align[name] == name and previous < at[other]
                if free and (other, name) not in conflicts and (name, other) not in conflicts:
                    align[other] = name
                    align[name] = root[name] = root[other]
                    previous = at[other]
    places = _compacted(graph, scanned, root)
    return places if left else {name: -place for name, place in places.items()}


def _compacted(graph: Layered, rows: Rows, root: Mapping[str, str]) -> dict[str, float]:
    """Returns the place of each block of aligned names: as far left as may be, then as far right as its next allow."""
    gaps: dict[Edge, float] = {}
    for row in rows:
        for left, right in pairwise(row):
            pair = root[left], root[right]
            gaps[pair] = max(gaps.get(pair, 0), graph.gap(left, right))
    before: dict[str, list[str]] = {root[name]: [] for row in rows for name in row}
    after: dict[str, list[str]] = {name: [] for name in before}
    for left, right in gaps:
        before[right].append(left)
        after[left].append(right)
    order = list(graphlib.TopologicalSorter(before).static_order())
    places: dict[str, float] = {}
    for name in order:
        places[name] = max((places[other] + gaps[other, name] for other in before[name]), default=0)
    for name in reversed(order):
        if after[name]:
            places[name] = max(places[name], min(places[other] - gaps[name, other] for other in after[name]))
    return {name: places[root[name]] for name in root}


def _balanced(graph: Layered, aligned: Sequence[dict[str, float]]) -> dict[str, float]:
    """Returns the mean of the middle two of four places, after all four were shifted to the narrowest one's side."""
    half = {name: 0 if name in graph.bends else WIDTH / 2 for name in graph.names}

    def width(places: Mapping[str, float]) -> float:
        return max(place + half[name] for name, place in places.items()) - min(
            place - half[name] for name, place in places.items()
        )

    narrowest = min(aligned, key=width)
    shifted = []
    for index, places in enumerate(aligned):
        side = min if index % 2 == 0 else max
        shift = side(narrowest.values()) - side(places.values())
        shifted.append({name: place + shift for name, place in places.items()})
    return {name: sum(sorted(places[name] for places in shifted)[1:3]) / 2 for name in graph.names}
