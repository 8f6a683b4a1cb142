"""The commands of `hdnn`, a file each; `hdnn.app.cli` puts them together."""
