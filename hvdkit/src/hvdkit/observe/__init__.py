"""What people and tools see of a run.

telemetry.Telemetry     progress lines, metrics.jsonl, TensorBoard, summary.json
trackers.Tracker        what a class for --trackers must have
records.Records         a run's folder, read back
report, compare         `hvdkit report`, `hvdkit compare`
pages                   self-contained HTML pages with SVG plots
speed                   figures of --benchmark
profile                 --profile: where the time of some steps goes
"""
