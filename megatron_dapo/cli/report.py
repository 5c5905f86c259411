"""`megatron-dapo report`: runs as one HTML file."""

import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_dapo.cli.exit_codes import ExitCode
from megatron_dapo.monitor.writer import MetricsError
from megatron_dapo.report.page import report_page
from megatron_dapo.report.source import ReportError, read_run


def report_command(folders: Sequence[Path], out: Path | None) -> ExitCode:
    """Write the page of one run, or of two on the same axes, and print where it is."""
    file = out if out is not None else folders[0] / "report.html"
    try:
        page = report_page([read_run(folder) for folder in folders])
        file.write_text(page, encoding="utf-8")
    except (ReportError, MetricsError) as error:
        print(error, file=sys.stderr)
        return ExitCode.CONFIG
    except OSError as error:
        print(f"{file}: {error.strerror}; name another file with --out", file=sys.stderr)
        return ExitCode.FAILED
    print(file)
    return ExitCode.FINISHED
