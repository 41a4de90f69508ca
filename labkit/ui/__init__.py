"""What a person sees of a run, in a notebook or as text."""
