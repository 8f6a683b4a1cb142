"""What a training does from its config to its folder: on tables, on images, on graphs."""
