"""`orch env`: environments and generations. Each command parses, calls its use case, and shows what came of it."""

from __future__ import annotations

from typing import Annotated

import typer

env_app = typer.Typer(
    name="env",
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Environments at places, and the generations of recipes.",
)

PlaceArgument = Annotated[str | None, typer.Argument(metavar="PLACE", help="HOST or HOST/CONTAINER.")]
RecipeArgument = Annotated[str, typer.Argument(help="A recipe.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
ExplainOption = Annotated[
    bool, typer.Option("--explain", help="Print what would run at the place, and how often it is asked; run nothing.")
]
YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Do it without asking.")]
WhyOption = Annotated[str, typer.Option("--why", help="A word for the record.")]


@env_app.command("lock")
def lock(name: Annotated[str, typer.Argument(help="An environment under recipes/envs/.")]) -> None:
    """Make requirements.lock from requirements.in, or complete it; say which hashes are missing."""
    from orchestrator.cli.env_commands import lock_command

    lock_command(name)


@env_app.command("build")
def build(
    name: Annotated[str, typer.Argument(metavar="NAME|ID", help="An environment, or the id of one that was there.")],
    place: PlaceArgument = None,
    allow_unhashed: Annotated[
        bool, typer.Option("--allow-unhashed", help="Also files that the lock has no hash of; it is recorded.")
    ] = False,
    explain: ExplainOption = False,
    json: JsonOption = False,
) -> None:
    """Have an environment at a place; a polluted one is set aside and built anew."""
    from orchestrator.cli.env_commands import build_command

    build_command(name, place, allow_unhashed=allow_unhashed, explain=explain, json=json)


@env_app.command("verify")
def verify(
    place: PlaceArgument = None,
    all_: Annotated[bool, typer.Option("--all", "-a", help="At every place.")] = False,
    deep: Annotated[bool, typer.Option("--deep", help="Digest every file, not only what looks changed.")] = False,
    explain: ExplainOption = False,
    json: JsonOption = False,
) -> None:
    """Compare environments with what was built; polluted ones are named and set aside. Exit 1 where one is."""
    from orchestrator.cli.env_commands import verify_command

    verify_command(place, all_=all_, deep=deep, explain=explain, json=json)


@env_app.command("list")
def list_(place: PlaceArgument = None, explain: ExplainOption = False, json: JsonOption = False) -> None:
    """Show environments, generations and pins; at every place when none is given."""
    from orchestrator.cli.env_commands import list_command

    list_command(place, explain=explain, json=json)


@env_app.command("use")
def use(
    recipe: RecipeArgument,
    place: PlaceArgument = None,
    generation: Annotated[
        int | None, typer.Option("--generation", "-g", help="Pin to this generation instead of lifting the pin.")
    ] = None,
    why: WhyOption = "",
) -> None:
    """Lift a recipe's pin, so that launches take the working tree again; or pin it to any generation."""
    from orchestrator.cli.env_commands import use_command

    use_command(recipe, place, generation=generation, why=why)


@env_app.command("mark")
def mark(
    recipe: RecipeArgument,
    generation: Annotated[int, typer.Argument(help="Its number, as orch env list shows it.")],
    standing: Annotated[str, typer.Argument(metavar="good|bad|new")],
    place: PlaceArgument = None,
    why: WhyOption = "",
) -> None:
    """Say how a generation stands; this goes before what its run said."""
    from orchestrator.cli.env_commands import mark_command

    mark_command(recipe, generation, standing, place, why=why)


@env_app.command("gc")
def gc(
    place: PlaceArgument = None, yes: YesOption = False, explain: ExplainOption = False, json: JsonOption = False
) -> None:
    """Remove environments that no pin, good generation or kept run needs; shows bytes and asks."""
    from orchestrator.cli.env_commands import gc_command

    gc_command(place, yes=yes, explain=explain, json=json)
