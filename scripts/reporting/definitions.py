"""The definitions of the tables, read from experiments/tables.yaml."""

import os
from collections.abc import Collection
from pathlib import Path
from typing import Annotated

import yaml
from pydantic import AfterValidator, BaseModel, ValidationError
from pydantic_core import PydanticCustomError

from records.schema import Record
from reporting.metrics import METRICS, RELATIONS, column_header
from shared.errors import WorkshopError, did_you_mean
from shared.paths import REPOSITORY

DEFINITIONS = REPOSITORY / "experiments" / "tables.yaml"
WAY_OUT = "see the comment at its top"
COLUMNS = [*METRICS, *(f"{relation}.{metric}" for relation in RELATIONS for metric in METRICS)]
PLOTS = ["loss", "memory", "held", "peaks", "rates", "throughput", "speed"]


def one_of(known: Collection[str], what: str) -> AfterValidator:
    """Return a validator that rejects an unknown word and suggests the nearest known one. what: a noun for the word."""

    def check(word: str) -> str:
        if word not in known:
            raise PydanticCustomError(
                "unknown",
                "unknown {what} {word}",
                {"what": what, "word": word, "remedy": did_you_mean(word, known, WAY_OUT)},
            )
        return word

    return AfterValidator(check)


Column = Annotated[str, one_of(COLUMNS, "column")]


class RowDefinition(BaseModel, extra="forbid", frozen=True):
    label: str
    experiment: str
    reference: str | None = None


class TableDefinition(BaseModel, extra="forbid", frozen=True):
    """A table. The comment at the top of experiments/tables.yaml explains each key."""

    id: str
    title: str
    question: str
    rows: list[RowDefinition]
    columns: list[Column]
    reference: str = ""
    names: dict[Column, str] = {}
    note: str = ""
    plots: list[Annotated[str, one_of(PLOTS, "plot")]] = []
    per_model: bool = False
    varies: list[str] = []
    needs: Annotated[str, one_of(Record.model_fields, "field of the run record")] = "status"
    transpose: bool = False

    @property
    def headers(self) -> list[str]:
        return [self.names.get(column) or column_header(column, self.reference) for column in self.columns]

    @property
    def references(self) -> list[str]:
        """The reference experiment of each row, for its relations. The default is the experiment of the first row."""
        return [row.reference or self.rows[0].experiment for row in self.rows]


def load_definitions(path: Path = DEFINITIONS) -> list[TableDefinition]:
    """Read all tables. A WorkshopError (exit code 2) names the table and the key that is wrong."""
    shown = os.path.relpath(path)
    try:
        tables = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise WorkshopError(shown, f"is not YAML ({' '.join(str(error).split())})", WAY_OUT) from error
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise WorkshopError(shown, "is not a list of tables", WAY_OUT)
    return [check_table(f"{shown}: table {table.get('id', i)}", table) for i, table in enumerate(tables, 1)]


def check_table(place: str, table: dict) -> TableDefinition:
    try:
        return TableDefinition.model_validate(table)
    except ValidationError as error:
        mistakes = error.errors(include_url=False)
        # A misspelt key causes two errors, because the right key is missing. Report the misspelt one: it is clearer.
        first = min(mistakes, key=lambda mistake: mistake["type"] != "extra_forbidden")
        source = f"{place}, {'.'.join(map(str, first['loc']))}"
        raise WorkshopError(source, first["msg"], first.get("ctx", {}).get("remedy", WAY_OUT)) from error


def table_definition(name: str) -> TableDefinition:
    """Return the table with this id."""
    return next(table for table in load_definitions() if table.id == name)
