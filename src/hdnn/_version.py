"""The version of hdnn: the only place where it is written."""

__version__ = "0.3.0"
