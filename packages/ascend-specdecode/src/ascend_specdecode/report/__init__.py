"""Reports of finished runs: plots as PNG and one self-contained HTML page (extra ``report``)."""

from __future__ import annotations

from ascend_specdecode.report.page import write_report
from ascend_specdecode.report.record import RunRecord, RunSummary, read_record, write_record

__all__ = ["RunRecord", "RunSummary", "read_record", "write_record", "write_report"]
