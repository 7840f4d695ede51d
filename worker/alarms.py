"""What the log says of drift: a fall is a warning, a new workload is news."""

from collections.abc import Iterable

import structlog

from storage.drift import FALL, Alarm

log = structlog.get_logger()


def tell(drafter: str, alarms: Iterable[Alarm]) -> None:
    for alarm in alarms:
        write = log.warning if alarm.finding.kind == FALL else log.info
        write(f"drift.{alarm.finding.kind}", drafter=drafter, alarm=alarm.id, reason=alarm.finding.reason)
