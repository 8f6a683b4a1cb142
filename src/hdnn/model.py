"""Until all users of `hdnn.model` are rewritten."""

from hdnn.heads import Model as Model
