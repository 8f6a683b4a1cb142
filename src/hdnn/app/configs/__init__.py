"""Configs of trainings: on tables, on images, on graphs."""
