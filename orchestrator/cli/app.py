"""The commands. Each one parses, calls its use case, and shows what came of it."""

from __future__ import annotations

from typing import Annotated

import typer

from orchestrator.cli.cache import cache_app
from orchestrator.cli.env import env_app

app = typer.Typer(
    name="orch",
    no_args_is_help=True,
    add_completion=False,  # orchestrator/completion answers before any of this is imported
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Launch, watch and repair training runs on your own GPU servers.",
    epilog="Start here: orch init, in your project; or orch launch demo.",
    context_settings={"help_option_names": ["-h", "--help"]},
)

RunArgument = Annotated[
    str | None,
    typer.Argument(metavar="RUN", help="A run's id, a unique beginning of it, or a recipe (its latest run)."),
]
OneRunArgument = Annotated[
    str | None, typer.Argument(metavar="RUN", help="As for status; the latest run when left out.")
]
PlaceOption = Annotated[
    str | None,
    typer.Option("--place", "-p", metavar="PLACE", help="HOST or HOST/CONTAINER, such as pve/200."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
ExplainOption = Annotated[
    bool,
    typer.Option("--explain", help="Print what would run at the place, and how often it is asked; run nothing."),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a key of the recipe, such as settings.steps=50."),
]


@app.command(short_help="Set up a project here: hosts.yaml and a recipe, checked.")
def init(
    machine: Annotated[
        str | None,
        typer.Argument(
            metavar="ALIAS",
            help="An alias of ~/.ssh/config, user@host, or local; or with its container, pve/200; asked when left out.",
        ),
    ] = None,
    container: Annotated[
        str | None, typer.Option("--container", "-c", metavar="ID", help="A VMID or name, or none: the host itself.")
    ] = None,
    kind: Annotated[
        str | None, typer.Option("--kind", metavar="KIND", help="The container's kind, where the host does not say.")
    ] = None,
    sudo: Annotated[bool, typer.Option("--sudo", help="The way into the container is by sudo -n on the host.")] = False,
    command: Annotated[
        str | None, typer.Option("--command", metavar="WORDS", help="What runs, such as 'python train.py --lr 1e-4'.")
    ] = None,
    name: Annotated[str | None, typer.Option("--name", metavar="NAME", help="The recipe's name.")] = None,
    environment: Annotated[
        str | None, typer.Option("--environment", "-e", metavar="NAME", help="An environment that is there already.")
    ] = None,
    no_check: Annotated[bool, typer.Option("--no-check", help="Connect nowhere; only write.")] = False,
    fingerprint: Annotated[
        str | None,
        typer.Option(
            "--fingerprint", metavar="SHA256:…", help="Record an unknown host key if this is its fingerprint."
        ),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Ask nothing; take what is offered first.")] = False,
) -> None:
    """Set up a project in this folder: asks for a machine and what runs, checks the place, writes hosts.yaml and a
    recipe. What is there already is kept."""
    from orchestrator.cli.init import init_command
    from orchestrator.init.flow import Options

    options = Options(machine, container, kind, command, name, environment, sudo, check=not no_check)
    init_command(options, yes=yes, fingerprint=fingerprint)


@app.command(short_help="Build the environment, stage code, start, and follow.")
def launch(
    recipe: Annotated[str, typer.Argument(help="The recipe to launch: a name under recipes/.")],
    place: PlaceOption = None,
    set_: SetOption = None,
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Return once it runs.")] = False,
    new: Annotated[bool, typer.Option("--new", help="Another run, also when the same launch is under way.")] = False,
    latest: Annotated[bool, typer.Option("--latest", help="Lift the recipe's pin: take the working tree.")] = False,
    share_gpus: Annotated[
        bool, typer.Option("--share-gpus", help="Also on GPUs that another run or process has.")
    ] = False,
    why: Annotated[str, typer.Option("--why", help="A word for the record of the generation.")] = "",
    explain: ExplainOption = False,
    json: JsonOption = False,
) -> None:
    """Build the environment, stage the code, start the trainer, follow it to its end."""
    from orchestrator.cli.launch import launch_command

    launch_command(
        recipe,
        place,
        set_ or [],
        detach=detach,
        new=new,
        latest=latest,
        share_gpus=share_gpus,
        why=why,
        explain=explain,
        json=json,
    )


@app.command(short_help="Say what a launch would do; change nothing.")
def plan(
    recipe: Annotated[str, typer.Argument(help="The recipe.")],
    place: PlaceOption = None,
    set_: SetOption = None,
    json: JsonOption = False,
) -> None:
    """Say what a launch would do, in its order, with bytes and seconds. Reads facts at the place; changes nothing."""
    from orchestrator.cli.launch import plan_command

    plan_command(recipe, place, set_ or [], json=json)


@app.command(short_help="Show runs, GPUs and log tails, at every place at once.")
def status(
    run: RunArgument = None,
    place: PlaceOption = None,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Keep looking, until Ctrl-C.")] = False,
    all_: Annotated[bool, typer.Option("--all", "-a", help="Runs that ended too, the newest 200 a place.")] = False,
    tail: Annotated[int, typer.Option("--tail", min=0, help="Lines of log to show.")] = 5,
    json: JsonOption = False,
    explain: ExplainOption = False,
) -> None:
    """Show runs, GPUs and the last lines of their logs, at every place at once."""
    from orchestrator.cli.status import status_command

    status_command(run, place, watch=watch, all_=all_, tail=tail, json=json, explain=explain)


@app.command(short_help="Show all GPUs of a host, and who has them.")
def gpus(
    place: Annotated[
        str | None, typer.Argument(metavar="PLACE", help="HOST or HOST/CONTAINER; every host when left out.")
    ] = None,
    json: JsonOption = False,
    explain: ExplainOption = False,
) -> None:
    """Show all GPUs of a host: who has which, and memory that no visible process holds."""
    from orchestrator.cli.gpus import gpus_command

    gpus_command(place, json=json, explain=explain)


@app.command()
def logs(
    run: OneRunArgument = None,
    place: PlaceOption = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the run has ended.")] = False,
    tail: Annotated[int | None, typer.Option("--tail", "-n", min=0, help="Only the last N lines.")] = None,
    pane: Annotated[bool, typer.Option("--pane", help="The tmux pane with its history, not the file.")] = False,
    explain: ExplainOption = False,
) -> None:
    """Print a run's log, byte for byte."""
    from orchestrator.cli.logs import logs_command

    logs_command(run, place, follow=follow, tail=tail, pane=pane, explain=explain)


@app.command(short_help="Say what went wrong with a run, and what to do.")
def diagnose(
    run: OneRunArgument = None,
    place: PlaceOption = None,
    log: Annotated[
        str | None, typer.Option("--log", metavar="FILE", help="Any log by itself, in place of a run; - is stdin.")
    ] = None,
    list_: Annotated[bool, typer.Option("--list", help="Print the catalogue of causes.")] = False,
    stacks: Annotated[bool, typer.Option("--stacks", help="Also where each thread stands now.")] = False,
    json: JsonOption = False,
    explain: ExplainOption = False,
) -> None:
    """Say what went wrong with a run: the cause, what shows it, and what to do."""
    from orchestrator.cli.diagnose import diagnose_command

    diagnose_command(run, place, log=log, list_=list_, stacks=stacks, explain=explain, json=json)


@app.command(short_help="Try what can go wrong with an environment's torch.")
def probe(
    place: Annotated[str | None, typer.Argument(metavar="PLACE", help="HOST or HOST/CONTAINER.")] = None,
    env: Annotated[
        str | None,
        typer.Option("--env", "-e", metavar="NAME|ID", help="An environment there; the latest used when left out."),
    ] = None,
    python: Annotated[
        str | None, typer.Option("--python", metavar="PATH", help="A Python at the place, in place of an environment.")
    ] = None,
    json: JsonOption = False,
    explain: ExplainOption = False,
) -> None:
    """Say what can go wrong with an environment's torch when it compiles: try it there. Exit 1 on a bad setting."""
    from orchestrator.cli.probe import probe_command

    probe_command(place, env=env, python=python, json=json, explain=explain)


@app.command(short_help="Check a place: what is missing there, and what to do.")
def doctor(
    place: Annotated[str | None, typer.Argument(metavar="PLACE", help="HOST or HOST/CONTAINER.")] = None,
    json: JsonOption = False,
    explain: ExplainOption = False,
) -> None:
    """Check a place: what is there, what is missing, and what to do about it. Exit 1 where a launch would fail."""
    from orchestrator.cli.doctor import doctor_command

    doctor_command(place, json=json, explain=explain)


@app.command(short_help="Enter the run's tmux session.")
def attach(run: OneRunArgument = None, place: PlaceOption = None, explain: ExplainOption = False) -> None:
    """Enter the run's tmux session. Leave it with Ctrl-b d; the run goes on."""
    from orchestrator.cli.attach import attach_command

    attach_command(run, place, explain=explain)


@app.command(short_help="Stop a run, with all of its processes.")
def stop(
    run: Annotated[str, typer.Argument(help="As for status.")],
    place: PlaceOption = None,
    kill: Annotated[bool, typer.Option("--kill", help="At once, without the grace.")] = False,
    json: JsonOption = False,
    explain: ExplainOption = False,
) -> None:
    """Stop a run: ask it to end, and after its grace end every process of it."""
    from orchestrator.cli.stop import stop_command

    stop_command(run, place, kill=kill, json=json, explain=explain)


@app.command(
    short_help="Run a command at a place: orch exec PLACE -- CMD…",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
def exec(
    context: typer.Context,
    place: Annotated[str, typer.Argument(help="HOST or HOST/CONTAINER.")],
    explain: ExplainOption = False,
) -> None:
    """Run a command at a place: orch exec PLACE -- CMD…  Its exit status is passed on; orch's own failures are 255."""
    from orchestrator.cli.exec import exec_command

    exec_command(place, list(context.args), explain=explain)


@app.command()
def trust(
    host: Annotated[str, typer.Argument(help="A host of hosts.yaml.")],
    fingerprint: Annotated[
        str | None,
        typer.Option("--fingerprint", help="Record the key only if this is its SHA256 fingerprint."),
    ] = None,
    replace: Annotated[bool, typer.Option("--replace", help="Also when another key is recorded for it.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Record it without asking.")] = False,
) -> None:
    """Show a host's SSH key and record it."""
    from orchestrator.cli.trust import trust_command

    trust_command(host, fingerprint=fingerprint, replace=replace, yes=yes)


@app.command(short_help="Print JSON Schema, by which editors help with YAML files.")
def schema(
    kind: Annotated[str | None, typer.Argument(metavar="recipe|hosts|environment", help="The kind of file.")] = None,
    write: Annotated[bool, typer.Option("--write", help="Write all of them into this project's .orch/schema.")] = False,
) -> None:
    """Print the JSON Schema (2020-12) of recipes, of hosts.yaml, or of an environment's spec.yaml."""
    from orchestrator.cli.schema import schema_command

    schema_command(kind, write=write)


app.add_typer(env_app)
app.add_typer(cache_app)


@app.command("rollback-env", short_help="Go back to the last generation that worked.")
def rollback_env(
    recipe: Annotated[str | None, typer.Argument(metavar="RECIPE", help="The latest launch's when left out.")] = None,
    place: Annotated[str | None, typer.Argument(metavar="PLACE", help="HOST or HOST/CONTAINER.")] = None,
    to: Annotated[
        int | None, typer.Option("--to", metavar="GENERATION", help="Not the last good one, but this.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do it without asking.")] = False,
    explain: ExplainOption = False,
    json: JsonOption = False,
) -> None:
    """Go back to the last generation that worked: its environment, cache and code, from the next launch on."""
    from orchestrator.cli.rollback import rollback_command

    rollback_command(recipe, place, to=to, yes=yes, explain=explain, json=json)


@app.command(short_help="Have bash, zsh or fish complete what you type.")
def completion(
    shell: Annotated[
        str | None, typer.Argument(metavar="bash|zsh|fish", help="The shell that this runs in when left out.")
    ] = None,
    show: Annotated[bool, typer.Option("--show", help="Print the script; write nothing.")] = False,
) -> None:
    """Have bash, zsh or fish complete commands, options, runs, places, recipes and keys: put it into its files."""
    from orchestrator.cli.completion import completion_command

    completion_command(shell, show=show)


def _version(value: bool) -> None:
    if value:
        import importlib.metadata

        print(f"orch {importlib.metadata.version('orch')}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    pass
