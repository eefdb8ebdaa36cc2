"""What a run tells: ``metrics.jsonl``, the line a step, the loss curve."""

from ds4d.monitor.monitor import Monitor

__all__ = ["Monitor"]
