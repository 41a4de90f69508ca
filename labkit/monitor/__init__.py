"""What the notebook knows of a run, and how it finds out."""
