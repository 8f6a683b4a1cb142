"""The ground floor: files, memory, shapes, progress. It needs no other part of the package."""
