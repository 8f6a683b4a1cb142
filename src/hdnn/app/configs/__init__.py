"""What trainings are asked to do: on tables, on images, on graphs."""
