"""`valor lab sweep FILE.yaml`: arms x seeds of one command, finished whatever interrupts it, compared at the end.

OUT/<arm>/seed_<n>/    the run's own folder; its result.json says what ran there and whether it has ended well
OUT/results.json       every number of the comparison; OUT/table.md and OUT/report.html show it
"""

import shlex
from pathlib import Path

import click

from valor.arguments import PATH, command, option
from valor.config.describe import show
from valor.controller.jobs import LOG_FILE, run_jobs
from valor.errors import UserError
from valor.lab.sweep_plan import Run, Sweep, plan_sweep, read_sweep, texts
from valor.tracking.console import say


def run_sweep(sweep: Sweep) -> int:
    """Run what has not finished, then compare. Exit code 0; 1: a run failed; 128 + n: signal n asked to stop.

    A run that was interrupted goes on from its own checkpoints. UserError: a folder holds a run of other settings.
    """
    from valor.lab.results import summary, table, write_results
    from valor.trainer.signals import StopRequest

    _check_unchanged(sweep)
    todo = [run for run in sweep.runs if not run.finished]
    total, errors = len(sweep.runs), dict[str, str]()
    if len(todo) < total:
        say(f"{total - len(todo)} of {total} runs are finished already")

    def started(run: Run) -> None:
        run.write("running")
        say(f"{run.name}: started, {run.folder / LOG_FILE}")

    with StopRequest() as stop:
        for run, error in run_jobs(todo, sweep.config.parallel, started=started, stopping=lambda: stop.signum):
            if error and stop.signum is None:
                errors[run.name] = error
            elif not error:
                run.write("finished")
            results = write_results(sweep, errors)
            say(f"{run.name}: {error or summary(results, run)}")
        if stop.signum is not None:
            say("stopped; the same command goes on from here")
            return 128 + stop.signum
    results = write_results(sweep, errors)
    if total > 1:
        say(f"{table(results)}\n{sweep.out / 'report.html'}")
    return 1 if any(arm["errors"] for arm in results["arms"]) else 0


@command("lab sweep", "valor lab sweep examples/lab/estimators.yaml --dry-run", "lab")
@click.argument("file", type=PATH)
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]…")
@option("--out", help="Folder, in place of the file's.")
@option("--parallel", type=int, help="Runs at a time, in place of the file's.")
@option("--dry-run", is_flag=True, help="Check everything, list the runs, and stop.")
def main(file: Path, overrides: tuple[str, ...], out: str | None, parallel: int | None, dry_run: bool) -> int:
    """Run arms x seeds of a command, and compare them.

    FILE: YAML with name, entry, base, arms, grid, seeds, control, metric, out.
    KEY=VALUE: further settings of every run.
    """
    config = read_sweep(file, out=out, parallel=parallel)
    sweep = plan_sweep(config.model_copy(update={"base": [*texts(config.base), *overrides]}))
    if dry_run:
        say("\n".join(shlex.join(run.command) for run in sweep.runs))
    if sweep.missing:
        raise UserError("\n".join(sweep.missing))
    return 0 if dry_run else run_sweep(sweep)


def _check_unchanged(sweep: Sweep) -> None:
    """UserError, a line an arm: a run in the folder was made with other settings."""
    lines: dict[str, str] = {}
    for run in sweep.runs:
        before = run.record().get("settings", run.settings)
        changed = [key for key in {**before, **run.settings} if before.get(key) != run.settings.get(key)]
        if changed:
            what = ", ".join(f"{key}: {show(before.get(key))} -> {show(run.settings.get(key))}" for key in changed[:3])
            what += f" and {len(changed) - 3} more" if len(changed) > 3 else ""
            advice = "give another out, or delete what is to be repeated"
            lines.setdefault(run.arm, f"{run.folder} was run with other settings ({what}): {advice}")
    if lines:
        raise UserError("\n".join(lines.values()))
