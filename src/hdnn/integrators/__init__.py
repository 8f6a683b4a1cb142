"""How a layer steps: the mechanisms under `hdnn.functional`, one idea a file."""
