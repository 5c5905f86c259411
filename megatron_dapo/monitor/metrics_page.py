"""The metrics reference: one Markdown page made from the catalog, so that it cannot drift."""

from megatron_dapo.monitor.catalog import GROUPS, Metric

HEADER = """# Metrics reference

Made from the code by `make docs`; a test keeps it equal. `<run.dir>/metrics.jsonl` holds one JSON object a rollout
step; TensorBoard has the same values under `<run.dir>/tensorboard`, over rollout steps and over optimizer steps.

- A value that was not measured in a step is absent or null. A value that was not finite is null, and its name stands in
  the line's `non_finite`.
- After a resume, lines of steps beyond the checkpoint are superseded by later lines.
- After the unit stands how the values inside a rollout step become one; a mean is always sum / count over the whole
  step.
- Figures are those of arXiv 2503.14476.
"""


def metrics_page() -> str:
    """Markdown: a list a group of metrics, `name` (unit, reduction): meaning, figure."""
    parts = [HEADER]
    for title, metrics in GROUPS.items():
        parts.append("\n".join([f"## {title}", "", *map(_entry, metrics), ""]))
    return "\n".join(parts)


def _entry(metric: Metric) -> str:
    figure = f" Fig. {metric.figure}." if metric.figure else ""
    return f"- `{metric.name}` ({metric.unit}, {metric.reduce}): {metric.help}{figure}"
