"""The units of a study, as text."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from rich.table import Table

from onepass.errors import InputError
from onepass.metrics import metrics
from onepass.studies.store import Store, Unit


def listing(folder: Path) -> Table:
    """A table with one line per unit."""
    made = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("unit", "method", "part", "seed", "hyper-parameters", "state", "A_T %"):
        made.add_column(heading)
    with Store.read(folder) as store:
        for identity, entry in store.contents.entries.items():
            unit, state, accuracy = entry.unit, "planned", ""
            if identity in store.contents.records:
                found = metrics(store.record(identity)).A_T
                state, accuracy = (
                    ("diverged", "") if found is None else ("done", f"{100 * found:.1f}")
                )
            elif entry.traceback is not None:
                state = "failed"
            made.add_row(
                identity, unit.method, unit.part, str(unit.seed), _values(unit), state, accuracy
            )
    return made


def page(folder: Path, name: str) -> str:
    """Everything about one unit."""
    with Store.read(folder) as store:
        matching = [identity for identity in store.contents.entries if identity.startswith(name)]
        if len(matching) != 1:
            what = "is no unit of this study"
            if matching:
                what = f"could be {len(matching)} units: write more of its name"
            raise InputError(f"'{name}' {what}; 'onepass show {folder}' lists them")
        unit = matching[0]
        entry = store.contents.entries[unit]
        lines = [f"unit {unit}, row {entry.place} of fleet {entry.fleet}", "", "configuration"]
        lines += [f"  {key} = {value}" for key, value in sorted(entry.unit.configuration.items())]
        if entry.traceback is not None:
            trace = (f"  {line}" for line in entry.traceback.splitlines())
            return "\n".join([*lines, "", "failed", *trace])
        if unit not in store.contents.records:
            return "\n".join([*lines, "", "not finished"])
        stored, record = store.contents.records[unit], store.record(unit)
    made = stored.provenance
    versions = ", ".join(f"{package} {version}" for package, version in made.versions.items())
    lines += ["", f"finished {stored.finished} on {made.device}, source {made.revision}"]
    lines += [f"  {versions}", "", "metrics"]
    found = asdict(metrics(record))
    lines += [f"  {key} = {value:.6g}" for key, value in found.items() if value is not None]
    lines += [f"  state_bytes = {record.state_bytes}", f"  diverged = {record.diverged}"]
    if record.violations is not None:
        lines += [f"  violations per task = {' '.join(map(str, record.violations))}"]
    lines += ["", "accuracy in % on each task (columns) after each task (rows)"]
    lines += ["  " + " ".join(f"{100 * value:5.1f}" for value in row) for row in record.accuracy]
    return "\n".join(lines)


def _values(unit: Unit) -> str:
    return " ".join(f"{name}={value:g}" for name, value in unit.hyperparameters.items())
