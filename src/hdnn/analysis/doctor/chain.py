"""The chain of states of any model: the tensors that all of its output depends on, in order.

They are read from the graph that automatic differentiation builds, not from the names of classes. A
state belongs to the chain if every path from the output back to the first state leads through it:
in the language of graphs, if it dominates the first state. Branches of residual blocks, skips of
U-Nets and parallel towers are no states of the chain, but what they are added to is.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from hdnn.analysis.doctor.calls import ModuleCall, Recording, rms
from hdnn.errors import DataError, OptionError, quoted

Node = Any


@dataclass
class ChainState:
    """A state y_j and the layer that makes it from the one before.

    `layer` is the name of the module, `parts` are the modules called between the two states.
    """

    layer: str
    tensor: Tensor
    time: int
    parts: tuple[str, ...] = ()
    calls: list[ModuleCall] = field(default_factory=list)

    @property
    def rms(self) -> float:
        return rms([self.tensor])


def outermost(calls: Sequence[ModuleCall]) -> list[ModuleCall]:
    """The calls that happen in no other of them."""
    found: list[ModuleCall] = []
    for one in calls:
        if not found or one.begun > found[-1].ended:
            found.append(one)
    return found


def find_chain(recording: Recording, inputs: Sequence[Tensor], output: Tensor) -> list[ChainState]:
    """The states of a recorded run, from the input (or the first embedding) to the output."""
    seen: dict[Node, tuple[int, Tensor]] = {}
    for one in recording.calls:
        for tensor, time in [*((t, one.begun) for t in one.inputs), *_ends(one)]:
            if tensor.grad_fn is not None and tensor.shape:
                node = tensor.grad_fn
                if node not in seen or time < seen[node][0]:
                    seen[node] = time, tensor
    last = max((one.ended for one in recording.calls), default=0) + 1
    if output.grad_fn is None:
        return []
    dominators = _dominators(output.grad_fn)
    starts = [(0, x) for x in inputs if x.requires_grad and x.ndim > 1]
    sources = {id(getattr(node, "variable", None)): node for node in dominators}
    first: Node = None
    for _, x in starts:
        if first is None and id(x) in sources:
            first, seen[sources[id(x)]] = sources[id(x)], (0, x)
    if first is None:
        reached = [(time, node) for node, (time, _) in seen.items() if node in dominators]
        if not reached:
            return [ChainState("output", output, last)]
        first = min(reached, key=lambda pair: pair[0])[1]
    path, node = [first], first
    while dominators[node] is not None:
        node = dominators[node]
        path.append(node)
    seen[output.grad_fn] = last, output
    found = sorted((seen[node] for node in path if node in seen), key=lambda pair: pair[0])
    return _named(recording, found, begins=not starts or found[0][0] > 0)


def _ends(one: ModuleCall) -> list[tuple[Tensor, int]]:
    return [(tensor, one.ended) for tensor in one.outputs]


def given_chain(
    model: nn.Module, recording: Recording, names: Iterable[str], output: Tensor
) -> list[ChainState]:
    """The states after the layers of these names, in the order in which they are called."""
    names = [*names]
    known = dict(model.named_modules())
    for name in names:
        if name not in known or not name:
            near = difflib.get_close_matches(str(name), [*filter(None, known)], n=1, cutoff=0.5)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise OptionError(
                f"layers: the model has no module {quoted(name)}; its names are those of "
                f"model.named_modules().{hint}"
            )
    called = {one.name for one in recording.calls}
    for name in names:
        if name not in called:
            raise OptionError(
                f"layers: the module {name!r} is not called when the model runs on x; name modules "
                "that are, such as the blocks of a list instead of the list."
            )
    found = [
        (one.ended, one.state)
        for one in sorted(recording.calls, key=lambda one: one.ended)
        if one.name in names and one.state is not None and one.state.requires_grad
    ]
    last = max(one.ended for one in recording.calls) + 1
    states = [ChainState(_title(recording, time), state, time) for time, state in found]
    if not states:
        raise DataError("layers: no gradient reaches what comes out of these modules.")
    if states[-1].tensor is not output:
        states.append(ChainState("output", output, last))
    return _with_calls(recording, states)


def _title(recording: Recording, time: int) -> str:
    return next(one.title for one in recording.calls if one.ended == time)


def _named(
    recording: Recording, found: Sequence[tuple[int, Tensor]], begins: bool
) -> list[ChainState]:
    states = [ChainState("", tensor, time) for time, tensor in found]
    _with_calls(recording, states)
    for k, state in enumerate(states):
        tops = outermost(state.calls)
        state.parts = tuple(one.title for one in tops)
        shared = _parent([one.name for one in tops]) if len(tops) > 1 else ""
        if tops and _is_one_block(recording, shared, states):
            state.layer = shared
        elif tops:
            state.layer = tops[-1].title
        elif k + 1 < len(states):
            around = [one for one in recording.calls if one.begun < state.time <= one.ended]
            state.layer = around[-1].title if around else (states[k - 1].layer if k else "input")
        else:
            state.layer = "output"
    if not begins and states:
        states[0].layer = "input"
    return states


def _is_one_block(recording: Recording, name: str, states: Sequence[ChainState]) -> bool:
    """Whether a module holds few states of the chain, so that its name says where one is."""
    calls = [one for one in recording.calls if one.name == name]
    inside = [s for s in states for one in calls if one.begun < s.time <= one.ended]
    return bool(calls) and len(inside) <= 4 * len(calls)


def _parent(names: list[str]) -> str:
    """The module that all of these are in; nothing if that is the model itself."""
    words = os.path.commonprefix([name.split(".")[:-1] for name in names])
    return ".".join(words)


def _with_calls(recording: Recording, states: list[ChainState]) -> list[ChainState]:
    """Each state with the calls that begin and end between the state before and itself."""
    before = -1
    for state in states:
        state.calls = [
            one for one in recording.calls if one.begun > before and 0 <= one.ended <= state.time
        ]
        before = state.time
    return states


def _dominators(output: Node) -> dict[Node, Node]:
    """For each node of the graph, the nearest one that all paths from the output lead through."""
    order: list[Node] = []  # the output first, each node before those that it is computed from
    state: dict[Node, bool] = {}
    stack: list[tuple[Node, bool]] = [(output, False)]
    while stack:
        node, done = stack.pop()
        if done:
            order.append(node)
            continue
        if node in state:
            continue
        state[node] = True
        stack.append((node, True))
        stack += [(child, False) for child, _ in node.next_functions if child is not None]
    order.reverse()
    place = {node: k for k, node in enumerate(order)}
    nearest: dict[Node, Node] = {output: None}
    for node in order:
        for child, _ in node.next_functions:
            if child is None:
                continue
            if child not in nearest:
                nearest[child] = node
                continue
            a, b = nearest[child], node
            while a is not b:
                if place[a] > place[b]:
                    a = nearest[a]
                else:
                    b = nearest[b]
            nearest[child] = a
    return nearest
