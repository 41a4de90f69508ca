"""A function from a cell as a folder that trains without a notebook."""
