"""The program: what a person runs."""
