"""Prints what the sweeps counted, at the end, whichever process ran them."""

from __future__ import annotations

import textwrap


def pytest_terminal_summary(terminalreporter) -> None:
    reports = [r for found in terminalreporter.stats.values() for r in found]
    for report in reports:
        if getattr(report, "when", "") == "call":
            for title, lines in report.user_properties:
                terminalreporter.write_line(f"{title}:\n{textwrap.indent(lines.strip(), '  ')}")
