"""What people and tools see of a run.

telemetry.Telemetry     progress lines, metrics.jsonl, TensorBoard, summary.json
trackers.Tracker        what a class for --trackers must have
records.Records         a run's folder, read back
report, compare         `hvdkit report`, `hvdkit compare`
plots, html             SVG plots and self-contained pages
speed, flops            figures of --benchmark
"""
