"""Commands that make something: run, convert, heal, eval, report."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from hf_posenc.cli.group import app, say, screen, waiting
from hf_posenc.cli.options import (
    CalibrationOption,
    DtypeOption,
    ModelArgument,
    RecipeArgument,
    RecipeSetOption,
    RowTokensOption,
    SchemeFileOption,
    SchemeOption,
    SetOption,
    TextsOption,
    TokensOption,
    check_row_tokens,
    checked_calibration,
    checked_dtype,
    chosen_scheme,
    parse_lengths,
    required_scheme,
)
from hf_posenc.cli.results import eval_table, run_tables
from hf_posenc.errors import PosencError
from hf_posenc.heal import load_recipe

OutOption = Annotated[
    Path | None, typer.Option("--out", "-o", metavar="PATH", help="Where the result goes.")
]


@app.command(epilog="Example: hf-posenc run quickstart")
def run(
    recipe: RecipeArgument,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="DIR", help="Run folder; default runs/<recipe name>."),
    ] = None,
    settings: RecipeSetOption = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Check the recipe, print commands and downloads; no network."
        ),
    ] = False,
) -> None:
    """Convert, heal, evaluate and report, as a recipe says; call it again to go on."""
    loaded = load_recipe(recipe, settings or ())
    folder = out or Path("runs") / loaded.name
    if dry_run:
        from hf_posenc.preview import command_lines, downloads

        print(f"# {loaded.name} is a valid recipe; step by step it is the same as")
        print(*command_lines(loaded, folder, recipe, settings or ()), sep="\n")
        print("# fetched when it runs, unless cached:")
        print(*(f"#   {line}" for line in downloads(loaded)), sep="\n")
        return
    from hf_posenc import pipeline

    finished = pipeline.run(loaded, folder, say=say)
    for table in run_tables(finished):
        screen().print(table)
    print(folder / "report.html")


@app.command(
    epilog="Example: hf-posenc convert Qwen/Qwen3-0.6B qwen3-nope4 --scheme nope_interleaved "
    "--set every=4"
)
def convert(
    model: ModelArgument,
    out: Annotated[
        Path,
        typer.Argument(metavar="DIR", help="Folder of the new checkpoint.", show_default=False),
    ],
    scheme: SchemeOption = None,
    settings: SetOption = None,
    scheme_file: SchemeFileOption = None,
    calibration: CalibrationOption = None,
    dtype: DtypeOption = None,
    compensate: Annotated[
        bool,
        typer.Option(
            "--compensate", help="Fold gains into the queries for the pairs that are dropped."
        ),
    ] = False,
    tokens: TokensOption = 4096,
    row_tokens: RowTokensOption = 512,
    texts: TextsOption = None,
    resume: Annotated[
        bool,
        typer.Option(help="Go on where a killed conversion stopped, or begin anew."),
    ] = True,
) -> None:
    """Save a model with another positional encoding, with its tokenizer and a model card.

    Files are rewritten one tensor at a time, whatever the model's size. With --dtype, --compensate,
    or a scheme that brings parameters of its own, the model is loaded instead. --tokens,
    --row-tokens and --texts say what --compensate reads.
    """
    chosen = required_scheme(scheme, settings, scheme_file)
    wanted = checked_dtype(dtype)
    if texts and not compensate:
        raise PosencError(f"--texts {texts[0]}: --compensate alone reads it; add that")
    measured = checked_calibration(calibration, chosen)
    from hf_posenc.calibration.compensation import compensable
    from hf_posenc.calibration.compensation import compensate as add_gains
    from hf_posenc.calibration.text import DEFAULT_SOURCES, calibration_rows
    from hf_posenc.checkpoint.io import save_converted
    from hf_posenc.checkpoint.stream import convert_checkpoint
    from hf_posenc.runtime.patch import patch_model
    from hf_posenc.show import read_plan
    from hf_posenc.sources import load_pretrained, load_tokenizer

    _require_new(out)
    spec, plan = read_plan(model, chosen, measured)
    if compensate:
        check_row_tokens(row_tokens, spec)
    if wanted is None and not plan.adds_parameters and not compensate:
        convert_checkpoint(model, out, plan, resume=resume)
        say(f"{plan.label}; load it with hf_posenc.load_model({str(out)!r})")
        print(out)
        return
    with waiting(f"loading {model}"):
        tokenizer = load_tokenizer(model)
        loaded = load_pretrained(model, dtype=wanted)
    if compensate:
        compensable(loaded, plan)
    patch_model(loaded, plan)
    if compensate:
        rows = calibration_rows(
            tokenizer,
            tokens=tokens,
            row_tokens=row_tokens,
            sources=tuple(texts or DEFAULT_SOURCES),
        )
        with waiting(f"compensating on {rows.numel():,} tokens"):
            add_gains(loaded, rows, say=say)
    with waiting(f"saving {plan.label}"):
        save_converted(loaded, tokenizer, out, source=model)
    say(f"{plan.label}; load it with hf_posenc.load_model({str(out)!r})")
    print(out)


@app.command(
    epilog="Example: hf-posenc export runs/quickstart/converted smollm2-nope4 --target auto"
)
def export(
    model: ModelArgument,
    out: Annotated[
        Path,
        typer.Argument(metavar="DIR", help="New folder, or a new .gguf file.", show_default=False),
    ],
    target: Annotated[
        str, typer.Option(metavar="NAME", help="Stock architecture; auto changes weights least.")
    ] = "auto",
    merge: Annotated[
        bool, typer.Option(help="Merge an adapter into the weights, or write it beside them.")
    ] = True,
) -> None:
    """Write a converted model or adapter as a checkpoint that loads without this package.

    The result is loaded through transformers alone and compared with the plan before it appears.
    Refused, with the reason, where no stock architecture computes the plan.
    """
    from hf_posenc.checkpoint.native import export_native

    with waiting(f"exporting {model}"):
        report = export_native(model, out, target, merge=merge)
    say(f"{report.target}: loads as {report.architecture}")
    for line in report.weight_changes or ("weights as they were",):
        say(f"  {line}")
    if report.max_logit_difference is not None:
        say(
            f"  largest logit difference {report.max_logit_difference:.2g}, "
            f"logits up to {report.max_logit:.3g}"
        )
    for line in report.notes:
        say(f"  {line}")
    print(out)


@app.command(epilog="Example: hf-posenc heal quickstart --out runs/quickstart/healed")
def heal(
    recipe: RecipeArgument,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", metavar="DIR", help="Result; default runs/<recipe name>/healed."
        ),
    ] = None,
    settings: RecipeSetOption = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            metavar="DIR",
            help="Converted checkpoint to heal; default: the recipe's model, converted.",
        ),
    ] = None,
    control: Annotated[
        bool,
        typer.Option("--control", help="Heal the unconverted model: the control of ce."),
    ] = False,
) -> None:
    """Heal a converted model with LoRA, as a recipe says; call it again to go on."""
    loaded = load_recipe(recipe, settings or ())
    variant: Any = "control" if control else "healed"
    folder = out or Path("runs") / loaded.name / variant
    from hf_posenc.checkpoint.io import load_model
    from hf_posenc.heal import heal as run_heal

    if control and model is not None:
        raise PosencError("--control heals the recipe's unconverted model; leave out --model")
    base = None if model is None else load_model(model, dtype=loaded.dtype)
    record = run_heal(loaded, out=folder, model=base, variant=variant)
    last = f", last loss {record.log[-1]['loss']:.4g}" if record.log else ""
    say(f"healed: {record.steps} steps, {record.tokens:,} tokens in {record.seconds:.0f} s{last}")
    print(folder)


@app.command("eval", epilog="Example: hf-posenc eval runs/quickstart/healed/adapter --tasks quick")
def evaluate(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="Hub id, folder, adapter folder, .gguf file, or pypi:NAME==VERSION.",
            show_default=False,
        ),
    ],
    tasks: Annotated[
        str,
        typer.Option("--tasks", help="Suite (quick, dev, full), our tasks, or lm-eval's; commas."),
    ] = "quick",
    lengths: Annotated[
        str | None, typer.Option("--lengths", help="Tokens per prompt, e.g. 1024,2048 or 1k,2k.")
    ] = None,
    limit: Annotated[int | None, typer.Option("--limit", help="Documents per task.")] = None,
    scheme: SchemeOption = None,
    settings: SetOption = None,
    scheme_file: SchemeFileOption = None,
    calibration: CalibrationOption = None,
    seed: Annotated[int, typer.Option("--seed", help="Of the needle documents.")] = 0,
    texts: Annotated[
        str | None, typer.Option("--texts", help="Text source; default: held-out essays.")
    ] = None,
    batch_size: Annotated[int, typer.Option("--batch-size", help="Rows per forward.")] = 1,
    device: Annotated[str | None, typer.Option("--device", help="e.g. cpu or cuda:0.")] = None,
    dtype: DtypeOption = None,
    variant: Annotated[
        str, typer.Option("--variant", help="Name of the row in reports, e.g. converted.")
    ] = "",
    out: OutOption = None,
) -> None:
    """Score a model with our long-context tasks or any task of lm-eval."""
    chosen = chosen_scheme(scheme, settings, scheme_file)
    wanted, sizes = checked_dtype(dtype), parse_lengths(lengths)
    measured = checked_calibration(calibration, chosen)
    if out is not None and out.exists():
        raise PosencError(f"{out}: exists; remove it or choose another --out")
    from hf_posenc.evaluation import evaluate as score

    source: Any = model
    options: dict[str, Any] = {"dtype": wanted, "device": device}
    tokenizer = None
    if chosen is not None:
        from hf_posenc.runtime.patch import patch_model
        from hf_posenc.show import read_plan
        from hf_posenc.sources import load_pretrained, load_tokenizer

        _, plan = read_plan(model, chosen, measured)
        tokenizer = load_tokenizer(model)
        source = patch_model(load_pretrained(model, dtype=wanted, device_map=device), plan)
        options = {}
    record = score(
        source,
        tokenizer,
        tasks,
        lengths=sizes,
        limit=limit,
        seed=seed,
        out=out,
        variant=variant,
        batch_size=batch_size,
        texts=texts,
        model_name=model,
        **options,
    )
    screen().print(eval_table(record))
    if out is not None:
        print(out)


@app.command(epilog="Example: hf-posenc report runs/a runs/b --out comparison.html")
def report(
    folders: Annotated[
        list[Path], typer.Argument(metavar="DIR...", help="Run folders.", show_default=False)
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            metavar="FILE",
            help="Default: DIR/report.html, or comparison.html for several folders.",
        ),
    ] = None,
) -> None:
    """Write one self-contained HTML page about a run, or comparing several."""
    from hf_posenc.evaluation.report import write_report

    several: Sequence[Path] = folders
    target = out or (Path("comparison.html") if len(several) > 1 else None)
    print(write_report(several, target))


def _require_new(folder: Path) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise PosencError(f"{folder}: exists and is not empty; remove it or choose another output")
