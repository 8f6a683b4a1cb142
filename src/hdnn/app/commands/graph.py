"""`hdnn graph`: look at a graph, design its patterns, draw it, share out a table to its nodes."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Annotated, Any

from hdnn.app import progress, terminal
from hdnn.app.configs.common import plain_name
from hdnn.app.configs.table import TableData
from hdnn.app.options import argument, given, json_flag, option, overwrite_flag
from hdnn.base.files import write_atomically
from hdnn.errors import OptionError, choose

HELP = (
    "Look at a graph, design its patterns, draw it, share out a table to its nodes. A graph is a "
    "TOML file: nodes, edges .."
)
EXAMPLES = ("hdnn graph check ring8.toml", "hdnn graph draw ring8.toml")
SHOWN = 10  # pairs of nodes that break the locality condition
PICTURES = ("png", "svg", "pdf")


def _file() -> Any:
    return argument("TOML file: nodes, edges, and R, T, sizes if wanted")


def check(
    file: Annotated[str, _file()],
    as_json: Annotated[bool, json_flag()] = False,
) -> int:
    """Say what a graph has, costs and needs; exit code 2 if nothing can be trained on it."""
    from hdnn.app import graphs
    from hdnn.distributed.graph.file import patterns_of, read_table

    with progress.waiting("looking at the graph"):
        table = read_table(file)
        result = graphs.check(patterns_of(table, file))
    result = {"file": file, "designed": "R" not in table, **result}
    print(terminal.json_text(result) if as_json else _graph_text(result))
    return terminal.fail(result["fault"]) if result["fault"] else 0


def design(
    file: Annotated[str, _file()],
    keep: Annotated[str, option("what to design: R (T = I), T (R = I), or both together")] = "R",
    out: Annotated[str | None, option("TOML to write; default: print it")] = None,
    overwrite: Annotated[bool, overwrite_flag()] = False,
    as_json: Annotated[bool, json_flag()] = False,
) -> None:
    """Find the patterns with most free weights that need no more than the edges of a graph."""
    from hdnn.app import graphs
    from hdnn.distributed.graph.file import patterns_of, read_table, table_of, to_toml

    path = None if out is None else terminal.new_file(out, overwrite)
    with progress.waiting("designing"):
        table = read_table(file)
        # The patterns in the file are ignored: they are to be found anew.
        edges = {key: value for key, value in table.items() if key not in ("R", "T")}
        known = patterns_of({**edges, "R": []} if "edges" in edges else table, file)
        choose("keep", keep, graphs.KEEP)
        found = graphs.design(known, keep)
        result = {"file": file, "keep": keep, **graphs.check(found)}
    text = "".join(f"# {line}\n" for line in _design_text(result).splitlines())
    text += to_toml(table_of(found))
    if path is not None:
        write_atomically(path, text.encode())
        result["out"] = str(path)
    if as_json:
        print(terminal.json_text({**result, "graph": table_of(found)}))
    elif path is None:
        sys.stdout.write(text)
    else:
        print(f"{_design_text(result)}\n{path}")


def split(
    file: Annotated[str, _file()],
    data: Annotated[str, option("FILE.csv or FILE.parquet with a header")],
    out: Annotated[str | None, option("new folder (default: DATA-nodes)")] = None,
    seed: Annotated[int, option("of the choice of rows to test with")] = 0,
    overwrite: Annotated[bool, option("replace that folder's node files", "--overwrite")] = False,
    as_json: Annotated[bool, json_flag()] = False,
    **options: Any,
) -> None:
    """Make a file for each node of a table, with the columns that the graph gives to it."""
    from hdnn.app.tasks import split as node_files
    from hdnn.distributed.graph.file import patterns_of, read_table

    home = Path(out or f"{plain_name(data, 'data')}-nodes")
    node_files.check_free(home, overwrite)
    with progress.waiting("reading"):
        table = read_table(file)
        asked = {**given(options), "data": data, "seed": seed}
        found = node_files.split(
            patterns_of(table, file), asked, where=file, sized="sizes" in table
        )
        found.patterns.graph().tree()
    terminal.say_notes([*found.notes])
    found.write(home)
    told = {**found.facts(), "out": str(home), "graph": str(home / "graph.toml")}
    if as_json:
        print(terminal.json_text(told))
        return
    rows = [(name, ", ".join(own) or "nothing") for name, own in told["inputs"].items()]
    go_on = f"hdnn launch --graph {told['graph']} --data {home}"
    terminal.print_text(terminal.rows_text([("node", "inputs"), *rows, ("next", go_on)]))


def draw(
    file: Annotated[str, _file()],
    out: Annotated[
        str | None, option("picture to write (default: the name of the file, .png)")
    ] = None,
    overwrite: Annotated[bool, overwrite_flag()] = False,
) -> None:
    """Draw a graph, its patterns R, T and S, and who needs whom."""
    from hdnn.distributed.graph.file import patterns_of, read_table
    from hdnn.distributed.graph.graph import Graph
    from hdnn.plotting.graphs import graph_picture

    path = terminal.new_file(out or f"{Path(file).stem}.png", overwrite)
    kind = path.suffix.lower().removeprefix(".")
    if kind not in PICTURES:
        raise OptionError(f"{path} must end with one of {', '.join(f'.{k}' for k in PICTURES)}.")
    with progress.waiting("drawing"):
        patterns = patterns_of(read_table(file), file)
        Graph(patterns.R, patterns.T)  # this refuses a T with links in one direction only
        picture = io.BytesIO()
        figure = graph_picture(patterns.R, patterns.T, patterns.S)
        figure.savefig(picture, format=kind)
        write_atomically(path, picture.getvalue())
    print(path)


def _graph_text(result: dict[str, Any]) -> str:
    sizes, links = result["sizes"], result["links"]
    each = f"{sizes} each" if isinstance(sizes, int) else f"{min(sizes)} to {max(sizes)} each"
    rows = [
        ("graph", f"{result['nodes']} nodes of (p, q), {each}: {result['features']} features"),
        ("links", ", ".join(f"{n} {'none' if k is None else k}" for n, k in links.items())),
    ]
    if result["designed"]:
        rows[-1] = ("links", f"{rows[-1][1]} (R was designed, because the file has none)")
    if not result["connected"]:
        rows.append(("connected", "no"))
    else:
        far = "" if result["diameter"] is None else f"diameter {result['diameter']}, "
        root = result.get("names", ["0"])[0]
        rows.append(("connected", f"yes: {far}tree of depth {result['depth']} from node {root}"))
    if result["groups"] > 1:
        apart = f"R and T join nodes in {result['groups']} groups, which never hear of each other"
        rows.append(("groups", apart))
    count = f"{'' if result['all_breaches'] else 'at least '}{result['breaches']} times"
    local = {True: "yes: T R^T R + R^T R T <= S", False: f"no, {count}:"}
    rows.append(("local", local.get(result["local"], "yes: no edges are given to keep to")))
    rows += [("", breach["text"]) for breach in result["explanation"][:SHOWN]]
    if result["breaches"] > SHOWN:
        rows.append(("", f".. and {result['breaches'] - SHOWN} more: see --json"))
    free, counts = result["free_weights"], result["messages"]
    other = ", ".join(f"{name} {count}" for name, count in counts.items() if name != "h2")
    rows += [
        ("weights", f"{free['K']} of {free['of']} free in K_p and K_q of a layer"),
        ("messages", f"{counts['h2']} a layer and step, forward and as many backward, for h2"),
        ("", f"({other}; each node a process)"),
    ]
    return terminal.rows_text(rows)


def _design_text(result: dict[str, Any]) -> str:
    what = {"R": "R for T = I", "T": "T for R = I", "both": "R and T"}[result["keep"]]
    free, links = result["free_weights"], result["links"]
    lines = [
        f"{what}: most free weights for the {links['S']} edges of {result['file']}",
        f"links of R {links['R']}, of T {links['T']}; free weights of a layer: {free['K']} of "
        f"{free['of']} in K_p and K_q, {free['X']} in X if that is learned",
    ]
    if result["groups"] > 1:
        lines.append(f"{result['groups']} groups of nodes never hear of each other")
    return "\n".join(lines)


CONFIGS_OF: dict[Any, tuple[type, ...]] = {split: (TableData,)}
EXAMPLES_OF = {
    check: ("hdnn graph check ring8.toml", "hdnn graph check ring8.toml --json | jq .local"),
    design: (
        "hdnn graph design ring8.toml",
        "hdnn graph design ring8.toml --keep both --out designed.toml",
    ),
    split: ("hdnn graph split plant.toml --data log.csv --target fault --out nodes",),
    draw: ("hdnn graph draw ring8.toml", "hdnn graph draw ring8.toml --out ring.svg"),
}
