"""Prints how many broken variants were noticed, and makes their list importable."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """`mutants killed: N/N`, over the variants that ran."""
    reports = [r for kind in ("passed", "failed") for r in terminalreporter.getreports(kind)]
    verdicts = [dict(report.user_properties).get("mutant") for report in reports]
    ran = [verdict for verdict in verdicts if verdict is not None]
    if ran:
        terminalreporter.write_line(f"mutants killed: {ran.count('killed')}/{len(ran)}")
