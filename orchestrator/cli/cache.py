"""`orch cache`: compile caches, at places and here. Each command parses, calls its use case, shows what came of it."""

from __future__ import annotations

from typing import Annotated

import typer

cache_app = typer.Typer(
    name="cache",
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Compile caches at places, and those kept on this machine.",
)

PlaceArgument = Annotated[str | None, typer.Argument(metavar="PLACE", help="HOST or HOST/CONTAINER.")]
CacheArgument = Annotated[
    str, typer.Argument(metavar="KEY|RECIPE", help="A key, a beginning of it, KEY/DIGEST, or a recipe: its latest.")
]
HereOption = Annotated[bool, typer.Option("--here", help="Those kept on this machine.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
ExplainOption = Annotated[
    bool, typer.Option("--explain", help="Print what would run at the place, and how often it is asked; run nothing.")
]
YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Do it without asking.")]


@cache_app.command("warm", short_help="Compile what a recipe will use; train nothing.")
def warm(
    recipe: Annotated[str, typer.Argument(help="A recipe of the bundled trainer.")],
    place: Annotated[
        str | None, typer.Option("--place", "-p", metavar="PLACE", help="HOST or HOST/CONTAINER, such as pve/200.")
    ] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a key of the recipe.")
    ] = None,
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Return once it runs.")] = False,
    explain: ExplainOption = False,
    json: JsonOption = False,
) -> None:
    """Compile all that a recipe's runs will use, on every kind of GPU there, and train nothing."""
    from orchestrator.cli.cache_commands import warm_command

    warm_command(recipe, place, set_ or [], detach=detach, explain=explain, json=json)


@cache_app.command("list", short_help="Show caches: size, key, hits, last use.")
def list_(
    place: PlaceArgument = None, here: HereOption = False, explain: ExplainOption = False, json: JsonOption = False
) -> None:
    """Show caches: size, key, hits, seconds saved, last use. At every place and here when none is given."""
    from orchestrator.cli.cache_commands import list_command

    list_command(place, here=here, explain=explain, json=json)


@cache_app.command("verify", short_help="Hold every file against its digest.")
def verify(
    place: PlaceArgument = None, here: HereOption = False, explain: ExplainOption = False, json: JsonOption = False
) -> None:
    """Hold every file against its digest; damaged, missing and foreign ones are named. Exit 1 where there is one."""
    from orchestrator.cli.cache_commands import verify_command

    verify_command(place, here=here, explain=explain, json=json)


@cache_app.command("gc", short_help="Remove caches by age and size; asks first.")
def gc(
    place: PlaceArgument = None,
    here: HereOption = False,
    older: Annotated[
        float | None, typer.Option("--older-than", metavar="DAYS", min=0, help="Also what no run used for so long.")
    ] = None,
    larger: Annotated[
        str | None,
        typer.Option("--larger-than", metavar="SIZE", help="Also the longest unused, until all take no more: 20GB."),
    ] = None,
    yes: YesOption = False,
    explain: ExplainOption = False,
    json: JsonOption = False,
) -> None:
    """Remove caches by age and size, never one that a good generation, a pin or a live run names; asks first."""
    from orchestrator.cli.cache_commands import gc_command

    gc_command(place, here=here, older=older, larger=larger, yes=yes, explain=explain, json=json)


@cache_app.command("pull", short_help="Take a cache of a place into this machine's store.")
def pull(
    cache: CacheArgument, place: PlaceArgument = None, explain: ExplainOption = False, json: JsonOption = False
) -> None:
    """Take a cache of a place into the store of this machine, packed as it will travel."""
    from orchestrator.cli.cache_commands import pull_command

    pull_command(cache, place, explain=explain, json=json)


@cache_app.command("push", short_help="Bring a cache of this machine's store to a place.")
def push(
    cache: CacheArgument, place: PlaceArgument = None, explain: ExplainOption = False, json: JsonOption = False
) -> None:
    """Bring a cache of this machine's store to a place: only what is missing there travels."""
    from orchestrator.cli.cache_commands import push_command

    push_command(cache, place, explain=explain, json=json)
