"""Trainings, from the config to the finished folder: on tables, on images, on graphs."""
