"""The tables, as typed SQLAlchemy mappings. Rows do not leave storage: see views, jobs, windows, history.

Times are UTC. Enumerations are strings under a check. A version is never edited; what state it is in follows
from the pointer, the evaluations and the events (`storage/views`).
"""

from storage.tables.drafters import (
    DrafterRow,
    EvaluationRow,
    EventRow,
    IntervalRow,
    MarkRow,
    PointerRow,
    QuarantineRow,
    SuccessorRow,
    TargetChangeRow,
    VersionRow,
)
from storage.tables.hosts import PushStepRow
from storage.tables.learning import LeftOutRow, PurgeRow, TrainingRow, WindowPurgeRow, WindowRecordRow, WindowRow
from storage.tables.operation import ApiKeyRow, AuditRow, JobRow, OutboxRow, ServerRow
from storage.tables.routing import OwnDrafterRow, RouteRow, RoutingRow, ScoredWindowRow, StandingRow
from storage.tables.traffic import AcceptanceRow, DriftAlarmRow, DriftSeriesRow, FoldedRow, ObservationRow, WatchRow

__all__ = [
    "AcceptanceRow",
    "ApiKeyRow",
    "AuditRow",
    "DrafterRow",
    "DriftAlarmRow",
    "DriftSeriesRow",
    "EvaluationRow",
    "EventRow",
    "FoldedRow",
    "IntervalRow",
    "JobRow",
    "LeftOutRow",
    "MarkRow",
    "ObservationRow",
    "OutboxRow",
    "OwnDrafterRow",
    "PointerRow",
    "PurgeRow",
    "PushStepRow",
    "QuarantineRow",
    "RouteRow",
    "RoutingRow",
    "ScoredWindowRow",
    "ServerRow",
    "StandingRow",
    "SuccessorRow",
    "TargetChangeRow",
    "TrainingRow",
    "VersionRow",
    "WatchRow",
    "WindowPurgeRow",
    "WindowRecordRow",
    "WindowRow",
]
