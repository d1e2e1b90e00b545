"""The command line: parse, call, print. Everything else is imported by the command that needs it."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer

from opd import __version__
from opd.errors import ConfigError, Interrupted, OpdError

# Rich help costs 150 ms of imports and draws boxes; plain help is also what a pipe wants.
_PLAIN: dict[str, Any] = {"no_args_is_help": True, "rich_markup_mode": None}
app = typer.Typer(
    **_PLAIN,
    pretty_exceptions_enable=False,
    help="On-policy distillation: the student writes, the teacher marks every token, the student moves towards the teacher.",
)
recipes_app = typer.Typer(**_PLAIN, help="List, show and copy the recipes that come with opd.")
config_app = typer.Typer(**_PLAIN, help="Show the configuration, its JSON schema, or what a key means.")
teacher_app = typer.Typer(**_PLAIN, help="A teacher for other processes and machines.")
app.add_typer(teacher_app, name="teacher")
app.add_typer(recipes_app, name="recipes")
app.add_typer(config_app, name="config")

Arguments = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="RECIPE | KEY=VALUE",
        help="Recipe files or names, later ones win; KEY=VALUE wins over all.",
        show_default=False,
    ),
]
Json = Annotated[
    bool, typer.Option("--json", help="One JSON document on standard output; progress goes to standard error.")
]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks (also OPD_DEBUG=1).")]

_LESS_MEMORY = (
    "lower train.microbatch_tokens, teacher.batch_tokens, loss.chunk_tokens or vllm.gpu_memory_utilization, "
    "or set student.gradient_checkpointing=true; a run goes on with --resume RUN and these settings"
)

NATIVE_DEFAULTS = {
    # Large CPU tensors in huge pages: a tenth of a step would otherwise go into faulting them in, one 4-KiB page at a time.
    "THP_MEM_ALLOC_ENABLE": "1",
    # vLLM's CPU engine tells everyone about its NUMA binding.
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}
"""What torch's native code reads from the environment when it is loaded; what the user has set stays."""

Answer = Callable[..., None]
"""Prints what a command has to say: a document under --json, a text otherwise."""


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Show the version.")] = False) -> None:
    if version:
        print(f"opd {__version__}")
        raise typer.Exit


@app.command()
def distill(
    arguments: Arguments = None,
    teacher: Annotated[str | None, typer.Option(metavar="MODEL", help="Folder or hub name of the teacher.")] = None,
    student: Annotated[str | None, typer.Option(metavar="MODEL", help="Folder or hub name of the student.")] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SOURCE",
            help="FILE,prompt=COLUMN or hf://org/name,name=CONFIG,prompt=COLUMN, "
            "or -,prompt=COLUMN for JSONL on standard input; may be repeated.",
        ),
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Steps of rollout, score, update and sync.")] = None,
    learning_rate: Annotated[float | None, typer.Option("--learning-rate", "--lr", help="Peak learning rate.")] = None,
    sampler: Annotated[str | None, typer.Option(help="auto, vllm or hf (transformers).")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of every random choice.")] = None,
    output: Annotated[
        str | None, typer.Option(metavar="DIR", help="Run directory; default runs/<date>-<student>-<n>.")
    ] = None,
    resume: Annotated[
        str | None, typer.Option(metavar="RUN", help="Go on with a run directory; auto: the newest with a checkpoint.")
    ] = None,
    replay: Annotated[
        str | None, typer.Option(metavar="RUN", help="Train on what a run with teacher.cache recorded.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Remove an earlier run of the same name.")] = False,
    json_output: Json = False,
    debug: Debug = False,
) -> None:
    """Distil a teacher into a student.

    \b
    opd distill --teacher Qwen/Qwen3-8B --student Qwen/Qwen3-0.6B --data prompts.jsonl,prompt=question
    opd distill recipes/math.yaml rollout.max_tokens=2048 loss.support=full

    All settings beside these options are written KEY=VALUE, as in a recipe; opd config show lists them.
    """
    with _reporting(json_output=json_output, debug=debug) as answer:
        from opd.launch import Request, launch

        flags = {
            "teacher": teacher,
            "student": student,
            "data": data,
            "steps": steps,
            "learning-rate": learning_rate,
            "sampler": sampler,
            "seed": seed,
            "output": output,
        }
        recipes, overrides = _sorted_out(arguments)
        answer(launch(Request(recipes, overrides, flags, resume, replay, force, json_output)))


@teacher_app.command("serve")
def teacher_serve(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Folder or hub name.", show_default=False)],
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 = any free one.")] = 8100,
    host: Annotated[str, typer.Option(help="Address; others than loopback need OPD_TEACHER_TOKEN.")] = "127.0.0.1",
    revision: Annotated[str | None, typer.Option(help="Hub revision.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1 …")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32 or bfloat16.")] = "auto",
    max_batch_tokens: Annotated[int, typer.Option(min=1, help="Tokens of one forward pass.")] = 8192,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of one request; more are answered 413.")] = 65_536,
    max_queue_tokens: Annotated[int, typer.Option(min=1, help="Tokens that may wait; then 503.")] = 262_144,
    max_topk: Annotated[int, typer.Option(min=1, help="Ids of a support at most.")] = 1024,
    prefix_cache_tokens: Annotated[
        int, typer.Option(min=0, help="Prompt tokens whose keys and values are remembered.")
    ] = 8192,
    tls_certificate: Annotated[Path | None, typer.Option(metavar="PEM", help="Serve https.")] = None,
    tls_key: Annotated[Path | None, typer.Option(metavar="PEM", help="Key of the certificate.")] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Listen beyond loopback without a token.")] = False,
    debug: Debug = False,
) -> None:
    """Serve a teacher to runs on other machines.

    opd distill --teacher http://HOST:PORT asks it for every kind of score. Clients send the token that OPD_TEACHER_TOKEN holds, where it is set.
    """
    with _reporting(debug=debug):
        from opd.teachers.serve import ServeRequest, serve

        request = ServeRequest(
            model=model,
            revision=revision,
            host=host,
            port=port,
            device=device,
            dtype=dtype,
            max_batch_tokens=max_batch_tokens,
            max_queue_tokens=max_queue_tokens,
            max_tokens=max_tokens,
            max_topk=max_topk,
            prefix_cache_tokens=prefix_cache_tokens,
            insecure=insecure,
            tls_certificate=tls_certificate,
            tls_key=tls_key,
        )
        serve(request, lambda url: print(f"serving {model} at {url}", flush=True))


@app.command()
def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.", show_default=False)],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder to write.", show_default=False)],
    adapter: Annotated[
        bool, typer.Option("--adapter", help="Keep LoRA adapters apart instead of merging them.")
    ] = False,
    dtype: Annotated[
        str | None,
        typer.Option("--dtype", help="float32 or bfloat16 (default: as the student was released).", show_default=False),
    ] = None,
    json_output: Json = False,
    debug: Debug = False,
) -> None:
    """Write the newest checkpoint of a run as a Hugging Face folder."""
    with _reporting(json_output=json_output, debug=debug) as answer:
        from opd.export import export_run

        written = export_run(run, folder, warn=_warn, adapter=adapter, dtype=dtype)
        document = {name: str(value) if isinstance(value, Path) else value for name, value in asdict(written).items()}
        answer(document, f"wrote {written.folder}: step {written.step}, {written.dtype}")


@app.command()
def env(json_output: Json = False, debug: Debug = False) -> None:
    """Print what a bug report needs.

    Versions, processor, GPUs, memory, commit.
    """
    with _reporting(json_output=json_output, debug=debug) as answer:
        from opd.env import as_text, environment

        found = environment()
        answer(found, as_text(found))


@recipes_app.command("ls")
def recipes_ls(json_output: Json = False) -> None:
    """List the shipped recipes."""
    from opd.recipes import shipped_recipes

    found = {name: _first_comment(path) for name, path in shipped_recipes().items()}
    if json_output:
        print(json.dumps(found, indent=2))
        return
    width = max((len(name) for name in found), default=0)
    for name, line in found.items():
        print(f"{name:<{width}}  {line}")


@recipes_app.command("show")
def recipes_show(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Of a shipped recipe.", show_default=False)],
    debug: Debug = False,
) -> None:
    """Print a recipe."""
    with _reporting(debug=debug):
        from opd.recipes import find_recipe

        print(find_recipe(name).read_text(encoding="utf-8"), end="")


@recipes_app.command("cp")
def recipes_cp(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Of a shipped recipe.", show_default=False)],
    target: Annotated[
        Path | None, typer.Argument(metavar="FILE", help="Where to; default ./NAME.yaml.", show_default=False)
    ] = None,
    debug: Debug = False,
) -> None:
    """Copy a recipe, to be changed. A file that exists is not overwritten."""
    with _reporting(debug=debug):
        from opd.recipes import find_recipe

        source = find_recipe(name)
        file = target or Path(source.name)
        file = file / source.name if file.is_dir() else file
        try:
            with file.open("x", encoding="utf-8") as copy:
                copy.write(source.read_text(encoding="utf-8"))
        except FileExistsError:
            raise ConfigError(f"{file} exists.", fix=f"name another file: opd recipes cp {name} FILE") from None
        except OSError as error:
            raise ConfigError(f"{file} cannot be written.", why=error.strerror or "") from error
        print(f"wrote {file}")


@config_app.command("show")
def config_show(arguments: Arguments = None, debug: Debug = False) -> None:
    """Print the resolved configuration.

    It is what recipes and overrides add up to, with the origin of every value.
    """
    with _reporting(debug=debug):
        from opd.recipes import load_config
        from opd.resolved import resolved_yaml

        recipes, overrides = _sorted_out(arguments)
        loaded = load_config(recipes, overrides, complete=False)
        for warning in loaded.warnings:
            _warn(warning)
        print(resolved_yaml(loaded), end="")


@config_app.command("schema")
def config_schema() -> None:
    """Print the JSON schema of a recipe."""
    from opd.schema import json_schema

    print(json.dumps(json_schema(), indent=2, ensure_ascii=False))


@config_app.command("explain")
def config_explain(
    key: Annotated[
        str | None,
        typer.Argument(
            metavar="KEY", help="Such as loss.topk.mass or train; without one, the sections.", show_default=False
        ),
    ] = None,
    debug: Debug = False,
) -> None:
    """Say what a key means, what it takes, and its default."""
    with _reporting(debug=debug):
        from opd.schema import explain

        print(explain(key))


def main() -> None:
    """Entry point of the `opd` command."""
    for stream in (sys.stdout, sys.stderr):
        # A terminal that cannot show "‖" shows "?" and does not end a run.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    for name, value in NATIVE_DEFAULTS.items():
        os.environ.setdefault(name, value)
    app(prog_name="opd")


@contextmanager
def _reporting(*, json_output: bool = False, debug: bool = False) -> Iterator[Answer]:
    """Turns errors into what / where / why / fix on standard error, and the exit code.

    Yields the function that prints a command's answer. With `json_output` it prints one document, errors are one too, and
    nothing else reaches standard output, whatever the libraries print.
    """
    if debug:
        # The environment, so that samplers and launch see it too.
        os.environ["OPD_DEBUG"] = "1"
    document_to = _reserved_stdout() if json_output else sys.stdout

    def answer(document: dict[str, Any], text: str = "") -> None:
        if json_output:
            print(json.dumps(document, ensure_ascii=False), file=document_to, flush=True)
        elif text:
            print(text)

    try:
        yield answer
    except (typer.Exit, KeyboardInterrupt, BrokenPipeError):
        raise
    except Exception as error:
        if os.environ.get("OPD_DEBUG", "") not in ("", "0"):
            traceback.print_exc()
        known = error if isinstance(error, OpdError) else _unforeseen(error)
        _print_error(known)
        answer({"error": _document(known), "exit_code": known.exit_code})
        raise typer.Exit(known.exit_code) from error


def _reserved_stdout() -> TextIO:
    """Returns the standard output as it is, and lets everything else that is printed go to standard error."""
    reserved = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return reserved


def _unforeseen(error: Exception) -> OpdError:
    """Returns the one-line form of an error that nobody raised on purpose."""
    reason = (str(error).strip() or "no message").splitlines()[0]
    # torch's OutOfMemoryError goes by its name: torch is not imported here.
    out_of_memory = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    return OpdError(
        f"{type(error).__name__}: {reason}",
        where=" ".join(getattr(error, "__notes__", [])),
        why="" if out_of_memory else "this is a bug in opd",
        fix=_LESS_MEMORY
        if out_of_memory
        else "report it with the output of `opd env` and the traceback (--debug shows it)",
    )


def _warn(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr)


def _print_error(error: OpdError) -> None:
    label = "" if isinstance(error, Interrupted) else _red("error: ")
    print(label + error.what, file=sys.stderr)
    for label, text in error.details():
        print(f"  {label + ':':<6} {text}", file=sys.stderr)
    for problem in getattr(error, "problems", []):
        print(f"- {problem.what}", file=sys.stderr)
        for label, text in problem.details():
            print(f"  {label + ':':<6} {text}", file=sys.stderr)


def _document(error: OpdError) -> dict[str, Any]:
    problems = [_document(problem) for problem in getattr(error, "problems", [])]
    return {"what": error.what, **dict(error.details())} | ({"problems": problems} if problems else {})


def _red(text: str) -> str:
    colour = sys.stderr.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
    return f"\x1b[31m{text}\x1b[0m" if colour else text


def _sorted_out(arguments: list[str] | None) -> tuple[list[str], list[str]]:
    """Returns the recipes and the overrides among the positional arguments: whatever holds `=` is an override."""
    given = arguments or []
    return [text for text in given if "=" not in text], [text for text in given if "=" in text]


def _first_comment(recipe: Path) -> str:
    first = recipe.read_text(encoding="utf-8").partition("\n")[0]
    return first.lstrip("# ").rstrip() if first.startswith("#") else ""
