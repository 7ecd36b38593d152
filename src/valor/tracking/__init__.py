"""Metrics, timers, progress, loggers, samples and run folders. No torch here, so that driver-side tools start fast."""
