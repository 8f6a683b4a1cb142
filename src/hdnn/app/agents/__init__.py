"""Trainings of closed loops on disk: what `hdnn control` makes, measures, draws and reports."""
