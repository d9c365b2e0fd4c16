"""Decisions: what dispatch uses for a cell in an environment. The latest one counts; older ones stay."""

from __future__ import annotations

import dataclasses
from collections import defaultdict

from sqlalchemy import ColumnElement, select
from sqlalchemy.orm import Session

from autoflash.db import rows
from autoflash.db.schema import (
    CellRow,
    DecisionRow,
    EnvironmentRow,
    QuarantineRow,
    RankedRow,
    Role,
    SoftwareRow,
    VariantRow,
)
from autoflash.problem import Cell
from autoflash.trial import Decision, Environment, Ranked


def check(decision: Decision) -> None:
    """Refuse what must not enter the database, before it is touched.

    Raises:
        ValueError: for a decision for nothing, or a time or ratio that is no number.
    """
    if not decision.choices and decision.vendor is None:
        raise ValueError(f"a decision for {decision.cell} has neither a choice nor a vendor kernel")
    for ranked in (*decision.choices, *([decision.vendor] if decision.vendor is not None else [])):
        rows.ranked_row(0, Role.CHOICE, 0, 0, ranked)


def save(session: Session, decision: Decision) -> bool:
    """Append a decision, unless the database has it already.

    Returns:
        Whether it is new.
    """
    history = load(session, environment=decision.environment, cell=decision.cell, history=True)
    content = without_ids(decision)
    known = [without_ids(older) for older in history]
    # Equal content that was overruled by a decision of the same second may have become right again.
    if content in known and (known[-1] == content or known[-1].decided_at > content.decided_at):
        return False
    row = DecisionRow(
        cell_id=rows.find_or_add_cell(session, decision.cell).id,
        environment_id=rows.find_or_add_environment(session, decision.environment).id,
        software_id=rows.find_or_add_software(session, decision.environment).id,
        reason=rows.clean_text(decision.reason),
        decided_at=decision.decided_at,
    )
    session.add(row)
    session.flush()
    entries = [(Role.CHOICE, position, ranked) for position, ranked in enumerate(decision.choices)]
    if decision.vendor is not None:
        entries.append((Role.VENDOR, 0, decision.vendor))
    for role, position, ranked in entries:
        variant_id = rows.find_or_add_variant(session, ranked.variant).id
        session.add(rows.ranked_row(row.id, role, position, variant_id, ranked))
    session.flush()
    return True


def without_ids(decision: Decision) -> Decision:
    """The same decision as another database would hold it."""
    return dataclasses.replace(
        decision,
        choices=tuple(dataclasses.replace(ranked, trial_id=None) for ranked in decision.choices),
        vendor=None if decision.vendor is None else dataclasses.replace(decision.vendor, trial_id=None),
    )


def load(
    session: Session,
    *,
    environment: Environment | None,
    cell: Cell | None,
    history: bool,
) -> list[Decision]:
    """Decisions, oldest first: the latest of each cell and environment, or all of them.

    Entries whose trial was quarantined are left out (except from history), and so is a decision that has no other.
    """
    conditions: list[ColumnElement[bool]] = []
    if environment is not None:
        conditions.append(EnvironmentRow.key == environment.key)
    if cell is not None:
        conditions.append(CellRow.key == cell.key)
    query = (
        select(DecisionRow, CellRow, EnvironmentRow, SoftwareRow)
        .join(CellRow, CellRow.id == DecisionRow.cell_id)
        .join(EnvironmentRow, EnvironmentRow.id == DecisionRow.environment_id)
        .join(SoftwareRow, SoftwareRow.id == DecisionRow.software_id)
        .where(*conditions)
        .order_by(DecisionRow.decided_at, DecisionRow.id)
    )
    found = session.execute(query).all()
    latest = {(row.cell_id, row.environment_id): row.id for row, _, _, _ in found}
    entries = _entries(session, conditions)
    distrusted = set() if history else set(session.scalars(select(QuarantineRow.trial_id)))
    decisions = []
    for row, cell_row, environment_row, software in found:
        if not history and latest[row.cell_id, row.environment_id] != row.id:
            continue
        trusted = [(role, ranked) for role, ranked in entries[row.id] if ranked.trial_id not in distrusted]
        if not trusted:
            continue
        decisions.append(
            Decision(
                cell=rows.cell_of(cell_row),
                environment=rows.environment_of(environment_row, software),
                choices=tuple(ranked for role, ranked in trusted if role is Role.CHOICE),
                vendor=next((ranked for role, ranked in trusted if role is Role.VENDOR), None),
                reason=row.reason,
                decided_at=row.decided_at,
            )
        )
    return decisions


def _entries(session: Session, conditions: list[ColumnElement[bool]]) -> dict[int, list[tuple[Role, Ranked]]]:
    """Entries by decision, in their rank."""
    query = (
        select(RankedRow, VariantRow)
        .join(VariantRow, VariantRow.id == RankedRow.variant_id)
        .join(DecisionRow, DecisionRow.id == RankedRow.decision_id)
        .join(CellRow, CellRow.id == DecisionRow.cell_id)
        .join(EnvironmentRow, EnvironmentRow.id == DecisionRow.environment_id)
        .where(*conditions)
        .order_by(RankedRow.decision_id, RankedRow.role, RankedRow.position)
    )
    entries: dict[int, list[tuple[Role, Ranked]]] = defaultdict(list)
    for row, variant in session.execute(query):
        entries[row.decision_id].append((row.role, rows.ranked_of(row, rows.variant_of(variant))))
    return entries
