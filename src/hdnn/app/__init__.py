"""The program `hdnn`."""
