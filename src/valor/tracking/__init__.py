"""What a run says about itself: metrics, timers, live progress, loggers and sample generations.

Nothing here imports torch, so that driver-side tools and grader processes start fast.
"""
