"""The commands for graphs: look at one, design and draw its patterns, train on it.

As in `hdnn.app.cli`, whose commands these are: flags to calls, results to text.
"""

from __future__ import annotations

import functools
import io
import os
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from hdnn.app import cli
from hdnn.errors import OptionError, choose

if TYPE_CHECKING:
    import typer

    from hdnn.app.graph_tasks import Asked
    from hdnn.distributed.graph.graph import Graph
else:
    with suppress(ImportError):  # `hdnn.__main__` says what to install
        import typer

HELP = "Look at a graph, design its patterns, draw it. A graph is a TOML file: nodes, edges .."
SHOWN = 10  # pairs of nodes that break the locality condition
PAIRS = 24  # of parts in the table of traffic
PROCESSES = 32  # that are started without a word on their number
TIMEOUT = 60.0  # seconds until a silent part counts as lost
PATIENCE = 5.0  # seconds to find out which process is gone
PICTURES = ("png", "svg", "pdf")
ALSO = ("graph", "nodes", "parts", "out", "resume", "timeout", "save_every", "replicas", "restarts")
ALSO += ("as_json", "quiet")


def _json_flag() -> Any:
    return typer.Option("--json", help="print one JSON object")


def _file() -> Any:
    return typer.Argument(help="TOML file: nodes, edges, and R, T, sizes if wanted")


_data = functools.partial(cli._option, "Graph and data")
_network = functools.partial(cli._option, "Network")
_training = functools.partial(cli._option, "Training")
_run = functools.partial(cli._option, "Run")


def add_to(app: typer.Typer) -> None:
    """Make the commands part of the program."""
    group = typer.Typer(
        help=HELP,
        epilog=cli._examples("hdnn graph check ring8.toml", "hdnn graph draw ring8.toml"),
        no_args_is_help=False,
    )
    examples = {
        check: ("hdnn graph check ring8.toml", "hdnn graph check ring8.toml --json | jq .local"),
        design: (
            "hdnn graph design ring8.toml",
            "hdnn graph design ring8.toml --keep both --out designed.toml",
        ),
        draw: ("hdnn graph draw ring8.toml", "hdnn graph draw ring8.toml --out ring.svg"),
    }
    for command, lines in examples.items():
        group.command(epilog=cli._examples(*lines))(cli._guarded(command))
    app.add_typer(group, name="graph")
    lines = (
        "hdnn launch --nodes 8 --data swiss_roll --layers 4",
        "hdnn launch --graph grid.toml --parts 4 --data double_circles",
        "hdnn launch --resume --out runs/ring8-swiss_roll-h2-4-0",
    )
    app.command(epilog=cli._examples(*lines))(cli._guarded(launch))


# Looking at a graph


def check(
    file: Annotated[str, _file()],
    as_json: Annotated[bool, _json_flag()] = False,
) -> int:
    """Say what a graph has, costs and needs; exit code 2 if nothing can be trained on it."""
    from hdnn.app import graph_tasks
    from hdnn.distributed.graph.file import patterns_of, read_table

    with cli._waiting("looking at the graph"):
        table = read_table(file)
        result = graph_tasks.check(patterns_of(table, file))
    result = {"file": file, "designed": "R" not in table, **result}
    print(cli._json(result) if as_json else _graph_text(result))
    return cli._fail(result["fault"]) if result["fault"] else 0


def design(
    file: Annotated[str, _file()],
    keep: Annotated[
        str, typer.Option(help="what to design: R (T = I), T (R = I), or both together")
    ] = "R",
    out: Annotated[str | None, typer.Option(help="TOML to write; default: print it")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="replace that file")] = False,
    as_json: Annotated[bool, _json_flag()] = False,
) -> None:
    """Find the patterns with most free weights that need no more than the edges of a graph."""
    from hdnn.app import graph_tasks
    from hdnn.base.files import write_atomically
    from hdnn.distributed.graph.file import patterns_of, read_table, table_of, to_toml

    path = None if out is None else cli._new_file(out, overwrite)
    with cli._waiting("designing"):
        table = read_table(file)
        # What the file has of them is not looked at: it is what is sought.
        edges = {key: value for key, value in table.items() if key not in ("R", "T")}
        given = patterns_of({**edges, "R": []} if "edges" in edges else table, file)
        choose("keep", keep, graph_tasks.KEEP)
        found = graph_tasks.design(given, keep)
        result = {"file": file, "keep": keep, **graph_tasks.check(found)}
    text = "".join(f"# {line}\n" for line in _design_text(result).splitlines())
    text += to_toml(table_of(found))
    if path is not None:
        write_atomically(path, text.encode())
        result["out"] = str(path)
    if as_json:
        print(cli._json({**result, "graph": table_of(found)}))
    elif path is None:
        sys.stdout.write(text)
    else:
        print(f"{_design_text(result)}\n{path}")


def draw(
    file: Annotated[str, _file()],
    out: Annotated[
        str | None, typer.Option(help="picture to write (default: the name of the file, .png)")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="replace that file")] = False,
) -> None:
    """Draw a graph, its patterns R, T and S, and who needs whom."""
    from hdnn.base.files import write_atomically
    from hdnn.distributed.graph.file import patterns_of, read_table
    from hdnn.plotting import graphs as graph_plot

    path = cli._new_file(out or f"{Path(file).stem}.png", overwrite)
    kind = path.suffix.lower().removeprefix(".")
    if kind not in PICTURES:
        raise OptionError(f"{path} must end with one of {', '.join(f'.{k}' for k in PICTURES)}.")
    with cli._waiting("drawing"):
        patterns = patterns_of(read_table(file), file)
        picture = io.BytesIO()
        figure = graph_plot.graph_picture(patterns.R, patterns.T, patterns.S)
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
        rows.append(("connected", f"yes: {far}tree of depth {result['depth']} from node 0"))
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
    return cli._rows(rows)


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


# Training on one


def wanted(given: dict[str, Any]) -> bool:
    """Whether the flags of `hdnn train` mean a training on a graph."""
    if "graph" in given:
        return True
    if "resume" in given and "out" in given:  # a complete command in itself
        folder = Path(given["out"])
        if (folder / "config.json").is_file() and not (folder / "config.toml").is_file():
            return True
    for name in ("timeout", "save_every"):
        if name in given:
            raise OptionError(f"--{name.replace('_', '-')} is for a training on a graph: --graph.")
    return False


def train(given: dict[str, Any]) -> int:
    """Train as the part of the graph that the environment says this process is."""
    from hdnn.app import graph_tasks, tasks
    from hdnn.distributed import worker
    from hdnn.distributed.messages.connect import parts_here
    from hdnn.distributed.messages.gloo import LostError
    from hdnn.training.processes.launch import is_first, several, speak_as_one

    speak_as_one()
    parts = parts_here()
    with cli._waiting("looking at the graph", not _silent(given)):
        asked, timeout, save_every = _asked(given)
        plan = graph_tasks.plan_of(asked.graph, parts)
    if parts == 1:  # else only the root, which is one of many, can know
        done = graph_tasks.check_folder(asked)
        graph_tasks.check_data(asked)
        if done:
            return _tell(graph_tasks.metrics(asked.folder), asked, "as_json" in given)
    if is_first():
        _warn(asked.graph)
    show = os.environ.get("RANK", "0") == str(plan.owner[0]) and not _silent(given)
    with tasks.one_thread(), _EpochBar(asked.folder.name, asked.options["epochs"], show) as bar:
        if several():
            _hear_before_the_end()
        try:
            metrics = worker.work(
                asked.config,
                out=asked.folder,
                resume=asked.resume,
                timeout=timeout,
                save_every=save_every,
                tell=bar.tell,
            )
        except LostError as error:
            return cli._fail(f"{str(error).removesuffix('.')}; {_go_on(asked, 'train')}", 1)
        except KeyboardInterrupt as error:
            raise _stopped(asked, "train") from error
    if "traffic" not in metrics:  # not the root's
        return 0
    return _tell(metrics, asked, "as_json" in given)


def launch(
    nodes: Annotated[
        int | None, _data("of a ring; or, to be sure, of the graph that --graph names")
    ] = None,
    graph: Annotated[str | None, _data("TOML file; see hdnn graph")] = None,
    data: Annotated[
        str | None,
        _data("swiss_roll (default), double_moons, double_circles, or a folder of node files"),
    ] = None,
    network: Annotated[str | None, _network("h1, h2 (default), verlet or yoshida4")] = None,
    layers: Annotated[int | None, _network("their number N (default: 4)")] = None,
    step: Annotated[float | None, _network("h (default: 0.5)")] = None,
    activation: Annotated[str | None, _network("tanh (default), relu, sigmoid ..")] = None,
    init: Annotated[
        str | None, _network("weights: auto (default), masked (as one network), scaled or paper")
    ] = None,
    epochs: Annotated[int | None, _training("default: 50")] = None,
    batch: Annotated[int | None, _training("minibatch size (default: 125)")] = None,
    learning_rate: Annotated[float | None, _training("default: 0.02")] = None,
    schedule: Annotated[str | None, _training("cosine (default) or constant")] = None,
    warmup: Annotated[
        float | None, _training("fraction of steps with a rising rate (default: 0.2)")
    ] = None,
    weight_decay: Annotated[float | None, _training("of hidden layers (default: 0)")] = None,
    clip: Annotated[float | None, _training("largest gradient norm (default: 0.1)")] = None,
    solver: Annotated[
        str | None, _training("of the output layer: newton (default for few features), adam, joint")
    ] = None,
    ridge: Annotated[float | None, _training("on the output layer (default: 5e-5)")] = None,
    smoothness: Annotated[float | None, _training("of weights over layers (default: 5e-3)")] = None,
    smoothing: Annotated[str | None, _training("that is cosine (default) or constant")] = None,
    seed: Annotated[int | None, _run("of data, weights and shuffle (default: 0)")] = None,
    dtype: Annotated[str | None, _run("float32 (default) or float64")] = None,
    parts: Annotated[
        int | None, _run("processes that share the nodes (default: one for each node)")
    ] = None,
    replicas: Annotated[
        int, _run("of the graph, each with its share of every minibatch and processes of its own")
    ] = 1,
    out: Annotated[str | None, _run("new folder (default: runs/GRAPH-DATA-NETWORK-N-SEED)")] = None,
    resume: Annotated[bool, _run("go on where a training stopped", "--resume")] = False,
    save_every: Annotated[int | None, _run("steps between two shards (default: an epoch)")] = None,
    restarts: Annotated[int, _run("after a fault, start again so many times")] = 0,
    timeout: Annotated[float, _run("seconds until a silent process counts as lost")] = TIMEOUT,
    as_json: Annotated[bool, _run("print one JSON object", "--json")] = False,
    quiet: Annotated[bool, _run("no progress display", "--quiet")] = False,
) -> int:
    """Train on a graph by as many processes of this machine, which talk to neighbours only."""
    given = {k: v for k, v in locals().items() if not (v is None or v is False)}
    import json

    from hdnn.app import graph_tasks
    from hdnn.distributed.launch import launch as start
    from hdnn.distributed.training.run import name_of
    from hdnn.training.checkpoint import locked
    from hdnn.training.processes import meeting

    with cli._waiting("looking at the graph", not _silent(given)):
        asked, timeout, save_every = _asked(given)
    if not 0 <= restarts <= 1000:
        raise OptionError(f"restarts must be a whole number from 0 to 1000, but got {restarts}.")
    if not 1 <= replicas <= PROCESSES:
        raise OptionError(f"replicas must be a whole number from 1 to {PROCESSES}, not {replicas}.")
    if parts is None and asked.graph.nodes > PROCESSES:
        raise OptionError(
            f"a process for each of {asked.graph.nodes} nodes may be more than this machine can "
            "hold; say how many with --parts."
        )
    plan = graph_tasks.plan_of(asked.graph, asked.graph.nodes if parts is None else parts)
    done = graph_tasks.check_folder(asked)
    graph_tasks.check_data(asked)
    if done:
        return _tell(graph_tasks.metrics(asked.folder), asked, as_json)
    meeting.check_loopback()
    _warn(asked.graph)
    bar = _EpochBar(asked.folder.name, asked.options["epochs"], not _silent(given))
    with _folder(asked.folder), locked(asked.folder), tempfile.TemporaryDirectory() as place:
        config = Path(place) / "config.json"
        graph_tasks.write_config(asked, config)
        # A restart has to go on, and what is there already was looked at.
        command = [sys.executable, "-m", "hdnn.distributed.worker", str(config), "--resume"]
        command += ["--out", os.path.abspath(asked.folder), "--timeout", str(timeout)]
        command += [] if save_every is None else ["--save-every", str(save_every)]
        with _stopped_by_signals(), bar:
            count, name = replicas * plan.parts, name_of(plan)
            bar.open(f"starting {count} process{'es' * (count != 1)}")
            try:
                ended = start(
                    count,
                    command,
                    timeout=timeout,
                    restarts=restarts,
                    name=lambda number: name(number % plan.parts),
                    show=bar.tell,
                    environment={"HDNN_REPLICAS": str(replicas), "HDNN_TRANSPORT": "gloo"},
                )
            except KeyboardInterrupt as error:
                raise _stopped(asked, "launch") from error
    if ended.code == 130:
        raise _stopped(asked, "launch")
    if ended.code:
        told = ended.fault.removesuffix(".")
        if ended.code == 2:
            return cli._fail(f"{told}.")
        return cli._fail(f"the training stopped: {told}; {_go_on(asked, 'launch')}", 1)
    metrics = json.loads(ended.output.strip().splitlines()[-1])
    return _tell({**metrics, "restarts": ended.restarts}, asked, as_json)


def _asked(given: dict[str, Any]) -> tuple[Asked, float, int | None]:
    """The training that flags ask for, the patience with others, and the steps between shards."""
    from hdnn.app import graph_tasks

    known = (*graph_tasks.FIELDS, *graph_tasks.OPTIONS)
    for name in given:
        if name not in (*known, *ALSO):
            flag = name.replace("_", "-") if len(name) > 1 else name
            flags = ", ".join(f"--{option.replace('_', '-')}" for option in known)
            raise OptionError(f"--{flag} is not for a training on a graph; that has {flags}.")
    timeout = graph_tasks.check_time("timeout", given.get("timeout", TIMEOUT))
    save_every = given.get("save_every")
    if save_every is not None and save_every < 1:
        raise OptionError(f"save-every must be a whole number >= 1, but got {save_every}.")
    asked = graph_tasks.ask(
        {name: value for name, value in given.items() if name in known},
        graph=given.get("graph"),
        nodes=given.get("nodes"),
        out=given.get("out"),
        resume="resume" in given,
    )
    return asked, timeout, save_every


def _silent(given: dict[str, Any]) -> bool:
    return "quiet" in given or "as_json" in given


def _warn(graph: Graph) -> None:
    """What may be a mistake, though it can be trained."""
    from hdnn.app.graph_tasks import groups

    if any(len(row) > 1 for T in graph.T for row in T):
        cli._say("warning: X and J are block-diagonal in a training, so T is not used.")
    if graph.nodes > 1 and all(len(row) == 1 for R in graph.R for row in R):
        cli._say("warning: R links no nodes, so each learns on its own up to the output layer.")
    elif (apart := len(groups(graph.used))) > 1:
        cli._say(f"warning: {apart} groups of nodes never hear of each other; see graph check.")


def _go_on(asked: Asked, command: str) -> str:
    from hdnn.training.processes.launch import several

    if command == "train" and several():
        return "give the same command with --resume"
    return f"go on with: hdnn {command} --resume --out {shlex.quote(str(asked.folder))}"


def _stopped(asked: Asked, command: str) -> cli.StoppedError:
    if not (asked.folder / "config.json").is_file():
        return cli.StoppedError("interrupted before anything was written.")
    return cli.StoppedError(f"interrupted; {_go_on(asked, command)}")


def _tell(metrics: dict[str, Any], asked: Asked, as_json: bool) -> int:
    result = {**metrics, "run": str(asked.folder)}
    print(cli._json(result) if as_json else _training_text(result))
    return 0


def _training_text(result: dict[str, Any]) -> str:
    parts, nodes = result["parts"], result["nodes"]
    by, epochs = f"{parts} process{'es' * (parts != 1)}", result.get("epochs", 0)
    rows = [
        ("network", f"{result['network']} of {result['layers']} layers on {result['data']}"),
        ("graph", f"{nodes} node{'s' * (nodes != 1)} in {by}"),
        ("trained", f"{epochs} epoch{'s' * (epochs != 1)} in {result['seconds']:.1f} s"),
    ]
    if result.get("restarts"):
        rows[-1] = ("trained", f"{rows[-1][1]}, restarts: {result['restarts']}")
    for name, value in cli._measures(result).items():
        rows.append((name.replace("_", " "), cli._measure(name, value)))
    rows.append(("messages", f"{result['messages']:,}, {_bytes(result['bytes'])} in all"))
    rows.append(("run", result["run"]))
    between = _pairs(result["traffic"])
    text = cli._rows(rows)
    if not between:
        return text
    shown = between
    if len(between) > PAIRS:
        shown = sorted(between, key=lambda pair: -pair[3])[:5]
    what = "node" if parts == nodes else "part"
    lines = [(f"between {what}s", "messages", "bytes")]
    lines += [(f"{a} - {b}", f"{count:,}", _bytes(size)) for a, b, count, size in shown]
    if len(shown) < len(between):
        lines.append((f".. {len(between) - len(shown)} more", "", ""))
    width, wide, broad = (max(map(len, column)) for column in zip(*lines, strict=True))
    table = (f"{a:<{width}}  {b:>{wide}}  {c:>{broad}}".rstrip() for a, b, c in lines)
    more = f"\nall of them: {Path(result['run']) / 'metrics.json'}" * (len(shown) < len(between))
    return f"{text}\n\n" + "\n".join(table) + more


def _pairs(traffic: list[list[int]]) -> list[tuple[int, int, int, int]]:
    """Messages and bytes between two parts, both ways together."""
    found: dict[tuple[int, int], list[int]] = {}
    for sender, receiver, count, size in traffic:
        pair = found.setdefault((min(sender, receiver), max(sender, receiver)), [0, 0])
        pair[0] += count
        pair[1] += size
    return [(a, b, count, size) for (a, b), (count, size) in sorted(found.items())]


def _bytes(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.{0 if unit == 'B' else 1}f} {unit}"
        count /= 1000
    return f"{count:,.1f} TB"


# What goes on meanwhile


def _hear_before_the_end() -> None:
    """Take a SIGTERM as a Ctrl-C, but late: torchrun sends it to all when one of them is gone.

    Until then the others have found out who that is, and say so.
    """

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    def wait(*_: object) -> None:
        signal.signal(signal.SIGALRM, stop)
        signal.setitimer(signal.ITIMER_REAL, PATIENCE)

    if hasattr(signal, "setitimer"):
        with suppress(ValueError):  # not the main thread
            signal.signal(signal.SIGTERM, wait)


@contextmanager
def _folder(folder: Path) -> Iterator[None]:
    """A folder to train in, gone again if nothing was written to it."""
    from hdnn.errors import CheckpointError

    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise CheckpointError(f"cannot write to the folder {folder}: {reason}.") from error
    try:
        yield
    finally:
        with suppress(OSError):
            folder.rmdir()


@contextmanager
def _stopped_by_signals() -> Iterator[None]:
    """Take a SIGTERM as a Ctrl-C: the processes must not outlive this one."""

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    try:
        before = signal.signal(signal.SIGTERM, stop)
    except ValueError:  # not the main thread
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class _EpochBar(cli._TrainingBar):
    """The bar of a training of which the root tells after each epoch."""

    def __init__(self, title: str, epochs: int, wanted: bool) -> None:
        super().__init__(title, wanted)
        self.epochs, self.loud = epochs, wanted

    def open(self, words: str) -> None:
        """Show that something is on its way, from the beginning."""
        if self.on:
            self._open(self.epochs)
            self._show(0, words)

    def tell(self, news: dict[str, Any]) -> None:
        """What the root has told, or the launcher after a fault."""
        if "restart" in news:
            words = f"restart {news['restart']}, because {news['fault']}"
            if self.on:
                self._show(0, words)
            elif self.loud:
                cli._say(words)
            return
        if not self.on or (self.progress is None and time.monotonic() < self.due):
            return
        if self.progress is None:
            self._open(self.epochs)
        words = f"loss {news['loss']:.4f}"
        if "accuracy" in news:
            words += f", accuracy {news['accuracy']:.1%}"
        self._show(news["epoch"], f"{words}, epoch {news['epoch']}/{self.epochs}")

    def _show(self, epoch: int, words: str) -> None:
        from rich.markup import escape

        assert self.progress is not None
        assert self.task is not None
        self.progress.update(self.task, completed=epoch, values=escape(words))
