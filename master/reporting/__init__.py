"""Reports of a run: figures of its nodes, tables, `--json`, and the timeline."""
